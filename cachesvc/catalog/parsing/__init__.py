"""Parsers of bytes of unknown origin that formats, and the loader, share.

In: bytes, or windows of them. Out: values. It owns the limits on the sizes of their results.
"""
