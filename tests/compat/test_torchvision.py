"""`ImageFolder` beside torchvision's, over photographs and images of every mode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from loader import ImageFolder

try:
    from torchvision import datasets as torchvision_datasets
except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch than the one installed
    pytest.skip(f"torchvision does not load here: {error}", allow_module_level=True)

SAVED: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("JPEG", "jpg", {"quality": 75}),
    ("JPEG", "JPEG", {"subsampling": 0}),
    ("PNG", "png", {}),
    ("WEBP", "webp", {"lossless": True}),
    ("TIFF", "tiff", {}),
    ("BMP", "bmp", {}),
    ("PPM", "ppm", {}),
)
MODES = ("RGB", "L", "P", "RGBA", "CMYK")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        for form, extension, options in SAVED:
            for mode in MODES:
                photo, file = Image.fromarray(pixels).resize((160, 107)), io.BytesIO()
                try:
                    photo.convert(mode).save(file, form, **options)
                except OSError:  # the format has no such mode
                    continue
                path = tmp_path / "data" / name / mode / f"{mode} {len(options)}.{extension}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.getvalue())
    for beside in ("top.png", "china/notes.txt", "china/x.gif"):
        (tmp_path / "data" / beside).write_bytes(b"x")
    return tmp_path / "data"


def test_everything_equals_torchvisions(root: Path) -> None:
    ours, theirs = ImageFolder(str(root)), torchvision_datasets.ImageFolder(str(root))
    assert len(ours) == len(theirs) > 40
    for name in ("classes", "class_to_idx", "targets", "samples", "imgs", "root"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for index in range(len(ours)):
        (image, target), (wanted, wanted_target) = ours[index], theirs[index]
        assert (image.mode, image.size, target) == (wanted.mode, wanted.size, wanted_target)
        assert np.array_equal(np.asarray(image), np.asarray(wanted)), theirs.samples[index]
