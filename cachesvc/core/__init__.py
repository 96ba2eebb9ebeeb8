"""Decides what is fetched, kept, evicted and answered, and in which order samples come.

In: events and the time. Out: commands, placements and samples. It owns all state that a decision needs, and does no IO: it
never awaits, locks, logs, reads clocks or draws randomness.
"""
