"""The records that the node's parts share, and containers that change in small steps.

In: extents, copies, and work on many of them. Out: records, eviction lists, fair queues. It owns the data and makes no
decision.
"""
