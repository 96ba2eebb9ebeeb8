"""Decodes image files by Pillow, and converts them to the mode that the user asked for."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from cachesvc.catalog.kinds import IMAGES, PLUGIN_IMAGES
from cachesvc.core.errors import InvalidInput, install

ImageMode = Literal["RGB", "L"] | None
"""Pillow's names of the modes that images are converted to; None keeps the mode of the file."""
IMAGE_MODES: tuple[ImageMode, ...] = ("RGB", "L", None)
_WIDE = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N", "F"})
"""Modes of one channel with more than 8 bits, which Pillow clips at 255 when it converts them."""


def is_read(kind: str) -> bool:
    """Tell whether files of this extension, in lower case, are decoded as images. Those that Pillow lacks a plugin for
    stay bytes."""
    return kind in IMAGES and (kind not in PLUGIN_IMAGES or _plugin_reads(kind))


@lru_cache(None)
def _plugin_reads(kind: str) -> bool:
    try:
        from PIL import Image
    except ImportError:
        return False
    try:
        import pillow_heif  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        pillow_heif.register_heif_opener()
    Image.init()
    return f".{kind}" in Image.registered_extensions()


def pillow(name: str) -> Any:
    """Import `PIL.Image`, which decodes the field `name`. Raises InvalidInput where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput(
            f"field {name!r} is an image and Pillow is not installed: {install('images')}, "
            "or give decode=None for bytes"
        ) from None
    return Image


class Converter:
    """Converts the images of one field to a mode, and warns once of images with more than 8 bits a channel.

    Alone such an image is clipped at 255, as by torchvision's `ImageFolder`. `beside_others`: samples have several images,
    where it is a mask or a depth map and keeps its mode.
    """

    def __init__(self, name: str, mode: str | None, beside_others: bool = False) -> None:
        self._name, self._mode, self._beside_others = name, mode, beside_others
        self._warned = False

    def __call__(self, image: Any) -> Any:
        """Return an image in the mode. Pillow would copy an image that already has it."""
        if self._mode is None or image.mode == self._mode:
            return image
        if image.mode in _WIDE:
            if self._beside_others:
                self._warn(image, "keeps its mode beside other images, as masks and depth maps do")
                return image
            if _clips(image):
                self._warn(image, f"is clipped at 255 by image_mode={self._mode!r}")
        return image.convert(self._mode)

    def _warn(self, image: Any, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"an image of field {self._name!r} has more than 8 bits a channel (mode {image.mode}) and {what}: give "
                "image_mode=None to have all images as they are stored",
                stacklevel=3,
            )


def _clips(image: Any) -> bool:
    """Tell whether converting an image of a wide mode changes its values."""
    low, high = image.getextrema()
    return bool(image.mode == "F" or low < 0 or high > 255)


def image_decoder(name: str, convert: Converter) -> Callable[[bytes], Any]:
    """Return the decoder of a field of image files. Raises InvalidInput where Pillow is not installed."""
    image = pillow(name)

    def decode(raw: bytes) -> Any:
        try:
            opened = image.open(io.BytesIO(raw))
        except OSError as error:
            if raw[4:8] == b"ftyp":
                raise ValueError(
                    "Pillow reads HEIC and AVIF with a plugin: pip install pillow-heif"
                ) from error
            raise
        opened.load()
        return convert(opened)

    return decode
