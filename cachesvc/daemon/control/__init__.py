"""The control API: gRPC in, calls on the loop and messages out.

In: requests of clients. Out: replies, progress and reports. It owns the server, its quotas of calls and connections, and
the file of pins.
"""
