"""Datasets as a user sees them: opened, wrapped, mixed or packed, with decoded samples.

In: catalogs and options. Out: samples by index, and their place in extents. It owns what a sample looks like.
"""
