"""Finds the sample that a row of a table names."""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.catalog.compiler import split_name


class SampleNames:
    """The samples by the paths and URIs of their files, with extension and, where no file has that name, without.

    A name in no folder also stands for the only file of that name in any folder. A name shared by several samples, of
    several URIs or of one stem, finds none.
    """

    def __init__(self, named: Iterable[tuple[str, int]]) -> None:
        self._samples: dict[str, int | None] = {}
        stems: dict[str, int | None] = {}
        for name, sample in named:
            _add(self._samples, name, sample)
            _add(stems, split_name(name)[0], sample)
        for stem, only in stems.items():
            self._samples.setdefault(stem, only)
        self._bases: dict[str, int | None] | None = None

    @property
    def example(self) -> str:
        """One of the names."""
        return next(iter(self._samples))

    def find(self, name: str, root: str) -> int | None:
        """Return the sample of a file below the URI `root`, None for none or several."""
        sample = self._samples.get(root + name, self._samples.get(name))
        if sample is None and name and "/" not in name and name not in self._samples:
            sample = self._by_base().get(name)
        return sample

    def _by_base(self) -> dict[str, int | None]:
        if self._bases is None:
            self._bases = {}
            for name, sample in self._samples.items():
                _add(self._bases, name.rpartition("/")[2], sample)
        return self._bases


class SampleKeys:
    """The samples of tars by their keys; a row may also name a member."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._samples: dict[str, int | None] = {}
        for sample, key in enumerate(keys):
            _add(self._samples, key, sample)

    @property
    def example(self) -> str:
        """One of the keys."""
        return next(iter(self._samples))

    def find(self, name: str, root: str) -> int | None:
        """Return the sample of a key, None for none or several."""
        folder, slash, base = name.rpartition("/")
        return self._samples.get(name, self._samples.get(folder + slash + base.partition(".")[0]))


def _add(into: dict[str, int | None], name: str, sample: int | None) -> None:
    into[name] = sample if into.get(name, sample) == sample else None
