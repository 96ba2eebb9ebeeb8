"""The form of a sample that the user asked for, and samples of that form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Literal

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.arguments import one_of
from cachesvc.core.errors import InvalidInput
from loader.datasets.collate import default_collate_into
from loader.datasets.decoding.decode import Decoder, decode_field
from loader.datasets.decoding.images import IMAGE_MODES, ImageMode
from loader.datasets.generators import RngKey, RngParameter, call_user, rng_parameter
from loader.datasets.plain_values import Empty, collates_as_torch, shaped_batch
from loader.datasets.samples.catalog_values import LABEL, describe_classes, value_of, values_of
from loader.datasets.targets import Targets, check_targets
from loader.reading.reader import ExtentReader, Ints

Row = Sequence[bytes | None]
"""The bytes of the stored fields of a sample; None for a field that it lacks."""
_NO_KEY = (0, 0)  # no function of the user's draws numbers for samples that are gathered


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The form of a sample that the user asked for; see `open_dataset`. Raises InvalidInput for bad arguments."""

    fields: tuple[str, ...] | None = None
    decode: Literal["auto", "cuda"] | Callable[..., Any] | None = "auto"
    transform: Callable[..., Any] | None = None
    out: str | None = None
    image_mode: ImageMode = "RGB"
    targets: Targets | None = None
    bare: bool = False
    """A sample is the value of its only field, not a tuple of one."""
    prepare: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if not (self.decode in (None, "auto", "cuda") or callable(self.decode)):
            raise InvalidInput(
                f"decode={self.decode!r} is neither 'auto', 'cuda', None (bytes) nor a function of the sample"
            )
        if self.decode == "cuda" and self.transform is not None:
            raise InvalidInput(
                "decode='cuda' decodes whole batches on the device: transform those there, and leave transform= out"
            )
        for name in ("transform", "prepare"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise InvalidInput(f"{name}={getattr(self, name)!r} is not a function of the sample")
        if self.prepare is not None and rng_parameter(self.prepare) != "nothing":
            raise InvalidInput(
                "prepare= takes the sample alone, since its results are kept: do random work in transform="
            )
        if self.prepare is not None and (self.decode == "cuda" or self.targets is not None):
            raise InvalidInput("prepare= takes decoded samples: leave decode='cuda' and targets= out")
        one_of("image_mode", self.image_mode, IMAGE_MODES, "; None leaves images as they are")
        if self.image_mode != "RGB" and self.decode not in ("auto", "cuda"):
            raise InvalidInput(
                f"image_mode={self.image_mode!r} is for decode='auto' or 'cuda', not decode={self.decode!r}"
            )


class SampleForm:
    """Makes samples of the values of their fields.

    `names`: the fields of a sample. Those that are `stored` are read, at the places `columns` among those that the catalog
    has for a sample; the catalog has the values of the others. `label` returns the label that stands beside the only field.
    """

    def __init__(self, catalog: Catalog, spec: SampleSpec, fields: Sequence[str], in_one: bool) -> None:
        """`fields`: those of the data; `in_one`: all fields lie in one place. Raises InvalidInput for names that do not
        exist."""
        self.catalog, self.spec = catalog, spec
        self.names = [*(fields if spec.fields is None else spec.fields)]
        self._held = values_of(catalog, spec.fields, fields)
        self.stored = [name for name in self.names if name not in self._held]
        self.columns = [0] if in_one else [fields.index(name) for name in self.stored]
        alone = spec.fields is None and len(fields) == 1
        self.label = value_of(catalog, LABEL) if alone and catalog.labels is not None else None
        self.is_single = spec.bare or (alone and self.label is None)
        """A sample is the value of its only field."""
        self._functions: list[tuple[Callable[..., Any], RngParameter]] = [
            (each, "nothing" if each is spec.prepare else rng_parameter(each))
            for each in (spec.decode, spec.prepare, spec.transform)
            if callable(each)
        ]
        self.is_plain = not self._held and self.label is None and not self._functions
        """Samples have stored values alone, and no function of the user's changes them."""

    @property
    def values(self) -> list[str]:
        """The names of all values of a sample."""
        return self.names if self.label is None else [*self.names, LABEL]

    @property
    def kind(self) -> str:
        """The kind of a sample, in words."""
        is_tuple = self.spec.fields or self.label is not None
        form = "one value" if self.is_single else "a tuple" if is_tuple else "a dict"
        classes = self.classes if LABEL in self.values else ""
        return f"{form} of {', '.join(self.values)}{classes}{'' if self.spec.decode else ' in bytes'}"

    @property
    def classes(self) -> str:
        """The classes of labels, in words."""
        labels = self.catalog.labels
        if labels is not None and labels.ndim == 2:
            return f" of {labels.shape[1]:,} numbers{describe_classes(self.catalog.classes)}"
        is_number = labels is not None and labels.dtype.kind == "f"
        return " as a number" if is_number else describe_classes(self.catalog.classes)

    def name_of(self, sample: int) -> str:
        """Name a sample in errors."""
        return f"{self.catalog.key(sample)} in {self.catalog.uri}"

    def places(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the addresses and lengths of what is read, int64[n, places]. Not for columns."""
        addresses, lengths = self.catalog.locate(samples)
        if self.columns == list(range(addresses.shape[1])):
            return addresses, lengths
        return addresses[:, self.columns], lengths[:, self.columns]

    def read(self, reader: ExtentReader, samples: Ints) -> Sequence[Row]:
        """Read the places of each sample, all in one pass."""
        addresses, lengths = self.places(samples)
        flat, width = reader.read(addresses.ravel(), lengths.ravel()), len(self.columns)
        if not width:
            return [()] * len(samples)
        return [flat[at : at + width] for at in range(0, len(flat), width)]

    def sample(self, values: Sequence[Any], sample: int, stored: Sequence[Any] | None = None) -> Any:
        """Return a tuple if fields were named, the value of a field that was named alone, (value, label) for one
        field with labels, the value for one field, otherwise a dict by field.

        `values`: those of the stored fields. Fields for which `stored` has None are left out of the dict; a value may be
        None, as JSON's null.
        """
        if self.spec.fields is not None:
            given, held = iter(values), self._held
            named = tuple(held[name](sample) if name in held else next(given) for name in self.names)
            return named[0] if self.spec.bare else named
        if self.label is not None:
            return values[0], self.label(sample)
        if len(values) == 1:
            return values[0]
        if stored is None:
            return dict(zip(self.names, values, strict=True))
        fields = zip(self.names, values, stored, strict=True)
        return {name: value for name, value, each in fields if each is not None}

    def decoded(
        self, rows: Iterable[Row], samples: Ints, decoders: Sequence[Decoder | None]
    ) -> Iterator[tuple[Any, ...]]:
        """Decode rows on demand; values without a decoder stay as they are. Raises CorruptData, which names the sample."""
        for row, sample in zip(rows, samples.tolist(), strict=True):
            name = partial(self.name_of, sample)
            pairs = zip(decoders, row, strict=True)
            yield tuple(
                value if decode is None else decode_field(decode, value, name) for decode, value in pairs
            )

    def samples(
        self,
        rows: Iterable[tuple[Any, ...]],
        samples: Ints,
        rng_key: RngKey,
        stored: Sequence[Row] | None = None,
    ) -> Iterator[Any]:
        """Make samples of rows, each the values of all stored fields. `stored`: see `sample`."""
        found: Iterable[Any]
        if self.is_single and self.stored:
            found = (row[0] for row in rows)
        elif self.spec.fields is not None and not self._held:
            found = rows
        else:
            of_rows = zip(rows, samples.tolist(), stored or repeat(None, len(samples)), strict=True)
            found = (self.sample(*each) for each in of_rows)
        return self.finished(found, samples, rng_key)

    def finished(self, rows: Iterable[Any], samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Call the user's functions with samples: `decode`, then `transform`."""
        for function, parameter in self._functions:
            rows = self._called(function, parameter, rows, samples, rng_key)
        return iter(rows)

    def collated(self, values: Iterable[Any], samples: Ints, empty: Empty | None) -> Any:
        """Collate one value of each sample, as torch does by default."""
        return default_collate_into(
            empty, values, len(samples), lambda place: self.catalog.key(int(samples[place]))
        )

    def _called(
        self,
        function: Callable[..., Any],
        parameter: RngParameter,
        rows: Iterable[Any],
        samples: Ints,
        rng_key: RngKey,
    ) -> Iterator[Any]:
        pairs = zip(rows, samples.tolist(), strict=True)
        return (call_user(self.catalog, function, parameter, row, sample, rng_key) for row, sample in pairs)


@dataclass(frozen=True, slots=True)
class ColumnBatches:
    """`columns` reads each column of samples; it returns None where `samples` are to be made one by one, and collated."""

    form: SampleForm
    columns: Callable[[ExtentReader, Ints, Empty | None], Sequence[Any] | None]
    samples: Callable[[ExtentReader, Ints, RngKey], Iterator[Any]]

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return the samples: their columns are found as they are read."""
        return samples, samples, samples

    def make(self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None) -> Any:
        """Make a batch; in rows where the user has registered functions of collation."""
        ids, form = located[0], self.form
        columns = self.columns(reader, ids, empty) if collates_as_torch() else None
        if columns is None:
            return form.collated(self.samples(reader, ids, _NO_KEY), ids, empty)
        return shaped_batch(form.names, columns, form.spec.fields is not None and not form.spec.bare)
