"""Compiles WebDataset tars: members of an archive with one name up to its first dot are one sample.

They lie together, as a rule. Members that lie apart are joined where they begin in one extent or the next; a sample that is
spread wider is refused, since each of its reads would fill several extents.

A tar carries no index, so its headers are read once, through the cache, which is filled by that. Extents are cut at a fixed
size, and a member may span two. A compressed tar is decoded instead, and is one extent (`object_bytes.py`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import TextColumn, ints
from cachesvc.catalog.compiler import Draft, ExtentBytes, Inputs, ListedObject, names_of
from cachesvc.catalog.containers import compression_of
from cachesvc.catalog.formats.object_bytes import ObjectBytes
from cachesvc.catalog.formats.tar import BLOCK, TarMember, members
from cachesvc.catalog.kinds import kind_of
from cachesvc.catalog.labels.label_encoding import set_labels
from cachesvc.catalog.labels.label_tables import may_be_beside, read_tables, separate_tables
from cachesvc.catalog.labels.sample_names import SampleKeys
from cachesvc.catalog.labels.tags import SIDECAR_BYTES, SIDECARS, Tags
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound

_MAX_FIELDS = 64
_NAMED = 100
"""Number of damaged archives that an error names."""
_ANY_SIZE = 1 << 62
"""The size of an archive that is known only when it has been decoded."""
_WINDOW_BYTES = 16 << 10
"""Size of one read: a header and its small neighbours."""
_META = re.compile(r"__[^/]*__($|/)")
"""Names that the webdataset library skips: `__meta__`, and files in a folder of such a name."""
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the tars by their names, and possible tables about their samples."""
    tars = [entry for entry in entries if _is_tar(entry)]
    return [entry for entry in entries if _is_tar(entry) or may_be_beside(entry)] if tars else []


def _is_tar(entry: ListedObject) -> bool:
    return kind_of(entry.name) == "webdataset"


def compile_webdataset(inputs: Inputs) -> Draft:
    """Index every tar. Raises CorruptData naming archive and offset, NotFound where no member is a sample, InvalidInput for
    labels that are not found, and as `ObjectBytes` does."""
    if inputs.options.labels_from == "folder":
        raise InvalidInput(f"labels='folder' is for files, and {inputs.uri} is read as webdataset")
    split = separate_tables(inputs)
    tars = [at for at in split.rest if _is_tar(inputs.entries[at])]
    bodies = ObjectBytes(inputs, tars)
    space = AddressSpace([entry.object for entry in inputs.entries])
    total = sum(inputs.entries[at].object.size_bytes for at in tars)
    samples, done, names = _Collector(), 0, names_of(inputs.entries)
    damaged: dict[int, CorruptData] = {}
    for at in tars:
        uri, size = inputs.entries[at].object.uri, inputs.entries[at].object.size_bytes
        packed = bool(bodies.codecs[at])
        shard: _Shard | _PackedShard
        if packed:
            shard = _PackedShard(bodies.windows(at))
        else:
            shard = _Shard(inputs.data, bodies.first_extent[at], bodies.cut, size)
            if compression := compression_of(shard.read(0, min(BLOCK, size))):
                raise InvalidInput(
                    f"{uri} is compressed by {compression}: give it a name that says so, like .tar.gz"
                )
        samples.begin_shard(uri, names[at], shard, _ANY_SIZE if packed else bodies.cut)
        try:
            for member in members(uri, _ANY_SIZE if packed else size, shard.read):
                samples.add(member)
                inputs.progress(done + min(member.offset, size), total)
            samples.end_shard(bodies.add_to(space, at, shard.finish()))
        except CorruptData as error:
            damaged[at] = error.with_traceback(None)
            samples.drop_shard()
        done += size
        inputs.progress(done, total)
    if damaged and (inputs.options.on_error != "skip" or len(damaged) == len(tars)):
        raise _damaged(inputs, damaged, len(tars))
    draft = samples.draft(inputs, space, split.tables)
    if damaged:
        draft.notes.append(f"left out by on_error='skip': {_damaged(inputs, damaged, len(tars))}")
    draft.unrelated = set(split.rest).difference(tars)
    return draft


def _damaged(inputs: Inputs, damaged: dict[int, CorruptData], tars: int) -> CorruptData:
    """Return the error that names all damaged archives; for a single one, its own."""
    first, *others = damaged.values()
    if not others:
        return CorruptData(f"{first}; write it anew, or leave it out by on_error='skip'")
    mend = "write them anew, or leave them out by on_error='skip'"
    names = ", ".join(inputs.entries[at].name for at in list(damaged)[:_NAMED])
    more = f" and {len(damaged) - _NAMED:,} more" if len(damaged) > _NAMED else ""
    return CorruptData(
        f"{len(damaged):,} of {tars:,} archives are damaged: {names}{more}; {mend}. The first: {first}"
    )


def _encoding(name: str) -> str:
    """Return the last extension; for gzip, `.gz` behind the one before, which decoders take for its content."""
    before, _, last = name.rpartition(".")
    return f"{before.rpartition('.')[2]}.gz" if last == "gz" else last


