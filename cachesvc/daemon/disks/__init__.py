"""The health and size of tiers: opening, watching, losing and renewing directories, and budgets.

In: answers and silences of disks, free space and free memory. Out: events for the core. It owns one watch for each tier.
"""
