"""Fills, checks and builds, and the processes that do them.

In: commands of the core. Out: filled and verified copies, catalogs, errors. It owns the fillers and their jobs.
"""
