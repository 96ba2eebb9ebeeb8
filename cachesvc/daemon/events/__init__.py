"""Events of a node that an operator may ask about: openings, prefetches, refusals, lost tiers, crashes.

In: an `Event` from the part where it happens. Out: one log line, one line in the state directory, and the latest events
for clients. It owns the files of events and their limits.
"""
