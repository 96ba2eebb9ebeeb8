"""Loaders over the same data, each behind one small Protocol (`peer.Peer`) and measured in its own process by
`python -m bench.peers`. A peer's packages are imported by its module only."""
