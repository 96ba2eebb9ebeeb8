"""Images that stay encoded until their batch is on its way to a device, which decodes them (`decode="cuda"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from loader.datasets.jagged import Jagged, offsets_of
from loader.reading.address_range import Bytes


class EncodedImage(bytes):
    """The bytes of one image file."""

    __slots__ = ()


class EncodedImages(Jagged):
    """The image files of a batch."""

    __slots__ = ()


def stack_encoded(empty: Callable[[int], Bytes]) -> Callable[..., EncodedImages]:
    """Return a function that joins images, as torch's collation calls it, in memory that `empty` returns."""

    def stack(batch: Sequence[EncodedImage], *, collate_fn_map: Any = None) -> EncodedImages:
        offsets = offsets_of(np.asarray([len(each) for each in batch], np.int64))
        memory = empty(int(offsets[-1]))
        for begin, image in zip(offsets.tolist(), batch, strict=False):
            memory.data[begin : begin + len(image)] = image
        return EncodedImages(torch.from_numpy(memory), torch.from_numpy(offsets))

    return stack
