"""JPEGs at ImageNet size, made from a seed, and the one way in which every peer decodes them.

Drawn noise of five sizes of detail lies over each other, as edges and texture do in photographs; pictures are cut
out of a few such sheets, and none is like another. Decoding is Pillow's, whole, to RGB; then what a model is
trained on is cut out of the middle.
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
"""Makes about 110 KB of such a picture, the mean of ImageNet."""
DETAILS = ((400, 60), (100, 40), (25, 28), (8, 20), (2, 18))
"""Pixels that one detail spans, and how far it reaches in brightness."""
SHEETS, SHEET = 4, (1200, 1600)

Array = np.ndarray[Any, Any]


def made(draw: np.random.Generator, count: int) -> Iterator[bytes]:
    """JPEG files."""
    sheets = [_sheet(draw) for _ in range(min(SHEETS, count))]
    for number in range(count):
        wide, high = SIDES if draw.random() < 0.75 else SIDES[::-1]
        top, left = draw.integers(SHEET[0] - high), draw.integers(SHEET[1] - wide)
        cut = sheets[number % len(sheets)][top : top + high, left : left + wide]
        file = io.BytesIO()
        Image.fromarray(cut).save(file, "JPEG", quality=QUALITY)
        yield file.getvalue()


def decoded(raw: Any) -> Array:
    """A JPEG, in anything that has a buffer -> uint8[224, 224, 3]."""
    pixels = np.asarray(Image.open(io.BytesIO(raw)))
    top, left = (pixels.shape[0] - CUT) // 2, (pixels.shape[1] - CUT) // 2
    return pixels[top : top + CUT, left : left + CUT]


def _sheet(draw: np.random.Generator) -> Array:
    """uint8[high, wide, 3]."""
    high, wide = SHEET
    found = np.full((high, wide, 3), 118, np.float32)
    for span, reach in DETAILS:
        coarse = draw.normal(0, reach, (high // span + 2, wide // span + 2, 3)).astype(np.float32)
        for color in range(3):
            fine = Image.fromarray(coarse[..., color]).resize((wide, high), Image.Resampling.BICUBIC)
            found[..., color] += np.asarray(fine)
    return np.clip(found, 0, 255).astype(np.uint8)
