"""Decides how often something is tried: backoff, request rates, and circuit breakers.

In: outcomes and times. Out: when the next try may be. It owns the counters of one source or tier.
"""
