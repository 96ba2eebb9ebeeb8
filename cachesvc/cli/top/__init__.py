"""`cachesvc top`: the status of this node, live, on a terminal.

In: statuses of the daemon, and keys. Out: screens of lines. It owns what is selected and how rows are sorted.
"""
