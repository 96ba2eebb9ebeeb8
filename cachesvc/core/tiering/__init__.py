"""Decides what lies in which tier, and what gives way.

In: extents, budgets and claims. Out: places, evictions, shares and the bound of the hit rate. It owns copies and the bytes
of tiers.
"""
