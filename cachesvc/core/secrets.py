"""Secrets that people write into URLs, kept out of everything that is shown."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/\s?#@'\"]+@(?=[^/\s@]*)")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:[a-z0-9_-]*(?:signature|token|secret|password|credential|apikey|api_key|key)|sig|se|sp|sv)=)"
    r"[^&\s'\"#)]+"
)


def redacted(text: str) -> str:
    """The text without the user part of its URLs and the values of query parameters that sign or log in."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))
