"""The control API: gRPC requests in, calls on the loop and replies out.

In: requests of clients. Out: replies, progress and reports. It owns the gRPC server, the cap on calls and the file of
pins.
"""
