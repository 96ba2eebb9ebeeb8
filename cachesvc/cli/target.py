"""From what a user names, a URI or a dataset id, to the dataset versions that are meant."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cachesvc.cli.feedback import Feedback
from cachesvc.cli.notes import say_notes
from cachesvc.cli.options import ID_DIGITS, is_dataset_id
from cachesvc.client.control import Control, DatasetInfo
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.core.safe_text import redacted

if TYPE_CHECKING:
    from cachesvc.catalog.build import Options


def current(control: Control, target: str, options: Options, as_json: bool = False) -> DatasetId:
    """The dataset that a URI holds now, its catalog built if need be; or that an id names."""
    if is_dataset_id(target):
        return identified(control, target)
    return opened(control, [target], options, as_json).id


def identified(control: Control, digits: str) -> DatasetId:
    """The dataset of an id, or the open one whose id begins so. Raises NotFound, InvalidInput where several do."""
    if len(digits) == ID_DIGITS:
        return DatasetId(digits)
    found = sorted({row.dataset.id for row in control.list() if row.dataset.id.startswith(digits)})
    if not found:
        raise NotFound(
            f"no open dataset has an id that begins with {digits} (cachesvc ls shows them), and no path has that name"
        )
    if len(found) > 1:
        raise InvalidInput(f"{digits} begins the ids of {' and '.join(found)}; give more digits")
    return DatasetId(found[0])


def opened(
    control: Control, uris: list[str], options: Options, as_json: bool = False, refresh: bool = False
) -> DatasetInfo:
    """Resolve URIs to one dataset version, showing progress while it is indexed and then what it notes."""
    mixed = [uri for uri in uris if is_dataset_id(uri)]
    if mixed:
        raise InvalidInput(f"{mixed[0]} is a dataset id; name the data by its URI here")
    with Feedback("index", as_json) as feedback:
        found = control.open_dataset(
            [absolute(uri) for uri in uris], options, refresh=refresh, progress=feedback.update
        )
    say_notes(found.notes, as_json)
    return found


def versions(control: Control, target: str, options: Options) -> list[DatasetId]:
    """Every version of a URI that the daemon knows, old ones too; where it knows none, the current one."""
    if is_dataset_id(target):
        return [identified(control, target)]
    wanted = _bare(redacted(absolute(target)))
    known = [DatasetId(row.dataset.id) for row in control.list() if _bare(row.dataset.uri) == wanted]
    return known or [current(control, target, options)]


def absolute(uri: str) -> str:
    """A local path as the daemon will name it: it runs in another directory, and resolves links. Raises InvalidInput
    where nothing is named, which would be the working directory, and for bytes that are no text."""
    if not uri.strip():
        raise InvalidInput("an empty URI names nothing; write . for the working directory")
    _check_utf8(uri)
    if "://" in uri:
        return uri
    path = os.path.realpath(os.path.expanduser(uri))
    _check_utf8(path)  # the working directory, or what a link leads to
    return f"{path}/" if uri.endswith("/") and path != "/" else path


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"a name is not UTF-8: {os.fsencode(name)!r}; rename it") from None


def _bare(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")
