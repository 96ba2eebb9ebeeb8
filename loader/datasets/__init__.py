"""Datasets as a user sees them: opened, wrapped, mixed, packed, with samples decoded.

In: catalogs and options. Out: samples by index, and where they lie. It owns the form of a sample.
"""
