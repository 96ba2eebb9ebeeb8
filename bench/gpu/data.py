"""The data of the checks and measurements, and a daemon that holds it in memory."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader import Dataset, open_dataset
from testbed.node import Daemon

RECORD_BYTES, ODD_BYTES, SEQ_LEN = 3072, 3073, 2048
VOCABULARY = 50_000
WIDTH, HEIGHT = 500, 375


@dataclass(frozen=True)
class Data:
    """Folders of one run. `gib`: size of the records, and of the tokens; odd records have an eighth of it."""

    root: Path
    gib: float

    def path(self, name: str) -> Path:
        """Return the file of records, odd records or tokens."""
        return self.root / name / f"{name}.bin"

    def records(self, name: str = "records") -> Dataset:
        """Return uint8 records."""
        size = ODD_BYTES if name == "odd" else RECORD_BYTES
        return open_dataset(self.path(name).parent, format="records", record_bytes=size)

    def tokens(self, **more: Any) -> Dataset:
        """Return sequences of uint16 tokens; by default with shifted int64 targets."""
        form: dict[str, Any] = {"overlap": 1, "targets": "shifted"} | more
        return open_dataset(
            self.path("tokens").parent, format="tokens", dtype="uint16", seq_len=SEQ_LEN, **form
        )

    def pictures(self, **more: Any) -> Dataset:
        """Return tar members: a JPEG and a class each."""
        return open_dataset(self.root / "pictures", **more)


def write(data: Data, pictures: int) -> None:
    """Write random records and tokens, and tars of photograph-like JPEGs of about 75 KB."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, 64 << 20, np.uint8)
    for name in ("records", "odd"):
        data.path(name).parent.mkdir(parents=True)
        with data.path(name).open("wb") as file:
            for number in range(max(1, int(data.gib * 16 / (8 if name == "odd" else 1)))):
                file.write(np.roll(block, number * 4099 + 1).data)
    data.path("tokens").parent.mkdir(parents=True)
    tokens = rng.integers(0, VOCABULARY, 32 << 20, np.uint16)
    with data.path("tokens").open("wb") as file:
        for number in range(max(1, int(data.gib * 16))):
            file.write(np.roll(tokens, number * 4099 + 1).data)
    (data.root / "pictures").mkdir()
    files = [jpeg(number) for number in range(64)]
    for shard in range(4):
        with tarfile.open(data.root / "pictures" / f"{shard}.tar", "w") as tar:
            for number in range(shard, pictures, 4):
                for name, raw in (("jpg", files[number % 64]), ("cls", str(number).encode())):
                    entry = tarfile.TarInfo(f"{number:06d}.{name}")
                    entry.size = len(raw)
                    tar.addfile(entry, io.BytesIO(raw))


def jpeg(number: int, mode: str = "RGB") -> bytes:
    """Return a picture of gradients with some noise, encoded at quality 90."""
    from PIL import Image

    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [128 + 80 * np.sin(x / 31 + y / (40 + number)), 128 + 70 * np.cos(x / 17), (x + y) % 256]
    noise = np.random.default_rng(number).normal(0, 6, (HEIGHT, WIDTH, 3))
    pixels = (np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, "JPEG", quality=90)
    return out.getvalue()


@contextmanager
def daemon(data: Data, ram: str) -> Iterator[Daemon]:
    """Serve the data from a RAM tier of that size."""
    with Daemon(data.root / "node", ["--ram", ram, "--allow", f"{data.root}/"]) as found:
        os.environ.update(found.env)
        try:
            yield found
        finally:
            for name in found.env:
                del os.environ[name]
