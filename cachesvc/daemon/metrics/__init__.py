"""Prometheus metrics, and the HTTP server for scrapes.

In: the core's status. Out: text. It owns the scrapers' threads.
"""
