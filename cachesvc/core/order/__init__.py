"""Decides the order of samples as a function of seed, epoch and position.

In: sizes of extents, an `OrderSpec`, positions. Out: samples, and the plan of extents that a rank touches. It owns no
state and knows nothing of the node.
"""
