"""A transform gets the whole sample. One that expects the image alone is told so, in one line and with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, ImageFolder, open_dataset
from tests.support.datasets import write_files


def resized(image: Any) -> Any:
    return np.asarray(image.resize((4, 4)))


def strict(image: Any) -> Any:
    """Fail as torchvision's transforms of images do."""
    raise TypeError(f"pic should be PIL Image or ndarray. Got {type(image)}")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of pictures, as text."""
    write_files(tmp_path / "pets", {f"{kind}/{n}.txt": b"x" for kind in ("cat", "dog") for n in range(2)})
    return tmp_path / "pets"


@pytest.mark.parametrize("transform", [resized, strict])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_names_the_pair_and_image_folder(pets: Path, transform: Any, workers: int) -> None:
    batches = DataLoader(open_dataset(pets, transform=transform), 2, num_workers=workers)
    with pytest.raises(InvalidInput) as caught:
        next(iter(batches))
    said = str(caught.value)
    assert "get the whole sample, here the pair (str, int)" in said
    assert "cachesvc.torch.ImageFolder" in said
    assert "\n" not in said


def test_the_error_names_the_fields_of_a_dict(tmp_path: Path) -> None:
    write_files(tmp_path / "rows", {"a.csv": b"text,n\nx,1\n"})
    with pytest.raises(InvalidInput, match=r"the dict of text, n: .* choose one by fields="):
        open_dataset(tmp_path / "rows", transform=strict)[0]


def test_other_errors_of_a_transform_pass(pets: Path) -> None:
    def fails(sample: Any) -> Any:
        raise TypeError("of my own")

    with pytest.raises(TypeError, match="of my own"):
        open_dataset(pets, transform=fails)[0]


def fails_on_a_tuple(image: Any) -> Any:
    raise TypeError(f"no tuple, and {type(image).__name__}")


def test_the_transform_of_an_image_folder_gets_no_pair(tmp_path: Path) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images/cat/0.png")
    with pytest.raises(TypeError, match="no tuple, and PngImageFile"):
        ImageFolder(tmp_path / "images", transform=fails_on_a_tuple)[0]
    assert ImageFolder(tmp_path / "images", transform=resized)[0][0].shape == (4, 4, 3)
