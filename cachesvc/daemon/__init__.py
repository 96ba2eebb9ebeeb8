"""The daemon of one node, which executes the core's decisions.

In: readers, control calls, answers of fillers and disks. Out: grants, replies and metrics. `composition.py` builds
it, and `runner.py` is the only place where the core meets IO.
"""
