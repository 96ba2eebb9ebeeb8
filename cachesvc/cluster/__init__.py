"""The members of the cluster, from what the operator already runs.

In: a static list, a file, DNS or etcd. Out: the addresses of the members, again whenever they change. It owns the watch
and, in etcd, this node's own entry.
"""
