"""Fills, checks, evictions and builds, and the processes that run them.

In: commands of the core. Out: filled and verified copies, catalogs, errors. It owns the filler processes and their jobs.
"""
