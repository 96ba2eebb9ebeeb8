"""How often something is tried: backoff, and breakers of what fails.

In: outcomes and times. Out: when the next try may be. It owns the counters of one source or tier.
"""
