"""The client of a daemon: control over gRPC, extents and plans over the grants socket.

In: calls of the loader and of the command line. Out: granted descriptors, typed errors. It owns its connections and the
state that it sends again to a restarted daemon (plan, leases, identity).
"""
