"""Real data that every machine has: the standard library's sources as byte tokens, and scikit-learn's digits."""

from __future__ import annotations

import io
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def library_tokens(limit_bytes: int) -> np.ndarray:
    """The standard library's sources in path order as uint8 tokens, cut to `limit_bytes`."""
    texts: list[bytes] = []
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or total >= limit_bytes:
            continue
        texts.append(path.read_bytes())
        total += len(texts[-1])
    return np.frombuffer(b"".join(texts)[:limit_bytes], np.uint8)


def digit_images() -> Iterator[tuple[str, bytes]]:
    """(key, PNG bytes) of the 1,797 digits, one folder per class."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target)):
        buffer = io.BytesIO()
        Image.fromarray((image * 15.9375).astype(np.uint8)).save(buffer, "PNG")
        yield f"{label}/{number:04d}.png", buffer.getvalue()


def say(event: str, **fields: object) -> None:
    """Print one line of JSON to standard output in one write, since several ranks share the pipe."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())
