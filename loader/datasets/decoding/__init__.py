"""Decodes the bytes of fields.

In: bytes, with the extension or encoding of their field. Out: Python values, arrays and images. It owns nothing.
"""
