"""Sample numbers -> samples: bytes located, read in one pass, cut into fields, decoded, transformed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed, Indirect, InlineTable
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import sample_key
from loader.datasets.decode import IMAGE_MODES, Decoder, ImageMode, decoded, decoder
from loader.datasets.jagged import Jagged, offsets_of
from loader.datasets.targets import OUT, Targets, check_rows, columns, named
from loader.datasets.targets import checked as checked_targets
from loader.reading.address_range import Bytes
from loader.reading.reader import Ints, Reader

LABEL = "label"


@dataclass(frozen=True, slots=True)
class Form:
    """What the user asked a sample to look like; see `open_dataset`. Raises InvalidInput for what nobody can call."""

    fields: tuple[str, ...] | None = None
    decode: Literal["auto"] | Callable[..., Any] | None = "auto"
    transform: Callable[..., Any] | None = None
    out: str | None = None
    image_mode: ImageMode = "RGB"
    targets: Targets | None = None

    def __post_init__(self) -> None:
        checked_targets(self.targets)
        if not (self.decode is None or self.decode == "auto" or callable(self.decode)):
            raise InvalidInput(
                f"decode={self.decode!r} is neither 'auto', None (bytes) nor a function of the sample"
            )
        if not (self.transform is None or callable(self.transform)):
            raise InvalidInput(f"transform={self.transform!r} is no function of the sample")
        if self.image_mode not in IMAGE_MODES:
            choices = ", ".join(map(repr, IMAGE_MODES))
            raise InvalidInput(
                f"image_mode={self.image_mode!r}: give one of {choices}; None leaves images as they are"
            )
        if self.image_mode != "RGB" and self.decode != "auto":
            raise InvalidInput(
                f"image_mode={self.image_mode!r} is for decode='auto', not decode={self.decode!r}"
            )


Wants = Literal["nothing", "named", "second"]
"""How a callable of the user takes its generator."""


class Samples:
    """Makes samples of one catalog through one reader. `draw` is the (seed, epoch) of generators."""

    def __init__(self, catalog: Catalog, form: Form) -> None:
        """Raises InvalidInput for fields that do not exist or cannot be decoded."""
        self._catalog, self._form = catalog, form
        self._layout = catalog.layout
        names = [field.name for field in catalog.fields]
        self._names = _chosen(form.fields, names, catalog.labels is not None)
        self._columns = [
            -1 if name == LABEL and name not in names else names.index(name) for name in self._names
        ]
        self._decoders = self._decoders_of(form)
        self._decode_wants = _wanted_by(form.decode)
        self._transform_wants = _wanted_by(form.transform)
        self._with_label = form.fields is None and catalog.labels is not None and len(names) == 1
        self._single = form.fields is None and len(names) == 1 and not self._with_label
        self.gathered = isinstance(self._layout, Fixed) and form.decode == "auto"
        """Samples are rows of one tensor."""
        self.ready = self.gathered and form.transform is None and form.fields is None and not self._with_label
        """A batch needs no Python per sample."""
        one = len(self._columns) == 1 and self._columns[0] >= 0 and not self._with_label
        plain = one and form.decode is None and form.transform is None
        self.stays_bytes = plain and not isinstance(self._layout, (Fixed, Indirect, InlineTable))
        """A sample is one range of bytes, and handed out as it is, alone or in a tuple of one."""
        if isinstance(self._layout, Fixed):
            self._dtype = np.dtype(self._layout.dtype)
            self._shape = self._layout.shape
            native = self._dtype.newbyteorder("=")
            out = form.out or (OUT if form.targets else None)
            self._out = converted(out) or (native if native != self._dtype else None)
        if form.targets is not None:
            plain = self.gathered and form.fields is None and not self._with_label
            check_rows(form.targets, self._layout, plain, catalog.format == "tokens", catalog.uri)

    @property
    def looks(self) -> str:
        """What a sample looks like, in words; the same for datasets whose samples can lie in one batch."""
        names = [*self._names, *([LABEL] if self._with_label else [])]
        classes = self._labels_in_words() if LABEL in names else ""
        if not isinstance(self._layout, Fixed):
            kind = (
                "one value"
                if self._single
                else "a tuple"
                if self._form.fields or self._with_label
                else "a dict"
            )
            return f"{kind} of {', '.join(names)}{classes}{'' if self._form.decode else ' in bytes'}"
        rest = f" and {LABEL}{classes}" if LABEL in names else ""
        if self._form.targets is not None:
            rest += f" with {self._form.targets} targets"
        return f"{self._out or self._dtype} of shape {list(self._shape)}{rest}"

    def _labels_in_words(self) -> str:
        labels = self._catalog.labels
        is_number = labels is not None and labels.dtype.kind == "f"
        return " as a number" if is_number else _in_words(self._catalog.classes)

    def locate(self, reader: Reader, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Slots of records and the extents they lie in: what `gather` takes."""
        layout = self._layout
        assert isinstance(layout, Fixed), "only records of one size have slots"
        slots = layout.slots(samples)
        first, last = reader.spans(slots * layout.stride_bytes, np.full(slots.shape, layout.record_bytes))
        return slots, first, last

    def tensor(
        self, reader: Reader, located: tuple[Ints, Ints, Ints], empty: Callable[[int], Bytes] | None = None
    ) -> torch.Tensor:
        """Located records as one tensor [n, *shape], in new memory or in what `empty` gives for a size in bytes."""
        rows = self._stored(reader, located, None if self._out is not None else empty)
        if self._out is not None and empty is not None:
            must_hold(self._out, rows, self._catalog.uri)
            given = empty(rows.size * self._out.itemsize).view(self._out).reshape(rows.shape)
            np.copyto(given, rows, casting="unsafe")
            rows = given
        elif self._out is not None:
            must_hold(self._out, rows, self._catalog.uri)
            rows = rows.astype(self._out)
        try:
            return torch.from_numpy(rows)
        except TypeError as error:
            raise InvalidInput(
                f"{self._catalog.uri} holds {rows.dtype}, which no tensor does; out= converts, array() takes it as it is"
            ) from error

    def whole(
        self, reader: Reader, located: tuple[Ints, Ints, Ints], empty: Callable[[int], Bytes] | None = None
    ) -> Any:
        """A batch of located records as it goes out when nobody collates, in new memory or in what `empty` gives."""
        if self._form.targets is None:
            return self.tensor(reader, located, empty)
        rows = self._stored(reader, located, None)
        assert self._out is not None, "targets have a type"
        must_hold(self._out, rows, self._catalog.uri)
        return self.batched(rows, empty)

    def batched(self, rows: np.ndarray[Any, Any], empty: Callable[[int], Bytes] | None = None) -> Any:
        """Records [n, *shape] as a batch, a list where torch's collation makes a list of tuples."""
        if self._form.targets is None:
            return torch.from_numpy(rows)
        batch = named(self._form.targets, *self._columns_of(rows, empty))
        return list(batch) if isinstance(batch, tuple) else batch

    def _columns_of(
        self, rows: np.ndarray[Any, Any], empty: Callable[[int], Bytes] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._form.targets is not None
        assert self._out is not None
        return columns(rows, self._form.targets, self._out, empty)

    def _stored(
        self, reader: Reader, located: tuple[Ints, Ints, Ints], empty: Callable[[int], Bytes] | None
    ) -> np.ndarray[Any, Any]:
        """Located records [n, *shape] of the stored dtype."""
        records = reader.gather(*located, empty)
        return records.view(self._dtype).reshape(len(records), *self._shape)

    @property
    def record_bytes(self) -> int:
        """Of a sample, where all are of one size."""
        assert isinstance(self._layout, Fixed), "only records of one size have it"
        return self._layout.record_bytes

    def ranges(self, reader: Reader, samples: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Of samples that stay bytes: where they begin and end, and the extents they lie in. What `jagged` takes."""
        addresses, lengths = (array[:, self._columns[0]] for array in self._catalog.locate(samples))
        lengths = np.maximum(lengths, 0)  # absent: nothing
        return addresses, addresses + lengths, *reader.spans(addresses, lengths)

    def jagged(
        self,
        reader: Reader,
        ranges: tuple[Ints, Ints, Ints, Ints],
        empty: Callable[[int], Bytes] | None = None,
    ) -> Jagged:
        """Samples that stay bytes, one behind the other, in new memory or in what `empty` gives."""
        values = torch.from_numpy(reader.join(*ranges, empty))
        return Jagged(values, torch.from_numpy(offsets_of(ranges[1] - ranges[0])))

    def expect(self, reader: Reader, samples: Ints) -> None:
        """These samples will be taken next; see `Reader.expect`. Where a table in the extent says where samples
        lie, nothing is known ahead."""
        if not isinstance(self._layout, (Indirect, InlineTable)):
            addresses, lengths = self._catalog.locate(samples)
            columns = [column for column in self._columns if column >= 0]
            reader.expect(addresses[:, columns].ravel(), lengths[:, columns].ravel())

    def take(self, reader: Reader, samples: Ints, draw: tuple[int, int]) -> list[Any]:
        """Samples in the order asked."""
        return list(self.drawn(reader, samples, draw))

    def drawn(self, reader: Reader, samples: Ints, draw: tuple[int, int]) -> Iterator[Any]:
        """The same one by one: all are read at once, and each is decoded and transformed when it is asked for."""
        rows = (
            self._gathered_rows(reader, samples)
            if self.gathered
            else self._decoded_rows(reader, samples, draw)
        )
        transform = self._form.transform
        if transform is None:
            return rows
        wants = self._transform_wants
        pairs = zip(rows, samples.tolist(), strict=True)
        return (self._called(transform, wants, row, n, draw) for row, n in pairs)

    def _gathered_rows(self, reader: Reader, samples: Ints) -> Iterator[Any]:
        values = self.tensor(reader, self.locate(reader, samples))
        if self._form.targets is not None:
            pairs = zip(*self._columns_of(values.numpy()), strict=True)
            return (named(self._form.targets, *pair) for pair in pairs)
        rows = zip(values, samples.tolist(), strict=True)
        return (self._shape_sample((value,), n, (value,)) for value, n in rows)

    def _decoded_rows(self, reader: Reader, samples: Ints, draw: tuple[int, int]) -> Iterator[Any]:
        raw = self._raw(reader, samples)
        if self._form.decode is None and self._single:
            return (row[0] for row in raw)
        rows = zip(raw, samples.tolist(), strict=True)
        decode = self._form.decode
        if not callable(decode):
            return (
                self._shape_sample(row if self._decoders is None else self._decode_row(row, n), n, row)
                for row, n in rows
            )
        shaped = ((self._shape_sample(row, n, row), n) for row, n in rows)
        return (self._called(decode, self._decode_wants, row, n, draw) for row, n in shaped)

    def _called(
        self, ask: Callable[..., Any], wants: Wants, row: Any, sample: int, draw: tuple[int, int]
    ) -> Any:
        """What a callable of the user makes of a sample. What it raises stays what it is, and says over which sample
        (from Python 3.11 on)."""
        try:
            if wants == "nothing":
                return ask(row)
            rng = _generator(draw, sample)
            return ask(row, rng=rng) if wants == "named" else ask(row, rng)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"over {self._catalog.key(sample)} in {self._catalog.uri}")
            raise

    def _decode_row(self, row: Sequence[Any], sample: int) -> tuple[Any, ...]:
        assert self._decoders is not None
        return tuple(
            decoded(decode, value, lambda: f"{self._catalog.key(sample)} in {self._catalog.uri}")
            for decode, value in zip(self._decoders, row, strict=True)
        )

    def _raw(self, reader: Reader, samples: Ints) -> list[Sequence[Any]]:
        """The chosen fields' bytes of each sample; the label's place is left out."""
        columns = [column for column in self._columns if column >= 0]
        addresses, lengths = self._catalog.locate(samples)
        if isinstance(self._layout, Indirect):
            pairs = reader.read(addresses[:, 0], lengths[:, 0])
            offsets = np.frombuffer(b"".join(pair or b"" for pair in pairs), "<u4").reshape(-1, 2)
            addresses, lengths = self._catalog.settle(samples, offsets)
            whole = reader.read(addresses[:, 0], lengths[:, 0])
            split = [self._catalog.split(row or b"") for row in whole]
            return [[row[column] for column in columns] for row in split]
        if isinstance(self._layout, InlineTable):
            rows = reader.read(addresses[:, 0], lengths[:, 0])
            table = np.frombuffer(b"".join(row or b"" for row in rows), "<u4")
            addresses, lengths = self._catalog.settle(samples, table.reshape(len(rows), -1, 2))
        if columns != list(range(addresses.shape[1])):
            addresses, lengths = addresses[:, columns], lengths[:, columns]
        flat = reader.read(np.ascontiguousarray(addresses).ravel(), np.ascontiguousarray(lengths).ravel())
        width = max(1, len(columns))
        return (
            [flat[at : at + width] for at in range(0, len(flat), width)] if columns else [()] * len(samples)
        )

    def _shape_sample(self, values: Sequence[Any], sample: int, stored: Sequence[Any]) -> Any:
        """A tuple where fields were named, (value, label) for one field with labels, the value for one field,
        else a dict by field of what is `stored`: a value may be None, as JSON's null is."""
        labels = self._catalog.labels
        if self._form.fields is not None:
            given = iter(values)
            full = [next(given) if column >= 0 else labels[sample].item() for column in self._columns]  # type: ignore[index]
            return tuple(full)
        if self._with_label:
            return values[0], labels[sample].item()  # type: ignore[index]
        if len(values) == 1:
            return values[0]
        named = zip(self._names, values, stored, strict=True)
        return {name: value for name, value, held in named if held is not None}

    def _decoders_of(self, form: Form) -> list[Decoder] | None:
        if form.decode != "auto" or isinstance(self._layout, Fixed):
            return None
        fields = self._catalog.fields
        return [decoder(fields[c].name, fields[c].encoding, form.image_mode) for c in self._columns if c >= 0]


def converted(out: str | None) -> np.dtype[Any] | None:
    """The dtype that `out` asks for, in this machine's byte order. Raises InvalidInput for one that no tensor has."""
    if not out:
        return None
    if isinstance(out, torch.dtype):
        raise InvalidInput(f"out={out!r}: give it as text, {str(out).removeprefix('torch.')!r}")
    try:
        found: np.dtype[Any] = np.dtype(out).newbyteorder("=")
        torch.from_numpy(np.empty(0, found))
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"out={out!r} is not a type that tensors have") from error
    if found.shape:
        raise InvalidInput(f"out={out!r} has a shape; it is the type of one item")
    return found


def must_hold(out: np.dtype[Any], values: np.ndarray[Any, Any], uri: str) -> None:
    """Raises InvalidInput for a number that an integer type does not hold: it would become another one."""
    if out.kind not in "iu" or values.dtype.kind not in "iuf" or np.can_cast(values.dtype, out):
        return
    room = np.iinfo(out)
    for found in (values.min(initial=0).item(), values.max(initial=0).item()):
        if not room.min <= found <= room.max:  # NaN, too
            raise InvalidInput(
                f"{uri} holds {found} as {values.dtype}, and out={out.name!r} {room.min} to {room.max}: give a wider out"
            )


def _chosen(wanted: tuple[str, ...] | None, names: list[str], labelled: bool) -> list[str]:
    if wanted is None:
        return names
    known = [*names, LABEL] if labelled else names
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        raise InvalidInput(f"fields {missing} are not in the dataset, which has {', '.join(known)}")
    return list(wanted)


def _in_words(classes: Sequence[str]) -> str:
    """Classes by which a label is a number: all of them count, a few are named."""
    if not classes:
        return ""
    some = ", ".join(map(repr, classes[:3])) + (", ..." if len(classes) > 3 else "")
    return f" of {len(classes):,} classes ({some}; {xxh3_64_hexdigest(repr(tuple(classes)).encode())[:8]})"


def _wanted_by(function: object) -> Wants:
    """Whether a callable takes (sample, rng): a parameter named `rng`, or a second one without default."""
    if not callable(function):
        return "nothing"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "nothing"  # a builtin without a signature takes the sample
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(parameter.name == "rng" for parameter in positional[1:2]):
        return "second"
    given = function.keywords if isinstance(function, partial) else {}
    if any(parameter.name == "rng" for parameter in parameters) and "rng" not in given:
        return "named"
    return "second" if len([p for p in positional if p.default is p.empty]) == 2 else "nothing"


def _generator(draw: tuple[int, int], sample: int) -> np.random.Generator:
    return np.random.default_rng(sample_key(*draw, sample))