class _PackedShard:
    """Reads a compressed tar forward, while it is decoded."""

    def __init__(self, windows: Iterator[bytes]) -> None:
        self._windows = windows
        self._held, self._held_at = bytearray(), 0

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes [offset, offset + length), fewer at the end. The bytes before them are dropped."""
        while self._held_at + len(self._held) < offset + length:
            window = next(self._windows, b"")
            if not window:
                break
            self._drop(offset)
            self._held += window
        self._drop(offset)
        return bytes(self._held[:length])

    def _drop(self, offset: int) -> None:
        dropped = min(len(self._held), offset - self._held_at)
        del self._held[:dropped]
        self._held_at += dropped

    def finish(self) -> int:
        """Decode what follows the last member, and return the size of the archive."""
        return self._held_at + len(self._held) + sum(map(len, self._windows))


class _Shard:
    """Reads one tar from its extents, a window at a time, and touches every extent, so that all are filled."""

    def __init__(self, data: ExtentBytes, first_extent: int, cut: int, size_bytes: int) -> None:
        self._data, self._first, self._cut, self._size = data, first_extent, cut, size_bytes
        self._window_at, self._window = 0, b""
        self._touched = -1

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly the bytes [offset, offset + length)."""
        begin = offset - self._window_at
        if not 0 <= begin <= len(self._window) - length:
            held = self._window[begin:] if begin >= 0 else b""  # not read again: its extent is behind
            wanted = min(max(length, _WINDOW_BYTES), self._size - offset) - len(held)
            self._window = held + self._across(offset + len(held), wanted)
            self._window_at, begin = offset, 0
        data = self._window[begin : begin + length]
        assert len(data) == length, "callers check the archive's size first"
        return data

    def _across(self, offset: int, length: int) -> bytes:
        parts = []
        while length > 0:
            extent, begin = divmod(offset, self._cut)
            self._touch(extent - 1)
            self._touched = max(self._touched, extent)
            parts.append(self._data.read(self._first + extent, begin, min(length, self._cut - begin)))
            offset, length = offset + len(parts[-1]), length - len(parts[-1])
        return b"".join(parts)

    def _touch(self, extent: int) -> None:
        """Read a byte of each extent up to this one, to keep the fills in sequence behind a long member."""
        while self._touched < extent:
            self._touched += 1
            self._data.read(self._first + self._touched, 0, 1)

    def finish(self) -> int:
        """Touch the extents behind the last member, and return the size of the archive."""
        self._touch(-(-self._size // self._cut) - 1)
        return self._size


def _told_apart(keys: TextColumn, archives: Sequence[tuple[int, str]]) -> TextColumn:
    """Return keys that each name one sample. One that several samples have begins with the name of the archive; one
    that several samples of an archive have also ends with the place of the sample there."""
    shared = _shared(keys)
    if not shared.any():
        return keys
    firsts = [first for first, _ in archives]
    archive_of = np.searchsorted(firsts, np.arange(len(keys)), "right") - 1
    told = TextColumn(
        f"{archives[archive_of[at]][1]}/{key}" if shared[at] else key for at, key in enumerate(keys)
    )
    twice = _shared(told)
    if not twice.any():
        return told
    return TextColumn(
        f"{key}:{at - firsts[archive_of[at]]}" if twice[at] else key for at, key in enumerate(told)
    )


def _shared(keys: TextColumn) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which keys several samples have. They are compared by hash first: there may be a billion."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    order = np.argsort(hashes, kind="stable")
    shared = np.zeros(len(keys), np.bool_)
    for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
        one, other = int(order[at]), int(order[at + 1])
        if keys[one] == keys[other]:
            shared[[one, other]] = True
    return shared


class _Collector:
    """Collects members as samples."""

    def __init__(self) -> None:
        self._uri, self._begun, self._fields_begun = "", (0, 0), 0
        self._shard: _Shard | _PackedShard | None = None
        self._cut = 0
        self._archives: list[tuple[int, str]] = []  # the first sample and the name of each
        self._key: str | None = None
        self._sample_of: dict[str, int] = {}  # the last one of each key of the archive
        self._held = array("Q")  # a bit for each field that a sample has
        self._apart: set[int] = set()  # samples that were joined of members that lie apart
        self._first_apart = ""
        self._fields: dict[str, int] = {}
        self._keys, self._tags, self._first = TextColumn(), Tags(), array("q")
        self._links, self._link = 0, ""
        self._sample, self._field = array("q"), array("B")
        self._address, self._length = array("q"), array("q")

    def begin_shard(self, uri: str, name: str, shard: _Shard | _PackedShard, cut: int) -> None:
        """Begin another archive, which is cut into extents of `cut` bytes: no sample spans two archives."""
        self._archives.append((len(self._first), name))
        self._uri, self._shard, self._cut, self._key = uri, shard, cut, None
        self._sample_of = {}
        self._begun, self._fields_begun = (len(self._first), len(self._address)), len(self._fields)

    def end_shard(self, start: int) -> None:
        """Turn the offsets in the archive to addresses: it lies at `start`."""
        for column, begun in zip((self._first, self._address), self._begun, strict=True):
            if len(column) > begun:
                np.frombuffer(column, np.int64)[begun:] += start

    def drop_shard(self) -> None:
        """Forget the members of the archive that was begun last."""
        keys, members = self._begun
        self._archives.pop()
        self._keys.truncate(keys)
        for column, length in ((self._first, keys), (self._sample, members), (self._field, members)):
            del column[length:]
        del self._held[keys:]
        self._apart = {sample for sample in self._apart if sample < keys}
        del self._address[members:], self._length[members:]
        self._fields = dict(list(self._fields.items())[: self._fields_begun])
        self._tags.drop_samples(keys)

    def add(self, member: TarMember) -> None:
        """Add a member to its sample. Skips names without an extension, and those that `_META` matches."""
        name = member.name.removeprefix("./")
        match = _NAME.fullmatch(name)
        if match is None or _META.match(name):
            return
        if member.link:
            self._links += 1
            self._link = self._link or f"{member.name!r} in {self._uri}"
            return
        key, extension = match[1], match[2].lower()
        if extension not in self._fields and len(self._fields) >= _MAX_FIELDS:
            raise InvalidInput(
                f"{self._uri}: more than {_MAX_FIELDS} fields; {member.name!r} is one too many"
            )
        field = self._fields.setdefault(extension, len(self._fields))
        sample = self._sample_for(key, field, member)
        self._key = key
        self._held[sample] |= 1 << field
        self._sample.append(sample)
        self._field.append(field)
        self._address.append(member.offset)
        self._length.append(member.size)
        if extension in SIDECARS and member.size <= SIDECAR_BYTES and self._shard is not None:
            self._tags.add_sidecar(sample, extension, self._shard.read(member.offset, member.size))

    def _sample_for(self, key: str, field: int, member: TarMember) -> int:
        """Return the sample of a member: the last one of its key, unless that has the field already and lies apart, as
        where a sample is repeated.

        Raises CorruptData for a field that follows twice, InvalidInput for a member too far from the first.
        """
        sample, together = self._sample_of.get(key), key == self._key
        if sample is None or (not together and self._held[sample] >> field & 1):
            sample = self._sample_of[key] = len(self._first)
            self._keys.append(key)
            self._first.append(member.offset)
            self._held.append(0)
        elif self._held[sample] >> field & 1:
            extension = list(self._fields)[field]
            at = member.offset - BLOCK
            raise CorruptData(
                f"{self._uri}: {member.name!r} at offset {at} is the second .{extension} of a sample"
            )
        elif not together:
            first = self._first[sample]
            if member.offset // self._cut - first // self._cut > 1:
                raise InvalidInput(
                    f"{self._uri}: {member.name!r} at offset {member.offset - BLOCK:,} belongs to the sample at "
                    f"{first - BLOCK:,}, too far apart to be read together: write the archive with tar --sort=name"
                )
            if not self._apart:
                self._first_apart = f"{key!r} in {self._uri}"
            self._apart.add(sample)
        return sample

    def _notes(self) -> list[str]:
        """Return notes on joined samples, and on left-out members and tags."""
        apart = (
            f"the members of {len(self._apart):,} samples lie apart and were joined by their names, {self._first_apart} is "
            "the first: tar --sort=name keeps them together, as other readers need them"
        )
        links = (
            f"{self._links:,} members are links, without bytes of their own, and left out, {self._link} is the first: "
            "write the archives with tar --dereference --hard-dereference"
        )
        return [*([apart] if self._apart else []), *([links] if self._links else []), *self._tags.notes()]

    def draft(self, inputs: Inputs, space: AddressSpace, tables: Sequence[int]) -> Draft:
        """Return the collected samples as a draft. Raises NotFound where there are none."""
        count, names = len(self._keys), sorted(self._fields)
        if not count:
            none = f"{inputs.uri}: no member of its archives is a sample (name.extension)"
            raise NotFound("; ".join([none, *self._notes()]))
        column = np.asarray([names.index(name) for name in self._fields])
        where = ints(self._sample), column[np.frombuffer(self._field, np.uint8)]
        addresses, lengths = (np.full((count, len(names)), fill, np.int64) for fill in (0, -1))
        addresses[where], lengths[where] = ints(self._address), ints(self._length)
        firsts = np.searchsorted(ints(self._first), ints(space.starts)).astype(np.int64)
        fields = tuple(Field(name, _encoding(name)) for name in names)
        draft = Draft("rows", space, fields, np.append(firsts, np.int64(count)))
        draft.columns = {"row.address": addresses.reshape(-1), "row.length": lengths.reshape(-1)}
        draft.keys = self._keys = _told_apart(self._keys, self._archives)
        if tables:
            told = Tags()
            draft.notes += read_tables(
                inputs, tables, SampleKeys(self._keys[at] for at in range(count)), told
            )
            self._tags.update(told)
        set_labels(draft, inputs, self._tags.take_labels(count, inputs.options.label_kind, inputs.uri))
        draft.tags = self._tags.columns(count)
        draft.notes += self._notes()
        return draft
