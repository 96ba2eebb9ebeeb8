"""Measures what clusters of real daemons fetch, hit and move."""
