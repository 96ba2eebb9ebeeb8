"""Makes batches: reads, decodes and collates samples, and moves batches to a device.

In: positions of the sample order, and readers. Out: batches, with reports of bad samples and of the time that steps
waited. It owns the memory of batches.
"""
