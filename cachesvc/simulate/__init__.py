"""Runs the core under a virtual clock.

In: sizes, rates and policies. Out: hit rates, source rates and stalls, beside those of reference policies. It owns the
clock and a seeded source.
"""
