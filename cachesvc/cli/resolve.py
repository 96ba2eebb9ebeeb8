"""Resolves a URI or dataset id on the command line to dataset versions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cachesvc.cli import output
from cachesvc.cli.options import ID_DIGITS, is_dataset_id
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.client.control import Control, DatasetInfo
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.core.safe_text import redacted
from cachesvc.sources.shard_lists import spelled_uris

if TYPE_CHECKING:
    from cachesvc.catalog.options import Options


def current_version(control: Control, target: str, options: Options, as_json: bool = False) -> DatasetId:
    """Return the dataset of an id, or the current one of a URI, whose catalog is built if needed."""
    if is_dataset_id(target):
        return by_id(control, target)
    return open_uris(control, [target], options, as_json).id


def by_id(control: Control, digits: str) -> DatasetId:
    """Return the dataset of an id or of its first digits.

    Digits are looked up among open datasets. Raises NotFound, and InvalidInput where several ids begin with them.
    """
    if len(digits) == ID_DIGITS:
        return DatasetId(digits)
    ids = sorted({row.dataset.id for row in control.list() if row.dataset.id.startswith(digits)})
    if not ids:
        raise NotFound(
            f"no open dataset has an id that begins with {digits} (cachesvc ls shows them), and no path has that name"
        )
    if len(ids) > 1:
        raise InvalidInput(f"{digits} begins the ids of {' and '.join(ids)}; give more digits")
    return DatasetId(ids[0])


def open_uris(
    control: Control, uris: list[str], options: Options, as_json: bool = False, refresh: bool = False
) -> DatasetInfo:
    """Open URIs as one dataset version; show progress while it is indexed, then print its notes."""
    mixed = [uri for uri in uris if is_dataset_id(uri)]
    if mixed:
        raise InvalidInput(f"{mixed[0]} is a dataset id; name the data by its URI here")
    named = [absolute_uri(each) for uri in uris for each in spelled_uris(uri)]
    with ProgressBar("index", as_json) as progress:
        opened = control.open_dataset(named, options, refresh=refresh, progress=progress.update)
    output.print_notes([*filter(None, [opened.stale]), *opened.notes], as_json)
    return opened


def all_versions(control: Control, target: str, options: Options) -> list[DatasetId]:
    """Return every version of a URI that the daemon knows, old ones included; where it knows none, the current one."""
    if is_dataset_id(target):
        return [by_id(control, target)]
    return known_versions(control, target) or [current_version(control, target, options)]


def known_versions(control: Control, target: str) -> list[DatasetId]:
    """Return every version of a URI that the daemon knows, or the datasets whose ids begin with an id's digits."""
    rows = [row.dataset for row in control.list()]
    if is_dataset_id(target):
        return [DatasetId(row.id) for row in rows if row.id.startswith(target)]
    wanted = _bare(redacted(absolute_uri(target)))
    return [DatasetId(row.id) for row in rows if _bare(row.uri) == wanted]


def absolute_uri(uri: str) -> str:
    """Return a local path as the daemon names it: absolute, with links resolved. Other URIs are unchanged.

    Raises InvalidInput for an empty name, which would be the working directory, and for a name that is not UTF-8.
    """
    if not uri.strip():
        raise InvalidInput("an empty URI names nothing; write . for the working directory")
    _check_utf8(uri)
    if "://" in uri:
        return uri
    path = os.path.realpath(os.path.expanduser(uri))
    _check_utf8(path)  # includes the working directory and the targets of links
    return f"{path}/" if uri.endswith("/") and path != "/" else path


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"a name is not UTF-8: {os.fsencode(name)!r}; rename it") from None


def _bare(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")
