"""Decodes the images of a batch on the device: JPEGs together by nvJPEG, others one by one by Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput
from loader.datasets.decoding.encoded_images import EncodedImages
from loader.datasets.decoding.images import Converter, ImageMode, image_decoder

_JPEG = b"\xff\xd8\xff"


class UndecodableImage(Exception):
    """An image that does not decode; `row` is its place in the batch."""

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"image {row} of a batch does not decode: {cause}")
        self.row, self.cause = row, cause


class ImageDecoder:
    """Decodes images to uint8 tensors [3, height, width] of a device; [1, height, width] for the mode "L"."""

    def __init__(self, device: torch.device, mode: ImageMode) -> None:
        """Raises InvalidInput where torchvision is not installed."""
        io = _torchvision()
        self._device, self._decode_jpeg = device, io.decode_jpeg
        modes = {"RGB": io.ImageReadMode.RGB, "L": io.ImageReadMode.GRAY, None: io.ImageReadMode.UNCHANGED}
        self._mode, self._by_pillow = modes[mode], image_decoder("image", Converter("image", mode))

    def decode(self, images: EncodedImages) -> list[torch.Tensor]:
        """Return the images of a batch, decoded on the current stream. Raises UndecodableImage."""
        files = images.unbind()
        jpegs = [row for row, file in enumerate(files) if file[:3].numpy().tobytes() == _JPEG]
        found = dict(zip(jpegs, self._by_device([files[row] for row in jpegs]), strict=True))
        decoded = [found.get(row) for row in range(len(files))]
        return [
            image if image is not None else self._by_processor(row, files[row])
            for row, image in enumerate(decoded)
        ]

    def _by_device(self, files: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Decode JPEGs; None for each that nvJPEG does not read: CMYK, for example, or damaged ones."""
        if not files:
            return []
        try:
            return self._decode(list(files))
        except RuntimeError:
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return [*self._by_device(files[:half]), *self._by_device(files[half:])]

    def _decode(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._decode_jpeg(files, mode=self._mode, device=self._device)
        return found

    def _by_processor(self, row: int, file: torch.Tensor) -> torch.Tensor:
        try:
            pixels: np.ndarray[Any, Any] = np.array(self._by_pillow(file.numpy().tobytes()))
        except Exception as error:  # Pillow's plugins raise their own
            raise UndecodableImage(row, error) from error
        if pixels.dtype not in (np.uint8, np.bool_):
            wide = TypeError(f"{pixels.dtype} does not fit uint8: give decode='auto', or image_mode='L'")
            raise UndecodableImage(row, wide)
        planes = torch.from_numpy(pixels.astype(np.uint8, copy=False))
        planes = planes[None] if planes.dim() == 2 else planes.permute(2, 0, 1).contiguous()
        return planes.to(self._device)


def _torchvision() -> Any:
    try:
        from torchvision import io
    except (ImportError, OSError):
        raise InvalidInput(
            "decode='cuda' needs torchvision with CUDA, and it is not installed: pip install torchvision"
        ) from None
    return io
