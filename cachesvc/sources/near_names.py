"""Finds the name that was perhaps meant where there is none of that name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

_HINT = re.compile(r"; did you mean `(.*)`\?$")
MOST = 1000
"""Names that are compared: a page of a listing."""


def near(name: str, names: Iterable[str]) -> str:
    """Return the name that is most like `name`: in other case, its beginning, or with few other letters. "" for none."""
    by_folded = {each.strip("/").casefold(): each for each in names}
    wanted = name.strip("/").casefold()
    if wanted in by_folded:
        return by_folded[wanted]
    close = difflib.get_close_matches(wanted, by_folded, 1, 0.75)
    longer = sorted(each for each in by_folded if len(wanted) > 2 and each.startswith(wanted))
    found = close or longer[:1]
    return by_folded[found[0]] if found else ""


def hint(text: str, uri: str) -> str:
    """Return an error's text with a question for `uri`."""
    return f"{text}; did you mean `{uri}`?"


def allowed_hint(text: str, allowed: Callable[[str], bool]) -> str:
    """Return an error's text without a question for a URI that is not `allowed`: its name is not for this user."""
    found = _HINT.search(text)
    return text if found is None or allowed(found[1]) else _HINT.sub("", text)
