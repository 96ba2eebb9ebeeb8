"""Computes what a run has read, and will read, from its saved state, without reading data.

In: the file of a saved state, and the catalog of the dataset version that the state names. Out: the samples of any step,
the steps of any sample, the run's digest, and the extents that a node reads next. It owns the form of the folder in which
`pack` keeps what it counted.
"""
