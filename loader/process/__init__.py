"""This process: its behaviour at the end of its parent, and what crosses between processes.

In: the end of other processes. Out: callbacks. It owns hooks of the interpreter.
"""
