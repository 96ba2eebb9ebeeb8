"""Kinds of samples: one class for each kind of data, all of which read, decode and batch samples by their ids.

In: ids of samples, and a reader of extents. Out: samples, and batches that take no Python call per sample. It owns the form
of a sample.
"""
