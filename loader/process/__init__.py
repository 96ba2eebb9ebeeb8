"""This process: its behaviour at the end of its parent, and of its heap.

In: the end of other processes. Out: callbacks. It owns hooks of the interpreter.
"""
