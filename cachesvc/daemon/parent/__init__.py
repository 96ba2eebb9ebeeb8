"""The main process of the service: it holds the memory of copies in RAM, and runs the daemon as its child.

In: copies that the daemon has filled, signals, requests for an upgrade. Out: the same copies, to the next daemon. It owns
the lifetime of the daemon's process, so that a crash, a kill and an upgrade lose nothing that is in RAM.
"""
