"""One ledger for all formats of rows: what their own writers write, what their own readers give, and what ours gives.

`python -m tests.support.formats.row_ledger FORMAT FOLDER` writes the small files that tests without that writer read.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

COUNT = 208
"""Number of rows: a multiple of two ranks' batches, so that no row is repeated."""
BATCH, RANKS, STOP = 8, 2, 5
Row = tuple[str, int]
Ledger = Counter[str]


def rows() -> list[Row]:
    """Return texts, some with quotes, breaks and other alphabets, and a number."""
    return [(f'row {n} "ü", \n{"x" * (n % 40)}', n - 9) for n in range(COUNT)]


def ledger(found: Iterable[Row]) -> Ledger:
    """Count rows by their SHA-256."""
    return Counter(hashlib.sha256(repr((text, int(n))).encode()).hexdigest() for text, n in found)


# ---- writers


def _parts() -> Iterator[tuple[int, list[Row]]]:
    return ((part, rows()[part::3]) for part in range(3))


def write_mds(root: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(root), columns={"text": "str", "n": "int"}, size_limit=2000) as out:
        for text, n in rows():
            out.write({"text": text, "n": n})


def write_litdata(root: Path) -> None:
    from litdata import optimize

    optimize(
        _row,
        list(range(COUNT)),
        str(root),
        num_workers=1,
        chunk_bytes=2000,
        start_method="fork",
        verbose=False,
    )


def _row(number: int) -> Row:
    return rows()[number]


def write_tfrecord(root: Path) -> None:
    from tfrecord import TFRecordWriter
    from tfrecord.tools.tfrecord2idx import create_index

    for part, found in _parts():
        path = root / f"{part}.tfrecord"
        out = TFRecordWriter(str(path))
        for text, n in found:
            out.write({"text": (text.encode(), "byte"), "n": (n, "int")})
        out.close()
        create_index(str(path), f"{path}.idx")


def write_webdataset(root: Path) -> None:
    from webdataset import TarWriter

    for part, found in _parts():
        with TarWriter(str(root / f"{part}.tar.gz")) as out:
            for text, n in found:
                out.write({"__key__": f"{n:04}", "txt": text, "cls": n})


# ---- the formats' own readers


def by_streaming(root: Path) -> Iterator[Row]:
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(root), batch_size=1)
    return ((data[at]["text"], data[at]["n"]) for at in range(len(data)))


def by_litdata(root: Path) -> Iterator[Row]:
    from litdata import StreamingDataset

    data = StreamingDataset(str(root))
    return (tuple(data[at]) for at in range(len(data)))


def by_tfrecord(root: Path) -> Iterator[Row]:
    from tfrecord import tfrecord_loader

    for path in root.glob("*.tfrecord"):
        for row in tfrecord_loader(str(path), None):
            yield bytes(row["text"]).decode(), int(row["n"][0])


def by_webdataset(root: Path) -> Iterator[Row]:
    from webdataset import WebDataset

    shards = sorted(map(str, root.glob("*.tar.gz")))
    return iter(WebDataset(shards, shardshuffle=False).decode().to_tuple("txt", "cls"))


FORMATS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Iterable[Row]]]] = {
    "mds": ("streaming", write_mds, by_streaming),
    "litdata": ("litdata", write_litdata, by_litdata),
    "tfrecord": ("tfrecord", write_tfrecord, by_tfrecord),
    "webdataset": ("webdataset", write_webdataset, by_webdataset),
}
"""By format: the package that it needs, its writer and its reader."""


# ---- ours


def ours(uri: str | Path, workers: int) -> Ledger:
    """Read an epoch with two ranks, shuffled, in batches of default collation; each rank stops after five batches, and
    another loader continues from its state."""
    from loader import DataLoader, open_dataset

    found: Ledger = Counter()
    data = open_dataset(uri, extent_bytes=4096)
    for rank in range(RANKS):

        def loader(rank: int = rank) -> Any:
            return DataLoader(
                data, BATCH, shuffle=True, seed=3, num_workers=workers, rank=rank, world_size=RANKS
            )

        begun, resumed = loader(), loader()
        batches = iter(begun)
        found += _counted(islice(batches, STOP))
        resumed.load_state_dict(begun.state_dict())
        del batches
        found += _counted(resumed)
    return found


def _counted(batches: Iterable[Any]) -> Ledger:
    found: Ledger = Counter()
    for batch in batches:
        texts, numbers = batch if isinstance(batch, list) else (_values(batch, names) for names in _NAMES)
        found += ledger(
            (text.decode() if isinstance(text, bytes) else text, n)
            for text, n in zip(texts, numbers.tolist(), strict=True)
        )
    return found


_NAMES = (("text", "0", "txt"), ("n", "1", "cls"))
"""Names of the fields, those of the items of a tuple in litData, and those of the members in a tar."""


def _values(batch: dict[str, Any], names: Sequence[str]) -> Any:
    return next(batch[name] for name in names if name in batch)


if __name__ == "__main__":
    FORMATS[sys.argv[1]][1](Path(sys.argv[2]))
