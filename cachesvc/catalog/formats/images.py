"""Compiles a folder of class folders as torchvision's `ImageFolder` reads it: each image is a sample of its own.

The first folder below the URI is the class. Extensions are torchvision's, in upper or lower case.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, paths_of
from cachesvc.catalog.formats.files import IMAGE, draft_files, one_each
from cachesvc.catalog.labels.sidecars import class_folders
from cachesvc.catalog.layout import Field

EXTENSIONS = frozenset({"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"})
"""Extensions of `torchvision.datasets.folder.IMG_EXTENSIONS`."""


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the images that lie in a folder below the URI."""
    return [entry for entry in entries if entry.extension in EXTENSIONS and "/" in entry.path]


def compile_images(inputs: Inputs) -> Draft:
    """Compile class folders. Raises NotFound where every image is empty."""
    paths = [entry.path for entry in inputs.entries]
    keys = paths_of(inputs.entries)
    size = ints(array("q", [entry.object.size_bytes for entry in inputs.entries]))
    samples = one_each(keys, Field(IMAGE, "jpg"), size)
    draft, files = draft_files(inputs, range(len(paths)), samples)
    draft.label(inputs, class_folders(paths, files.sample, files.samples))
    return draft
