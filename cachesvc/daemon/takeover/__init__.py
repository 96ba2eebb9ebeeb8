"""The takeover: a new daemon replaces a running one under load, and readers keep their connections.

In: the old daemon's sockets, leases and memory. Out: the same, served by the new daemon. It owns the protocol between them.
"""
