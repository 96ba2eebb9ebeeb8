"""One daemon takes over from another under load.

In: the old daemon's sockets, leases and memory. Out: the same, served by the new one. It owns the hand-over's protocol.
"""
