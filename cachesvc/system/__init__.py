"""Interfaces to the operating system: memory and its limits, mappings, datagrams with descriptors, forks.

In: sizes, addresses, sockets. Out: the kernel's answers, and the memory that the daemon's processes need. It owns the
hooks of forks.
"""
