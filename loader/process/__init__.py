"""This process: its behaviour at a fork, at the end of its parent, and of its heap.

In: forks and the end of other processes. Out: callbacks. It owns hooks of the interpreter.
"""
