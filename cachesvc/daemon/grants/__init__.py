"""The grants socket: readers in, descriptors out.

In: requests, plans and releases of readers. Out: grants, refusals, recalls. It owns the connections and what each was sent.
"""
