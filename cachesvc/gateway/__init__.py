"""The cache for programs that read files by fsspec: pandas, polars, pyarrow, Hugging Face datasets, zarr, xarray.

In: URLs `cachesvc://...`. Out: listings and bytes of files. It owns the snapshots that it has open, and the leases of
the extents that it reads.
"""
