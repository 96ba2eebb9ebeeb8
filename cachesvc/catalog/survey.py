"""Surveys a dataset before it is compiled: lists its objects, finds its format, and names its version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from cachesvc.catalog.compiler import ListedObject
from cachesvc.catalog.format_choice import Choice, choose
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.listing import check_all_chosen, listing, name_of
from cachesvc.catalog.options import PROJECTED, Options
from cachesvc.catalog.splits import ALL, canonical_split, check_one_split, choose_split
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import EXTENT_BYTES, PAGE_BYTES, DatasetId, ObjectVersion
from cachesvc.sources.source import Source

_Sources = Callable[[str], Source]
_FORMAT_OPTIONS = (
    "dtype",
    "seq_len",
    "overlap",
    "record_bytes",
    "header_bytes",
    "labels_from",
    "label_kind",
    "on_error",
    "separator",
)
"""Options that only some formats have."""

_ID_VERSION = 14
"""Part of every dataset's id. Saved states name ids, and states of the previous release load. So it stays where samples are
numbered as before: a state also names their number."""
_LATER_OPTIONS = frozenset({"split", "separator"})
"""Options that were added since, which are part of an id only where they are given."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A dataset version before it is compiled.

    `options.format` is resolved; `found_out`: it was inferred, not given. `left_out` counts listed objects that are not
    part of the dataset, `first_left_out` is the URI of one. `beside` is a catalog left with
    the data, not checked yet. `litter`: see `Listing`. `notes`: on what the chosen split left out.
    """

    id: DatasetId
    uri: str
    options: Options
    entries: tuple[ListedObject, ...]
    beside: ObjectVersion | None
    found_out: bool = False
    left_out: int = 0
    first_left_out: str = ""
    litter: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """The format's name."""
        return self.options.format

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the catalog may have: files that no option names so may be JSON lines."""
        return (self.format, "jsonl") if self.found_out and self.format == "files" else (self.format,)


def survey(uris: Sequence[str], options: Options, sources: _Sources) -> Survey:
    """List the objects, find the format, and compute the version's digest. Reads no data.

    Raises NotFound for an empty dataset or an empty part of it, InvalidInput for unknown, ambiguous or several formats and
    for several splits, and the errors of the source.
    """
    options = replace(options, extent_bytes=options.extent_bytes or EXTENT_BYTES)
    if not uris or options.extent_bytes < PAGE_BYTES or options.extent_bytes % PAGE_BYTES:
        raise InvalidInput(f"a dataset needs a URI, and extent_bytes in multiples of {PAGE_BYTES}")
    uri = name_of(uris)
    listed = listing(uris, sources)
    found, notes = listed.entries, list[str]()
    if options.split not in ("", ALL):
        found, notes = choose_split(uri, found, options.split)
    choice = choose(uri, found, listed.zarrs, listed.manifests, options)
    if not options.split:
        check_one_split(uri, choice.entries, _may_hold_rows(choice))
    split = "" if options.split == ALL else canonical_split(options.split)
    options = replace(options, split=split, fields=options.fields if choice.format in PROJECTED else "")
    resolved = replace(options, format=choice.format)
    entries = tuple(choice.entries)
    if not entries:
        raise NotFound(f"{uri} holds no {resolved.format} data among its {len(found)} objects")
    check_all_chosen(uris, listed, entries, f"{split} {resolved.format}".strip())
    _check_options(uri, resolved)
    left_out = len(found) - len(entries)
    taken = {entry.object.uri for entry in entries} if left_out else set()
    # Which files are samples depends on whether the format was given.
    opened = options if choice.found_out and choice.format == "files" else resolved
    return Survey(
        id=_digest(opened, entries),
        uri=uri,
        options=resolved,
        entries=entries,
        beside=listed.beside,
        found_out=choice.found_out,
        left_out=left_out,
        first_left_out=next(uri for each in found if (uri := each.object.uri) not in taken)
        if left_out
        else "",
        litter=listed.litter,
        notes=tuple(notes),
    )


def _may_hold_rows(choice: Choice) -> bool:
    """Tell whether a file may hold many samples. Files called `.json` may be JSON lines, which are seen when they are
    read."""
    rows = choice.found_out and all(entry.extension == "json" for entry in choice.entries)
    return rows or not FORMATS[choice.format].file_is_sample


def _check_options(uri: str, options: Options) -> None:
    """Raise InvalidInput for an option that this format ignores.

    Such an option would have no effect, and yet make another dataset version.
    """
    for name in _FORMAT_OPTIONS:
        formats = [format for format, each in FORMATS.items() if name in each.options]
        given = getattr(options, name)
        if given and given != "none" and options.format not in formats:
            option = f"labels={options.labels!r}" if name.startswith("label") else f"{name}={given!r}"
            raise InvalidInput(
                f"{option} is for {' and '.join(formats)}, and {uri} is read as {options.format}"
            )


def _digest(options: Options, entries: Sequence[ListedObject]) -> DatasetId:
    digest = hashlib.blake2b(digest_size=16)
    given = {name: value for name, value in asdict(options).items() if value or name not in _LATER_OPTIONS}
    digest.update(json.dumps([_ID_VERSION, given], sort_keys=True).encode())
    for entry in entries:
        version = entry.object
        row = json.dumps([version.uri, version.size_bytes, version.etag, entry.path])
        digest.update(row.encode() + b"\n")
    return DatasetId(digest.hexdigest())


def provisional_id(dataset: str) -> DatasetId:
    """Return the id of a dataset's extents while it is indexed."""
    return DatasetId(hashlib.blake2b(f"provisional {dataset}".encode(), digest_size=16).hexdigest())
