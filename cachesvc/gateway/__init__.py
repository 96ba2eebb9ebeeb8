"""The cache for programs that read files by fsspec (pandas, pyarrow, zarr and others), or open and map them by a path.

In: URLs `cachesvc://...`, URIs of objects. Out: listings, bytes and paths of files. It owns the snapshots that it has open,
and the leases of the extents that it reads.
"""
