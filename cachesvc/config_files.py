"""Finds the configuration files, and reads their sections `[[source]]` for the daemon and for processes that read without
one."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from cachesvc.config import SourceSection, parse_size
from cachesvc.core.errors import InvalidInput, NotAllowed, NotFound

log = logging.getLogger(__name__)
SYSTEM_FILE = "/etc/cachesvc/config.toml"
SECTION_KEYS = tuple(each.name.replace("_", "-") for each in fields(SourceSection))
"""The keys of a section `[[source]]`."""
FORM = "s3://BUCKET/,KEY=VALUE,..."
_PREFIX = re.compile(r"([a-z][a-z0-9+.-]*)://[^/,*?\[{]+(/[^,*?\[{]*)?")
_OF_S3 = ("endpoint", "region", "profile", "requester_pays", "anonymous")


def candidates(given: str | None) -> tuple[str, ...]:
    """Return the files that are read where they exist, the last one first in precedence; `given` is the only one where it
    is given."""
    if given:
        return (given,)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return (SYSTEM_FILE, f"{home}/cachesvc/config.toml")


def read_file(path: str) -> dict[str, Any] | None:
    """Return the keys and values of a file; None where there is no file. Raises NotAllowed, and InvalidInput for what is no
    TOML."""
    try:
        return dict(msgspec.toml.decode(Path(path).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotAllowed(
            f"{path} cannot be read ({error.strerror}); name another file with --config"
        ) from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is no TOML: {error}") from None


def nearest(key: str, known: Iterable[str], what: str) -> str:
    """Return the end of an error about an unknown key: the one that was perhaps meant, or all of them."""
    near = difflib.get_close_matches(key.replace("_", "-").lower(), known, 1)
    return f"; is it {near[0]}?" if near else f"; {what} are {', '.join(sorted(known))}"


def own_sections() -> tuple[SourceSection, ...]:
    """Return the sections for a process without a daemon, from the file of `CACHESVC_CONFIG` or the system's and the
    user's. A file that this user may not read is left out, with a warning. Raises NotFound, InvalidInput."""
    given = os.environ.get("CACHESVC_CONFIG")
    sections: list[object] = []
    for path in candidates(given):
        try:
            found = read_file(path)
        except NotAllowed as error:
            log.warning("sources are read without the sections of a file: %s", error)
            continue
        if found is None and given:
            raise NotFound(f"there is no configuration file {path}, which CACHESVC_CONFIG names")
        sections = (found or {}).get("source", sections)
    if not isinstance(sections, list):
        raise InvalidInput("source: write [[source]], or a list")
    return tuple(map(parse_source, sections))


def parse_source(given: object) -> SourceSection:
    """Parse a section of a file, or its text `PREFIX,KEY=VALUE,...`, where a key alone stands for true. Raises
    InvalidInput."""
    if isinstance(given, str):
        prefix, *pairs = given.split(",")
        split = [pair.partition("=") for pair in pairs]
        given = {"prefix": prefix} | {key: value if mark else True for key, mark, value in split}
    if not isinstance(given, dict):
        raise InvalidInput(f"{given!r} is no source; write [[source]] and its keys, or {FORM}")
    values: dict[str, object] = {}
    for key, value in given.items():
        if key not in SECTION_KEYS:
            raise InvalidInput(f"{key} is no key of a source{nearest(key, SECTION_KEYS, 'keys')}")
        values[key.replace("-", "_")] = value
    if isinstance(rate := values.get("bytes_per_s"), str):
        values["bytes_per_s"] = parse_size(rate)
    try:
        section = msgspec.convert(values, SourceSection, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"a source: {str(error).replace('_', '-')}") from None
    return _checked(section)


def _checked(section: SourceSection) -> SourceSection:
    found = _PREFIX.fullmatch(section.prefix)
    if found is None or found[1] == "file":
        raise InvalidInput(
            f"the source {section.prefix!r} is no prefix of URIs; write s3://BUCKET/ or longer"
        )
    of_s3 = [name.replace("_", "-") for name in _OF_S3 if getattr(section, name)]
    if of_s3 and found[1] != "s3":
        raise InvalidInput(f"the source {section.prefix} is not of S3, and has {of_s3[0]}; leave that out")
    if of_s3 and section.path:
        raise InvalidInput(
            f"the source {section.prefix} is read below a path, and has {of_s3[0]}; give one of the two"
        )
    if section.anonymous and section.profile:
        raise InvalidInput(
            f"the source {section.prefix} is anonymous, and has a profile; give one of the two"
        )
    if section.path and not section.path.startswith("/"):
        raise InvalidInput(f"the path {section.path!r} of the source {section.prefix} is not absolute")
    if not 0 <= section.requests_per_s < float("inf") or section.bytes_per_s < 0:
        raise InvalidInput(f"the source {section.prefix} has a rate that is no number from 0 on")
    return replace(section, prefix=section.prefix.rstrip("/") + "/")


def source_text(section: SourceSection) -> str:
    """Return the text that `parse_source` parses to this section."""
    values = {key: getattr(section, key.replace("-", "_")) for key in SECTION_KEYS[1:]}
    return ",".join(
        [section.prefix, *(f"{key}={value}".removesuffix("=True") for key, value in values.items() if value)]
    )
