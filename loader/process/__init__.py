"""This process: its behaviour at the end of its parent, its heap, and values that its threads share.

In: the end of other processes. Out: callbacks. It owns hooks of the interpreter.
"""
