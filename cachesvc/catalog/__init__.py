"""Compiles a dataset's objects to a catalog: its samples, and the address of each.

In: listings and the beginnings of objects. Out: one immutable file for each dataset version, and searches in it. It owns
the rule that decides the format of a folder.
"""
