"""The grants socket: readers connect here and receive descriptors.

In: requests, plans and releases of readers. Out: grants, refusals, recalls. It owns the connections.
"""
