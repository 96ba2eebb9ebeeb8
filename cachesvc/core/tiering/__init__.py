"""Decides which extents are in which tier, and which are evicted.

In: extents, budgets and claims. Out: placements, evictions, shares, and the bound of the hit rate. It owns copies and the
bytes of tiers.
"""
