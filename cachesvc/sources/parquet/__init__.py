"""Decodes row groups of Parquet files into extents.

In: footers and stored bytes of column chunks. Out: row groups to plan extents by, and tables of decoded values. It owns
no state but the row groups of the last few files.
"""
