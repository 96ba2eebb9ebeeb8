"""Makes batches: which samples, gathered or decoded, collated, moved to a device.

In: positions of the order, readers. Out: batches, and what was bad or waited for. It owns the buffers of batches.
"""
