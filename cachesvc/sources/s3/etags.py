"""Entity tags, compared weakly (RFC 9110, 8.8.3.2): reads need the same object, not the same response.

Quotes and `W/` are syntax: listings carry tags in XML, responses in headers, and gateways rewrite one of them. Hex digests
are compared without case; other tags are opaque.
"""

from __future__ import annotations

import re

_DIGEST = re.compile(r"[0-9a-fA-F]{32,128}(?:-[0-9]{1,5})?")


def same(tag: str, other: str) -> bool:
    """Tell whether two tags name the same version of an object."""
    return _opaque(tag) == _opaque(other)


def is_strong(tag: str) -> bool:
    """Tell whether `If-Match` can succeed with a tag: it compares strongly, so a weak tag matches nothing."""
    return bool(tag) and tag[:2] not in ("W/", "w/")


def _opaque(tag: str) -> str:
    tag = tag.strip()
    tag = (tag if is_strong(tag) else tag[2:]).strip('"')
    return tag.lower() if _DIGEST.fullmatch(tag) else tag
