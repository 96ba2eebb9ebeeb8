"""Secrets that people write into URLs, kept out of everything that is shown."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)([^/\s?#'\"]+|[^/\s?#'\":\[]*:(?!\d+(?:/|$))[^\s'\"]+)@")
"""Up to the last `@` before the path: a password may hold some. It may hold what ends it, too, as AWS's keys do: a colon
that no port follows begins one."""
_QUERY = re.compile(
    r"(?i)(?<=[?&#])((?:[a-z0-9_-]*(?:signature|token|secret|password|credential|apikey|api_key|key|auth|passwd|pwd)|sig|se|sp|sv|pass|code)=)"
    r"[^&\s'\"#)]+"
)
_FRAGMENT = re.compile(r"(?i)(\bhttps?://[^\s'\"#]*#)[^\s'\"]+")
"""Of web addresses only: elsewhere `#` is a character of a key."""


def redacted(text: str, beside: str = "") -> str:
    """The text without the user part of its URLs (also where a library repeats it without the URL, or the URL stands in
    what is said beside it), the values of query parameters that sign or log in, and the fragments of web addresses."""
    if "://" not in text and "://" not in beside:
        return text
    users = {*_USER.findall(text), *_USER.findall(beside)}
    text = _FRAGMENT.sub(r"\1***", _QUERY.sub(r"\1***", _USER.sub("***@", text)))
    for user in users:
        text = text.replace(f"{user}@", "***@")
    return text
