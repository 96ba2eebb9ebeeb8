"""The daemon's child processes: spawning, forking, priorities, logs, threads and memory.

In: modules to run and jobs for them. Out: channels to the processes, answers and exit codes. It owns the fork server.
"""
