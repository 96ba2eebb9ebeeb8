"""Sharing of this node's extents with other nodes, from a process of its own.

In: requests of peers. Out: extents and their checksums. It owns the sharer process.
"""
