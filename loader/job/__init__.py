"""The ranks of a job: who they are, that they agree, that they stay together, where they stand.

In: environment, mesh, process group, saved states. Out: topology, states, typed errors on every rank. It owns what is
written into the job's store.
"""
