"""Processes and threads: spawning, forking, priorities, logs, memory that is given back.

In: what is to run. Out: channels to it, and how it ended. It owns the fork server.
"""
