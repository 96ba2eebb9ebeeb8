"""Other loaders over the same data, each behind the same small Protocol (`peer.Peer`), each measured in a process
of its own by `python -m bench.peers`. Nothing here imports what only one of them needs, but that one's module."""
