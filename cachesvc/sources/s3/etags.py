"""Entity tags, compared as RFC 9110, section 8.8.3.2, has it: weakly, for all that reads need is the same object.

Quotes and `W/` are syntax: listings carry tags in XML, answers in headers, and gateways change one and not the other. Hex
digests are compared without case, since the same digest is the same object in either; other tags are opaque.
"""

from __future__ import annotations

import re

_DIGEST = re.compile(r"[0-9a-fA-F]{32,128}(?:-[0-9]{1,5})?")


def same(tag: str, other: str) -> bool:
    """Tell whether two tags name the same version of an object."""
    return _opaque(tag) == _opaque(other)


def is_strong(tag: str) -> bool:
    """Tell whether `If-Match` can ever hold for a tag: it compares strongly, so a weak one matches nothing."""
    return bool(tag) and tag[:2] not in ("W/", "w/")


def _opaque(tag: str) -> str:
    tag = tag.strip()
    tag = (tag if is_strong(tag) else tag[2:]).strip('"')
    return tag.lower() if _DIGEST.fullmatch(tag) else tag
