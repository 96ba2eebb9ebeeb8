"""Images that a device decodes: what reaches it, from this process and from workers, and what is refused before."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cachesvc.core.errors import InvalidInput
from loader import DataLoader, jagged, open_dataset
from loader.datasets.decoding.encoded_images import EncodedImage, EncodedImages, stack_encoded
from loader.gpu import image_decoder
from loader.gpu.image_decoder import ImageDecoder, UndecodableImage

COUNT = 6


def picture(number: int, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (40 * number, 90, 10)).convert(mode).save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    with tarfile.open(root / "0.tar", "w") as tar:
        for number in range(COUNT):
            for name, raw in (("jpg", picture(number)), ("cls", str(number).encode())):
                entry = tarfile.TarInfo(f"{number:03d}.{name}")
                entry.size = len(raw)
                tar.addfile(entry, io.BytesIO(raw))
    return root


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 2, "worker_type": "thread"}])
def test_images_stay_encoded_until_they_reach_the_device(
    folder: Path, workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_dataset(folder, decode="cuda")
    assert images[2] == {"jpg": picture(2), "cls": 2}
    with pytest.raises(InvalidInput, match="give device='cuda'"):
        DataLoader(images, 4, **workers)
    monkeypatch.setattr("loader.dataloader.check_device_decoding", lambda *arguments: None)
    found = []
    for batch in DataLoader(images, 4, shuffle=True, **workers):
        assert type(batch["jpg"]) is EncodedImages
        files = [file.numpy().tobytes() for file in batch["jpg"].unbind()]
        found += [*zip(files, batch["cls"].tolist(), strict=True)]
    assert sorted(number for _, number in found) == list(range(COUNT))
    assert all(raw == picture(number) for raw, number in found)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"transform": lambda sample: sample}, "leave transform= out"),
        ({"decode": "gpu"}, "neither 'auto', 'cuda'"),
    ],
)
def test_wrong_samples_are_refused(folder: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        open_dataset(folder, **{"decode": "cuda"} | given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"collate_fn": jagged}, "the default collation"),
        ({"sampler": [0, 1]}, "no sampler"),
        ({"on_error": "skip"}, "does not see images"),
    ],
)
def test_wrong_loaders_are_refused(
    folder: Path, given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.dataloader.check_device", lambda worker_type, device: torch.device("cuda", 0))
    with pytest.raises(InvalidInput, match=told):
        DataLoader(open_dataset(folder, decode="cuda"), 2, **given)


def test_pinned_memory_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="give device='cuda'"):
        [*DataLoader(open_dataset(folder), 2, pinned_bytes=1 << 20)]


class Nvjpeg:
    """Decodes as torchvision's binding does: all or none."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, files: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        self.calls.append(len(files))
        found = [Image.open(io.BytesIO(file.numpy().tobytes())) for file in files]
        if any(image.mode == "CMYK" for image in found):
            raise RuntimeError("nvjpegDecode failed")
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in found]


def test_what_nvjpeg_does_not_read_is_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    nvjpeg, modes = Nvjpeg(), SimpleNamespace(RGB=1, GRAY=2, UNCHANGED=3)
    monkeypatch.setattr(
        image_decoder, "_torchvision", lambda: SimpleNamespace(ImageReadMode=modes, decode_jpeg=nvjpeg)
    )
    decoder = ImageDecoder(torch.device("cpu"), "RGB")
    files = [picture(0), picture(1, "CMYK"), picture(2, kind="PNG"), picture(3)]
    images = stack_encoded(lambda size: np.empty(size, np.uint8))([*map(EncodedImage, files)])
    found = decoder.decode(images)
    assert [tuple(image.shape) for image in found] == [(3, 8, 8 + n) for n in range(4)]
    for image, file in zip(found, files, strict=True):
        expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(image.numpy(), expected)
    damaged = stack_encoded(lambda size: np.empty(size, np.uint8))(
        [EncodedImage(files[0]), EncodedImage(b"no image")]
    )
    with pytest.raises(UndecodableImage) as error:
        decoder.decode(damaged)
    assert error.value.row == 1


def test_images_that_bytes_do_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = SimpleNamespace(RGB=1, GRAY=2, UNCHANGED=3)
    monkeypatch.setattr(
        image_decoder, "_torchvision", lambda: SimpleNamespace(ImageReadMode=modes, decode_jpeg=Nvjpeg())
    )
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(file, "PNG")
    images = stack_encoded(lambda size: np.empty(size, np.uint8))([EncodedImage(file.getvalue())])
    with pytest.raises(UndecodableImage, match="uint16 does not fit uint8"):
        ImageDecoder(torch.device("cpu"), None).decode(images)
