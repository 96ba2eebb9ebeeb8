"""This process: what happens at a fork, when its parent dies, and to its heap.

In: forks and signals. Out: callbacks. It owns hooks of the interpreter.
"""
