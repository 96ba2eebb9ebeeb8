"""Reads extents: leased from the daemon, local, or filled by this process.

In: addresses. Out: bytes in buffers or views. It owns leases, mappings and descriptors.
"""
