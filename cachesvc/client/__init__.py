"""The client of a daemon: control over gRPC, extents and plans over the grants socket.

In: calls of the loader and of the command line. Out: granted descriptors, typed errors. It owns its connections and what
it repeats to a daemon that comes back (plans, identity).
"""
