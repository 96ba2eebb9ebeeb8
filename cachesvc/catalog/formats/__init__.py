"""The formats of datasets, one module each.

In: the objects of a dataset, and reads of their heads. Out: a draft of its catalog. Nothing outside knows a format's
framing.
"""
