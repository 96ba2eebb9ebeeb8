"""Columns of rows as Arrow lays them out: their types, and the buffers that hold their values.

In: Arrow's types and arrays. Out: `Column`, which a catalog stores, and extents of buffers at places that a catalog knows.
It owns no state.
"""
