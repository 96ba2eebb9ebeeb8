"""Makes text safe to show: hides the secrets in its URLs, and spells out characters that a terminal would obey."""

from __future__ import annotations

import re
from collections.abc import Iterator

_USER = re.compile(r"(?<=://)([^/\s?#'\"]+|[^/\s?#'\":\[]*:(?!\d+(?:/|$))[^\s'\"]+)@")
"""Up to the last `@` before the path: a password may hold some. It may hold what ends it, too, as AWS's keys do: a colon
that no port follows begins one."""
_QUERY = re.compile(
    r"(?i)(?<=[?&#])((?:[a-z0-9_-]*(?:signature|token|secret|password|credential|apikey|api_key|key|auth|passwd|pwd)|sig|se|sp|sv|pass|code)=)"
    r"[^&\s'\"#)]+"
)
_FRAGMENT = re.compile(r"(?i)(\bhttps?://[^\s'\"#]*#)[^\s'\"]+")
"""Of web addresses only: elsewhere `#` is a character of a key."""
_RUN = re.compile(r"[^\s'\"]+")
"""What no URL goes beyond."""


def redacted(text: str, beside: str = "") -> str:
    """The text without the user part of its URLs (also where a library repeats it without the URL, or the URL stands in
    what is said beside it), the values of query parameters that sign or log in, and the fragments of web addresses.
    Takes time in proportion to the text's length: others write names of objects."""
    if "://" not in text and "://" not in beside:
        return _QUERY.sub(r"\1***", text) if "=" in text else text
    users = {*_users(text), *_users(beside)}
    text = _RUN.sub(lambda run: _hidden(run[0]), text)
    for user in users:
        text = text.replace(f"{user}@", "***@")
    return text


def _users(text: str) -> Iterator[str]:
    for run in _RUN.findall(text):
        yield from _USER.findall(run[: run.rfind("@") + 1])


def _hidden(run: str) -> str:
    # Each search ends where the last `@` or `#` is: behind it none would succeed, however often it began.
    user = run.rfind("@") + 1
    run = _QUERY.sub(r"\1***", _USER.sub("***@", run[:user]) + run[user:])
    found = _FRAGMENT.search(run[: run.rfind("#", 0, len(run) - 1) + 2])
    return f"{run[: found.end(1)]}***" if found else run


def printable(text: str) -> str:
    """The text on one line, with line ends, escapes and all other invisible characters spelled out. Names of objects may
    hold them, and a terminal would obey them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
