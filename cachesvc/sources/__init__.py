"""Reads data from its origin: S3, local and network file systems, anything that fsspec opens.

In: URIs, object versions, ranges. Out: listings, and bytes of exactly the version that was listed, or a typed error. It
owns connections, retries and cached listings.
"""
