"""Catalogs as files, for the verbs that read one or write one.

In: a dataset's name or URI. Out: the catalog, and a copy of its file. It owns the temporary
files of catalogs that it builds.
"""
