"""Gets batches onto a CUDA device: copies ahead of use, gathers by the device itself, and decoding of pictures there.

In: batches in CPU memory, or the extents that a reader holds mapped. Out: batches in device memory. It owns the side
stream, the registration of extents with the driver, and the pinned memory of copies under way.
"""
