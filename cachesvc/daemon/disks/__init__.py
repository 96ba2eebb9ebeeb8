"""The health and size of the tiers: opening, watching, losing and renewing cache directories, and budgets.

In: answers and stalls of disks, free space, free memory. Out: events for the core. It owns a watch and the threads of each
tier.
"""
