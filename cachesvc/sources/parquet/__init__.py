"""Row groups of Parquet files, decoded into extents.

In: stored bytes of column chunks. Out: rows that the catalog's table names. It owns no state.
"""
