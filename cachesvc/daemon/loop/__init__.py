"""The daemon's event loop, and the threads that make blocking calls for it.

In: descriptors, timers, calls from other threads. Out: callbacks, one at a time. It owns the main thread.
"""
