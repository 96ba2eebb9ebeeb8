"""The formats of datasets, one module each; `all_formats.py` lists them.

In: the objects of a dataset, and reads of their heads. Out: a draft of its catalog. It owns every rule about the bytes of a
format.
"""
