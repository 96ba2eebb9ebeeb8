"""Opens datasets that a daemon keeps prepared, and makes their samples from the source."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Prepared
from cachesvc.catalog.prepared import PreparedForm, Recipe
from cachesvc.client.control import PreparedInfo
from cachesvc.client.preparing import PreparerConnection
from cachesvc.core.errors import InvalidInput, is_bad_sample
from loader.datasets.generators import RngKey
from loader.datasets.samples.prepared import PreparedSamples
from loader.datasets.samples.sample_form import SampleSpec
from loader.prepare.identity import digest_of, library_versions, qualified_name
from loader.prepare.preparer import Preparers, serve
from loader.prepare.records import form_of
from loader.prepare.uneven import record_of, uneven_form_of
from loader.reading.connect import DatasetLink
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import Ints

TRIED_TWICE = 3
"""The samples whose results are compared with a second try before data is prepared."""
MOST_BAD = 100
"""Samples that are tried for one that can be prepared."""
MAX_BYTES = 1 << 38
"""The most that a sample of unlike ones may be declared to take."""
_log = logging.getLogger("cachesvc")


class Source(Protocol):
    """A dataset whose samples are made by `prepare` on each read."""

    catalog: Catalog
    opened: OpenedDataset

    def iter_samples(self, ids: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples by catalog id one at a time."""
        ...

    def close(self) -> None:
        """Release what is held; the next use connects again."""
        ...


