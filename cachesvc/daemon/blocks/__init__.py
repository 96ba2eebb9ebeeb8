"""The bytes of extents on their way between nodes.

In: requests for blocks, and extents that are lent. Out: blocks that agree with their digests. It owns the connections.
"""
