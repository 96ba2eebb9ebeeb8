"""Gives other nodes what this one holds, from a process of its own.

In: requests of peers. Out: extents and their checksums. It owns the sharer process.
"""
