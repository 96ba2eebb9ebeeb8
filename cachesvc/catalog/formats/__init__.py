"""The formats of datasets, one module each; `all_formats.py` lists them.

In: the objects of a dataset, and reads of their heads, indices and footers, or of whole tars. Out: a draft of its catalog.
It owns every rule about the bytes of a format.
"""
