"""Storage of extents on this node: sealed memfds in RAM, files with checksums on NVMe.

In: extents to reserve, commit, open or evict. Out: descriptors. It owns the memory and the cache directories.
"""
