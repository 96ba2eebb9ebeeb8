"""Decodes row groups of Parquet files into extents of columns.

In: footers and stored bytes of column chunks. Out: row groups to plan extents by, and extents. It owns the footers of the
last few files.
"""
