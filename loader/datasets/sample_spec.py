"""The form of a sample that the user asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cachesvc.core.errors import InvalidInput
from loader.datasets.decoding.images import IMAGE_MODES, ImageMode
from loader.datasets.targets import Targets, check_targets


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The form of a sample that the user asked for; see `open_dataset`. Raises InvalidInput for bad arguments."""

    fields: tuple[str, ...] | None = None
    decode: Literal["auto", "cuda"] | Callable[..., Any] | None = "auto"
    transform: Callable[..., Any] | None = None
    out: str | None = None
    image_mode: ImageMode = "RGB"
    targets: Targets | None = None
    bare: bool = False
    """A sample is the value of its only field, not a tuple of one."""

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if not (self.decode in (None, "auto", "cuda") or callable(self.decode)):
            raise InvalidInput(
                f"decode={self.decode!r} is neither 'auto', 'cuda', None (bytes) nor a function of the sample"
            )
        if self.decode == "cuda" and self.transform is not None:
            raise InvalidInput(
                "decode='cuda' decodes whole batches on the device: transform those there, and leave transform= out"
            )
        if not (self.transform is None or callable(self.transform)):
            raise InvalidInput(f"transform={self.transform!r} is not a function of the sample")
        if self.image_mode not in IMAGE_MODES:
            choices = ", ".join(map(repr, IMAGE_MODES))
            raise InvalidInput(
                f"image_mode={self.image_mode!r}: give one of {choices}; None leaves images as they are"
            )
        if self.image_mode != "RGB" and self.decode not in ("auto", "cuda"):
            raise InvalidInput(
                f"image_mode={self.image_mode!r} is for decode='auto' or 'cuda', not decode={self.decode!r}"
            )
