"""The owner of each extent, and the nodes that hold it.

In: members with their weights, what nodes ask and report. Out: owners, and where to read an extent. It owns the roster of
members and the directory of the extents that this node owns.
"""
