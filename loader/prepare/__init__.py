"""In: a user's function that prepares samples, and the samples. Out: its identity, and records of what it makes of them, in
extents of the daemon or in this process. It owns the threads that prepare for the daemon.
"""
