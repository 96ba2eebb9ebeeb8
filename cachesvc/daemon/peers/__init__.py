"""This node as a member of a cluster, from a process of its own.

In: questions of the daemon and of other nodes. Out: where extents are, and their bytes. It owns the peer agent and the
daemon's link to it.
"""
