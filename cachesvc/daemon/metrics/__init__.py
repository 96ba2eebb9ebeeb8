"""Prometheus metrics and the HTTP server that answers scrapes.

In: the core's status, and counts of the daemon's other parts. Out: text. It owns the threads of the HTTP server.
"""
