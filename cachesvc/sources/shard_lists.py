"""Reads URIs as WebDataset writes them: lists joined by `::`, and `pipe:` commands that only print one URL."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from cachesvc.core.errors import InvalidInput

_PART = re.compile(r"[A-Za-z][\w+.-]*://|/|\.{1,2}/|~|pipe:|.*\.tar")
"""How a part of a list begins, so that a key may contain `::`."""
_QUIET = re.compile(r"-[sSLfgk#]+|--(silent|show-error|location|fail|globoff|compressed|progress-bar)")
_COUNTED = ("--retry", "--retry-delay", "--retry-max-time", "--connect-timeout", "--max-time", "-m")
"""Options of curl that take a number."""
_NO_PROGRESS = re.compile(r"--(quiet|no-progress|only-show-errors|no-sign-request)|-q")
_SHELL = re.compile(r"[|&;<>`]|\$\(")
_ENDING = re.compile(r"\s*(\|\|\s*(true|:)|2>\s*/dev/null)\s*$")
_KNOWN = "curl URL, wget -O - URL, aws s3 cp URL -, gsutil cat URL, gcloud storage cat URL, s5cmd cat URL and cat PATH"


def spelled_uris(text: str) -> list[str]:
    """Return the URIs that a text stands for: one, or several joined by `::`. Commands become the URLs that they print.

    Raises InvalidInput for a command that does anything else.
    """
    parts = text.split("::")
    if len(parts) == 1 or not all(_PART.match(part) for part in parts):
        parts = [text]
    return [_printed(part) if part.startswith("pipe:") else part for part in parts]


def _printed(pipe: str) -> str:
    """Return the URL or path that a command prints."""
    command = pipe.removeprefix("pipe:").strip()
    while (shorter := _ENDING.sub("", command)) != command:
        command = shorter
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words or _SHELL.search(command):
        raise _refused(pipe, "is more than one plain command")
    for program, read in _READERS.items():
        name = program.split()
        if words[: len(name)] == name:
            found, unknown = read(words[len(name) :])
            if unknown:
                raise _refused(pipe, f"has {unknown!r}, which is not translated")
            return found
    raise _refused(pipe, f"runs {words[0]!r}")


def _curl(words: Sequence[str]) -> tuple[str, str]:
    rest, at = [], 0
    while at < len(words):
        if words[at] in _COUNTED:
            at += 1
        elif not _QUIET.fullmatch(words[at]):
            rest.append(words[at])
        at += 1
    return _only(rest)


def _wget(words: Sequence[str]) -> tuple[str, str]:
    text = " ".join(words)
    if not re.search(r"(^| )(-q?O ?-|--output-document[= ]-)( |$)", text):
        return "", "no -O -"
    return _only(re.sub(r"(^| )(-q?O ?-|--output-document[= ]-|-q|-nv|--quiet)(?= |$)", " ", text).split())


def _copied_to_stdout(words: Sequence[str]) -> tuple[str, str]:
    rest = [word for word in words if not _NO_PROGRESS.fullmatch(word)]
    return _only(rest[:-1]) if rest[-1:] == ["-"] else ("", "another target than -")


def _cat(words: Sequence[str]) -> tuple[str, str]:
    return _only([word for word in words if not _NO_PROGRESS.fullmatch(word)])


def _only(words: Sequence[str]) -> tuple[str, str]:
    """Return (URL, "") of one word that is no option; else ("", what is too much)."""
    options = [word for word in words if word.startswith("-")]
    if options or len(words) != 1:
        return "", next(iter(options), " ".join(words[1:]) or "no URL")
    return words[0], ""


_READERS = {
    "curl": _curl,
    "wget": _wget,
    "aws s3 cp": _copied_to_stdout,
    "gsutil cp": _copied_to_stdout,
    "gsutil cat": _cat,
    "gsutil -q cat": _cat,
    "gcloud storage cat": _cat,
    "s5cmd cat": _cat,
    "cat": _cat,
}


def _refused(pipe: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{pipe!r} {why}: commands are not run; write the URL itself, or one of {_KNOWN}, which become their URL"
    )
