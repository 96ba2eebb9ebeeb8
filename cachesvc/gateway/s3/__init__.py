"""The S3 endpoint of the node: any program that speaks S3 reads through the cache.

In: requests of HTTP, signed with keys that this process issues to users of the node. Out: the source's objects, read
through the daemon by the leases that every reader has; the source's listings and metadata; and writes, passed on to the
source. It owns the port, the keys and what it remembers of metadata; it has no cache of bytes.
"""
