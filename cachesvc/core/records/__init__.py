"""The records that the node's parts share, and containers that change in small steps.

In: extents, copies and work that touches many of them. Out: tables, eviction lists, fair queues. It owns the data, and no
decision.
"""
