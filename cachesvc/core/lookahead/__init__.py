"""Decides what is fetched next for readers that declared a plan.

In: plans and how far their ranks are. Out: the extents that are due, in order of need. It owns the plans, their cursors,
windows and schedules.
"""
