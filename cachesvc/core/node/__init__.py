"""The state machine of a node: `Node.handle(event, now) -> [command]`.

In: events of readers, fills, tiers and control. Out: commands for the executor. It owns readers, claims, prefetches,
retries and the scrub, and checks the invariants.
"""
