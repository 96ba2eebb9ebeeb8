"""Runs epochs: makes batches in this process, in worker processes or in threads, and hands them over in order.

In: the epochs to run. Out: batches in order. It owns the workers and the memory in which batches cross to the
trainer.
"""
