"""S3 and compatible storage.

In: listings, heads and ranged reads. Out: bytes of exactly the version that was listed, or a typed error. It owns sessions
and connections.
"""
