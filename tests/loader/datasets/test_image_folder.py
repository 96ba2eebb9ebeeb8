"""`ImageFolder` has torchvision's samples, attributes and order; `tests/compat` compares it with torchvision itself."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset

from cachesvc.core.errors import InvalidInput, NotFound
from loader import DataLoader, ImageFolder, open_dataset
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.datasets import write_files

PATHS = ("b/1.PNG", "b/x/0.jpeg", "b/x-y/0.jpg", "b/0.jpg", "a b/1.png", "a b/1.jpg", "é/0.webp", "B/0.bmp")
"""Two pictures of one stem are two samples. `B` comes before `a b`."""
ORDER = ("B/0.bmp", "a b/1.jpg", "a b/1.png", "b/0.jpg", "b/1.PNG", "b/x/0.jpeg", "b/x-y/0.jpg", "é/0.webp")
CLASSES = ["B", "a b", "b", "é"]
BESIDE = {"top.jpg": b"x", "b/0.txt": b"x", "b/notes.md": b"x", "b/Thumbs.db": b"x", "b/x.gif": b"x"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_files(tmp_path / "d", BESIDE)
    for number, path in enumerate(PATHS):
        file = tmp_path / "d" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (number + 1, 6)).save(file)
    return tmp_path / "d"


def width(image: Image.Image) -> int:
    return image.size[0]


def negative(target: int) -> int:
    return -target


def check(data: ImageFolder, root: str) -> None:
    targets = [CLASSES.index(path.partition("/")[0]) for path in ORDER]
    assert (data.classes, data.targets) == (CLASSES, targets)
    assert data.class_to_idx == {name: number for number, name in enumerate(CLASSES)}
    assert data.samples == data.imgs == [(f"{root}/{path}", n) for path, n in zip(ORDER, targets)]
    assert [data[n] for n in range(len(data))] == [
        (PATHS.index(path) + 1, -n) for path, n in zip(ORDER, targets)
    ]


def test_attributes_samples_and_order_are_torchvisions(root: Path) -> None:
    data = ImageFolder(root, width, negative)
    check(data, str(root))
    assert any(note.endswith("tools: Thumbs.db") for note in data.catalog.notes)
    assert any(
        note.startswith("4 of 12 objects are no images and were left out") for note in data.catalog.notes
    )
    image, target = ImageFolder(str(root))[0]
    assert (image.mode, image.size, target) == ("RGB", (8, 6), 0)
    again = pickle.loads(pickle.dumps(data))
    check(again, str(root))


def test_a_split_is_opened_as_its_folder_and_its_paths_are_whole(root: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(root, root.parent / "splits" / split)
    with pytest.raises(InvalidInput, match='choose one by split="train"'):
        ImageFolder(root.parent / "splits")
    data = ImageFolder(root.parent / "splits", width, negative, split="validation")
    assert data.samples == [
        (f"{data.root}/val/{path}", CLASSES.index(path.partition("/")[0])) for path in ORDER
    ]
    check(ImageFolder(root.parent / "splits/val", width, negative), f"{data.root}/val")
    assert [data[n] for n in range(3)] == [
        ImageFolder(f"{data.root}/val", width, negative)[n] for n in range(3)
    ]


def test_a_bucket_through_a_daemon_gives_the_same(
    root: Path,
    tmp_path: Path,
    s3_server: SeaweedFS,
    bucket: str,
    s3_env: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path in root.rglob("*.*"):
        if path.is_file():
            key = f"p/{path.relative_to(root)}"
            s3_server.client().put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"s3://{bucket}/"]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        check(ImageFolder(f"s3://{bucket}/p/", width, negative), f"s3://{bucket}/p")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_has_each_sample_once(root: Path, workers: int) -> None:
    data = ImageFolder(root, width)
    expected = sorted(zip((PATHS.index(path) + 1 for path in ORDER), data.targets))
    ranks = [DataLoader(data, 2, shuffle=True, num_workers=workers, rank=n, world_size=2) for n in range(2)]
    seen = [
        pair
        for loader in ranks
        for widths, targets in loader
        for pair in zip(widths.tolist(), targets.tolist())
    ]
    assert sorted(seen) == expected
    in_order = [n for widths, _ in DataLoader(data, 3, num_workers=workers) for n in widths.tolist()]
    assert in_order == [PATHS.index(path) + 1 for path in ORDER]


def test_transforms_may_be_assigned_and_copies_have_their_own(root: Path) -> None:
    data = ImageFolder(root, width)
    other = copy.copy(data)
    other.transform, other.target_transform = None, negative
    assert (data.transform, data.target_transform) == (width, None)
    assert isinstance(other[7][0], Image.Image)
    assert (data[7][1], other[7][1]) == (3, -3)
    with pytest.raises(InvalidInput, match="target_transform=3 is not a function"):
        other.target_transform = 3  # type: ignore[assignment]


def test_a_transform_may_take_a_generator(root: Path) -> None:
    def draw(image: Image.Image, rng: np.random.Generator) -> float:
        return rng.random()

    drawn = []
    for data in (ImageFolder(root, draw), ImageFolder(root, lambda image, rng: rng.random())):
        torch.manual_seed(7)  # without a loader its numbers decide, as those of any transform
        drawn.append(data[0])
    assert drawn[0] == drawn[1]


class WithPath(ImageFolder):
    """A subclass as many repositories derive it from torchvision's."""

    def __init__(self, root: Path, suffix: str) -> None:
        super().__init__(root, width)
        self.suffix = suffix

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.samples[index][0] + self.suffix)


def _paths(batches: Any) -> Iterator[str]:
    for _, _, paths in batches:
        yield from paths


SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, pytest.param(SPAWNED, marks=pytest.mark.slow)])
def test_a_subclass_may_make_its_own_samples(root: Path, workers: dict[str, Any]) -> None:
    data = WithPath(root, "!")
    wanted = [f"{root}/{path}!" for path in ORDER]
    assert list(_paths(DataLoader(data, 3, **workers))) == wanted
    assert list(_paths(TorchDataLoader(data, 3, **workers))) == wanted
    shuffled = DataLoader(data, 3, shuffle=True, **workers)
    assert sorted(_paths(shuffled)) == sorted(wanted)
    assert list(_paths(DataLoader(Subset(data, [5, 2]), 3))) == [wanted[5], wanted[2]]
    ranks = [DataLoader(data, 2, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(path for loader in ranks for path in _paths(loader)) == sorted(wanted)


def test_what_cannot_be_honoured_is_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match="opens no paths"):
        ImageFolder(root, loader=lambda path: path)
    with pytest.raises(NotFound, match="holds no images data"):
        ImageFolder(root / "é")
    with pytest.raises(InvalidInput, match="labels='folder' is for files"):
        open_dataset(root, format="images", labels="folder")


def test_pictures_of_mixed_extensions_beside_texts_are_one_field(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"a.jpg": b"1", "a.txt": b"one", "b.PNG": b"2", "b.txt": b"two"})
    data = open_dataset(tmp_path / "d", fields=("image", "txt"), decode=None)
    assert sorted(data[n] for n in range(2)) == [(b"1", b"one"), (b"2", b"two")]
    write_files(tmp_path / "e", {"a.jpg": b"1", "a.png": b"mask", "b.jpg": b"2", "b.png": b"mask"})
    masked = open_dataset(tmp_path / "e", fields=("jpg", "png"), decode=None)
    assert sorted(masked[n] for n in range(2)) == [(b"1", b"mask"), (b"2", b"mask")]
