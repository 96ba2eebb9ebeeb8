"""Text that others have written, as it is shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """In one line, with line ends, escapes and whatever else is not seen spelled out: names of objects may hold them,
    and a terminal would obey."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
