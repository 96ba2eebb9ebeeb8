"""Compiles a dataset's objects to a catalog: which samples there are, and where each lies.

In: listings and the beginnings of objects. Out: one immutable LMDB file for each dataset version, and searches in it. It
owns the rule that says what a folder is.
"""
