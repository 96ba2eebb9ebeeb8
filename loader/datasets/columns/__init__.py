"""Rows of columns, read a batch at a time: one pass over each buffer, whatever the number of rows.

In: samples of a catalog whose layout is `Columns`. Out: lists of Python's values, and batches as torch's default collation
makes them. It owns no state.
"""
