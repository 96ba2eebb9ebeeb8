"""What the operating system gives: memory and its limits, mappings, datagrams with descriptors.

In: sizes, addresses, sockets. Out: what the kernel answers, and the memory that our own processes need. It owns nothing.
"""
