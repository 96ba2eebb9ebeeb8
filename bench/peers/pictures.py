"""JPEGs at ImageNet size, made from a seed, and the decoding that every peer uses.

A sheet sums random noise at five scales, as photographs have edges and texture. Each picture is a different cut of a
few such sheets. Pillow decodes the whole picture to RGB; then the middle is cut out, as for training.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

SIDES = (500, 375)
"""Three of four pictures are wider than high."""
CUT = 224
QUALITY = 95
"""JPEG quality that gives about 110 KB, the mean of ImageNet."""
NOISE = ((400, 60), (100, 40), (25, 28), (8, 20), (2, 18))
"""Scale in pixels and standard deviation in brightness of each layer of noise."""
SHEETS, SHEET = 4, (1200, 1600)

Array = np.ndarray[Any, Any]


def jpegs(draw: np.random.Generator, count: int) -> Iterator[bytes]:
    """`count` JPEG files."""
    sheets = [_sheet(draw) for _ in range(min(SHEETS, count))]
    for number in range(count):
        wide, high = SIDES if draw.random() < 0.75 else SIDES[::-1]
        top, left = draw.integers(SHEET[0] - high), draw.integers(SHEET[1] - wide)
        cut = sheets[number % len(sheets)][top : top + high, left : left + wide]
        file = io.BytesIO()
        Image.fromarray(cut).save(file, "JPEG", quality=QUALITY)
        yield file.getvalue()


def decoded(raw: Any) -> Array:
    """A JPEG in any buffer -> uint8[224, 224, 3]."""
    pixels = np.asarray(Image.open(io.BytesIO(raw)))
    top, left = (pixels.shape[0] - CUT) // 2, (pixels.shape[1] - CUT) // 2
    return pixels[top : top + CUT, left : left + CUT]


def _sheet(draw: np.random.Generator) -> Array:
    """One sheet of noise, uint8[1200, 1600, 3]."""
    high, wide = SHEET
    sheet = np.full((high, wide, 3), 118, np.float32)
    for scale, deviation in NOISE:
        coarse = draw.normal(0, deviation, (high // scale + 2, wide // scale + 2, 3)).astype(np.float32)
        for color in range(3):
            fine = Image.fromarray(coarse[..., color]).resize((wide, high), Image.Resampling.BICUBIC)
            sheet[..., color] += np.asarray(fine)
    return np.clip(sheet, 0, 255).astype(np.uint8)
