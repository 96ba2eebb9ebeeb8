"""Interfaces to the operating system: memory and its limits, mappings, targets of fills, datagrams with descriptors, forks.

In: sizes, addresses, sockets, descriptors to fill. Out: the kernel's answers, memory to receive into, and the memory that
the daemon's processes need. It owns the hooks of forks.
"""