class PreparingSource:
    """Makes prepared samples from their source, for readers and for the daemon. Picklable."""

    def __init__(self, source: Source, form: PreparedForm) -> None:
        self._source, self._form = source, form
        self._preparers: Callable[[], Preparers | None] = lambda: None
        """A weak reference: the threads that prepare refer to this object, and end with the last reader."""

    def __getstate__(self) -> tuple[Source, PreparedForm]:
        return self._source, self._form

    def __setstate__(self, state: tuple[Source, PreparedForm]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def catalog(self) -> Catalog:
        """The source's."""
        return self._source.catalog

    @property
    def opened(self) -> OpenedDataset:
        """The source."""
        return self._source.opened

    @property
    def form(self) -> PreparedForm:
        """The form of the samples' records."""
        return self._form

    def samples(self, ids: Ints) -> Iterator[Any]:
        """Make samples one at a time. Raises the error of the first that cannot be made."""
        return self._source.iter_samples(ids, None)

    def content_of(self, sample: int) -> bytes:
        """Return the digest of the bytes of a sample's extent in the source. Raises the errors of reading."""
        extents = self._extents_of(np.asarray([sample]))
        self.opened.learn_contents(extents)
        return self.opened.contents.of(extents)[0]

    def note_contents(self, samples: Ints, contents: np.ndarray[Any, Any]) -> None:
        """Enter digests of the bytes that samples were made of, uint8[n, 16]."""
        extents, rows = np.unique(self._extents_of(samples), return_index=True)
        for extent, content in zip(extents.tolist(), contents[rows], strict=True):
            self.opened.contents.note(extent, content.tobytes())

    def _extents_of(self, samples: Ints) -> Ints:
        return np.searchsorted(self.catalog.extent_first, samples, "right") - 1

    def reader_of(self, opened: OpenedDataset, spec: SampleSpec) -> PreparedSamples:
        """Return what reads the prepared samples of a dataset, and its views."""
        preparers = self._preparers()
        if preparers is None:
            preparers = Preparers(opened.link.preparer, self, opened.catalog.extent_first)
            self._preparers = weakref.ref(preparers)
        return PreparedSamples(opened.catalog, self, spec, preparers)

    def serve(self, opened: OpenedDataset, ready: Callable[[], None], ends: Callable[[], bool]) -> None:
        """Prepare what the daemon wants of a dataset until `ends()`. Call `ready` once the daemon counts on it."""

        def connect() -> PreparerConnection:
            made = opened.link.preparer()
            ready()
            return made

        serve(connect, self, opened.catalog.extent_first, ends)

    def close(self) -> None:
        """Prepare no more, and release the source."""
        if (preparers := self._preparers()) is not None:
            preparers.close()
        self._source.close()


def open_prepared(
    link: DatasetLink, source: Source, spec: SampleSpec, name: str, most_bytes: int, ids: Ints | None
) -> tuple[OpenedDataset, PreparedForm]:
    """Open what `spec.prepare` makes of a dataset in the daemon of its link. The function is tried where the daemon does
    not know it yet. `name` stands for the digest of its code. `most_bytes`: the most that a sample of unlike ones takes,
    0 where all have one shape. `ids`: the samples that are to be read; None for all.

    Raises InvalidInput for a changed function of the same name, and for results that cannot be kept.
    """
    recipe = _recipe(spec, name, most_bytes)
    prepared, found = link.prepared(recipe, lambda: form_by_trial(source, most_bytes, ids).to_json())
    _check(recipe, found)
    opened = OpenedDataset(prepared, source.opened.verify)
    layout = opened.catalog.layout
    assert isinstance(layout, Prepared), "the daemon answers with a prepared dataset"
    form = PreparedForm(layout.container, layout.stride_bytes, layout.fields, layout.most_bytes)
    opened.link = replace(prepared, form=form.to_json())
    return opened, form


def form_by_trial(source: Source, most_bytes: int, ids: Ints | None) -> PreparedForm:
    """Return the form of the first samples, of `ids` where it names some; each is prepared twice.

    Raises InvalidInput where two results differ, or samples have several forms; the error of the last of `MOST_BAD` samples
    that cannot be prepared.
    """
    form: PreparedForm | None = None
    chosen = ids if ids is not None and len(ids) else np.arange(min(source.catalog.samples, MOST_BAD))
    samples, tried = chosen[:MOST_BAD].tolist(), 0
    try:
        for sample in samples:
            try:
                results = [next(source.iter_samples(np.asarray([sample]), None)) for _ in range(2)]
                if most_bytes:  # a sample with more bytes is a bad one, and tells nothing of the others
                    record_of(uneven_form_of(results[0], most_bytes), results[0])
            except Exception as error:
                if (sample == samples[-1] and form is None) or not is_bad_sample(error):
                    raise
                continue
            form = form or (uneven_form_of(results[0], most_bytes) if most_bytes else form_of(results[0]))
            if record_of(form, results[0]) != record_of(form, results[1]):
                raise InvalidInput(
                    f"prepare= gave two results for {source.catalog.key(sample)}: it must be deterministic; do random"
                    " work in transform="
                )
            tried += 1
            if tried == TRIED_TWICE:
                break
    finally:
        source.close()
    assert form is not None, "a sample was prepared, or its error raised"
    return form


def _recipe(spec: SampleSpec, name: str, most_bytes: int) -> Recipe:
    prepare, decode = spec.prepare, spec.decode
    assert prepare is not None, "there is a function"
    chosen = (
        spec.fields,
        digest_of(decode, opaque=bool(name)) if callable(decode) else decode,
        spec.image_mode,
        spec.out,
        spec.bare,
    )
    digest, versions = digest_of(prepare, opaque=bool(name)), library_versions(prepare)
    choices = repr((*chosen, most_bytes) if most_bytes else chosen)
    return Recipe(qualified_name(prepare), digest, choices, name, versions)


def _check(recipe: Recipe, found: PreparedInfo) -> None:
    if found.digest != recipe.digest:
        raise InvalidInput(
            f"prepare_name={recipe.given_name!r} names data that another version of {recipe.name} prepared: give another"
            " name, or none"
        )
    now = dict(recipe.versions or {})
    differ = sorted(name for name, version in found.versions.items() if now.get(name, version) != version)
    if differ:
        texts = (f"{name} {found.versions[name]} (now {now[name]})" for name in differ)
        _log.warning("the samples of %s were prepared with %s", recipe.name, ", ".join(texts))
