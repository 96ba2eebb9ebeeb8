"""torchvision's `ImageFolder` over a cached dataset: the same arguments, attributes and order of samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput
from loader.datasets.dataset import Dataset, open_dataset
from loader.datasets.decoding.images import ImageMode
from loader.datasets.generators import rng_parameter
from loader.datasets.samples.kinds import sample_reader
from loader.reading.reader import Ints

Transform = Callable[..., Any] | None
_FORMAT = "images"


class ImageFolder(Dataset):
    """Images below class folders: `root/class/x.jpg`, or `root/class/deeper/x.jpg`. A sample is (image, class index).

    `samples`, `targets` and the indices have torchvision's order. The parts that `select`, `where` and `split` make
    are plain datasets. `transform` and `target_transform` may be assigned until a DataLoader is made. A subclass may
    have its own `__getitem__`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Transform = None,
        target_transform: Transform = None,
        loader: Transform = None,
        is_valid_file: Transform = None,
        allow_empty: bool = False,
        *,
        split: str | None = None,
        version: str | None = None,
        verify: bool = False,
        image_mode: ImageMode = "RGB",
        extent_bytes: int = 0,
    ) -> None:
        """Open a prefix or folder.

        - `transform`: callable(image[, rng]). `target_transform`: callable(class index).
        - `loader` and `is_valid_file` take paths, which cached data does not have, and are refused. `allow_empty`
          has no effect: a folder without images is no class.
        - Other arguments are those of `open_dataset`.

        Raises InvalidInput, NotFound where no folder holds an image, and what `open_dataset` raises.
        """
        if loader is not None or is_valid_file is not None:
            raise InvalidInput(
                "ImageFolder opens no paths, so it takes neither loader= nor is_valid_file=: use transform=, or select()"
            )
        pair = _PairTransform(transform, target_transform)
        opened = open_dataset(
            root,
            format=_FORMAT,
            split=split,
            transform=pair,
            version=version,
            verify=verify,
            image_mode=image_mode,
            extent_bytes=extent_bytes,
        )
        super().__init__(opened.opened, opened.sample_spec, _torchvisions_order(opened))
        self.root = os.fspath(root)
        self._split = split

    @property
    def classes(self) -> list[str]:  # type: ignore[override]
        """Class names in alphabetical order."""
        return list(super().classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The class index of each class name."""
        return {name: number for number, name in enumerate(self.classes)}

    @cached_property
    def targets(self) -> list[int]:
        """The class index of each sample."""
        assert self.catalog.labels is not None, "each image lies in a class folder"
        found: list[int] = self.catalog.labels[self.ids].tolist()
        return found

    @cached_property
    def samples(self) -> list[tuple[str, int]]:
        """(path, class index) of each sample. The path is below `root`, as `root` was given."""
        root = self.root.rstrip("/")
        keys = (self.catalog.key(int(each)) for each in self.ids_of(np.arange(len(self))))
        whole = self._paths_of_keys() if self._split else {}
        return [
            (f"{root}/{whole.get(key, key)}", target) for key, target in zip(keys, self.targets, strict=True)
        ]

    def _paths_of_keys(self) -> dict[str, str]:
        """Return the path below `root` of each key, which lacks the folder of the split."""
        begin = len(self.catalog.uri.rstrip("/")) + 1
        paths = [self.catalog.object(index).uri[begin:] for index in range(self.catalog.objects)]
        return {path.partition("/")[2]: path for path in paths}

    @property
    def imgs(self) -> list[tuple[str, int]]:
        """The same as `samples`."""
        return self.samples

    @property
    def transform(self) -> Transform:
        """The function of an image."""
        return self._pair.transform

    @transform.setter
    def transform(self, transform: Transform) -> None:
        self._apply(_PairTransform(transform, self.target_transform))

    @property
    def target_transform(self) -> Transform:
        """The function of a class index."""
        return self._pair.target_transform

    @target_transform.setter
    def target_transform(self, target_transform: Transform) -> None:
        self._apply(_PairTransform(self.transform, target_transform))

    @property
    def _pair(self) -> _PairTransform:
        pair = self.sample_spec.transform
        assert isinstance(pair, _PairTransform)
        return pair

    def _apply(self, pair: _PairTransform) -> None:
        self.sample_spec = replace(self.sample_spec, transform=pair)
        self.sample_reader = sample_reader(self.catalog, self.sample_spec)


class _PairTransform:
    """Transforms the image and the class index of a sample. Raises InvalidInput for what cannot be called."""

    takes_whole = True

    def __init__(self, transform: Transform, target_transform: Transform) -> None:
        for name, given in (("transform", transform), ("target_transform", target_transform)):
            if not (given is None or callable(given)):
                raise InvalidInput(f"{name}={given!r} is not a function")
        self.transform, self.target_transform = transform, target_transform
        self._rng = rng_parameter(transform)

    def __call__(self, sample: tuple[Any, int], rng: np.random.Generator) -> tuple[Any, Any]:
        image, target = sample
        if self.transform is not None and self._rng == "nothing":
            image = self.transform(image)
        elif self.transform is not None:
            image = self.transform(image, rng=rng) if self._rng == "named" else self.transform(image, rng)
        return image, target if self.target_transform is None else self.target_transform(target)


def _torchvisions_order(opened: Dataset) -> Ints:
    """Return the samples by class, then folder, then name, each by its characters."""
    keys = [opened.catalog.key(sample).rpartition("/")[::2] for sample in range(len(opened))]
    places = [(folder.partition("/")[0], folder, name) for folder, name in keys]
    return np.asarray(sorted(range(len(places)), key=places.__getitem__), np.int64)
