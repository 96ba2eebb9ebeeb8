"""Prometheus metrics and the HTTP server that answers scrapes.

In: the core's status. Out: text. It owns the threads of the HTTP server.
"""
