"""Who makes the batches of an epoch: this process, worker processes or threads.

In: the epochs to run. Out: batches in order. It owns workers and the memory that batches cross in.
"""
