"""The ranks of a job: their topology, their agreement before they read, their failures, their saved states.

In: environment, mesh, process group, saved states. Out: topology, states, typed errors on every rank. It owns the keys
in the job's store.
"""
