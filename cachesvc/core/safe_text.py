"""Makes text safe to show: hides the secrets in its URLs, and spells out characters that a terminal would obey."""

from __future__ import annotations

import re
from collections.abc import Iterator

_USER = re.compile(r"(?<=://)([^/\s?#'\"]+|[^/\s?#'\":\[]*:(?!\d+(?:/|$))[^\s'\"]+)@")
"""The user part: up to the last `@` before the path, since a password may contain one. A password may also hold
characters that end a host, as AWS keys do: a colon that no port follows begins a password."""
_QUERY = re.compile(
    r"(?i)(?<=[?&#])((?:[a-z0-9_-]*(?:signature|token|secret|password|credential|apikey|api_key|key|auth|passwd|pwd)|sig|se|sp|sv|pass|code)=)"
    r"[^&\s'\"#)]+"
)
_FRAGMENT = re.compile(r"(?i)(\bhttps?://[^\s'\"#]*#)[^\s'\"]+")
"""Fragments of web addresses only: elsewhere `#` is a character of a key."""
_WORD = re.compile(r"[^\s'\"]+")
"""A run of characters that a URL may consist of."""


def redacted(text: str, beside: str = "") -> str:
    """The text with `***` for the user part of URLs, the values of query parameters that sign or log in, and the
    fragments of web addresses. A user part is also hidden where it stands without its URL, and that URL is in the text or
    in `beside`. The time is proportional to the text's length: the text may hold names that others chose."""
    if "://" not in text and "://" not in beside:
        return _QUERY.sub(r"\1***", text) if "=" in text else text
    users = {*_users(text), *_users(beside)}
    text = _WORD.sub(lambda word: _hidden(word[0]), text)
    for user in users:
        text = text.replace(f"{user}@", "***@")
    return text


def _users(text: str) -> Iterator[str]:
    for word in _WORD.findall(text):
        yield from _USER.findall(word[: word.rfind("@") + 1])


def _hidden(word: str) -> str:
    # Each search ends at the last `@` or `#`, since no match can follow it: this keeps the time linear.
    user = word.rfind("@") + 1
    word = _QUERY.sub(r"\1***", _USER.sub("***@", word[:user]) + word[user:])
    fragment = _FRAGMENT.search(word[: word.rfind("#", 0, len(word) - 1) + 2])
    return f"{word[: fragment.end(1)]}***" if fragment else word


def printable(text: str) -> str:
    """The text on one line, with line ends, escapes and all other invisible characters spelled out. Names of objects may
    hold them, and a terminal would obey them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
