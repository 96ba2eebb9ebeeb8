"""Reads without a daemon: local files in place, everything else filled into this process.

In: extents of a catalog. Out: grants of them. It owns the descriptors and fills of this process, and its part of the
request rate that the processes of a user share.
"""
