"""Tables of `python -m bench peers`, made from its results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.compare import COLD_KIND, DECODED_KIND, DISK_KIND, LIMIT, OURS, Results
from bench.grid import Grid, spread

WARM_HEAD = (
    "loader",
    "workers",
    "samples/s",
    "of the limit",
    "GB/s",
    "CPU-s/GB",
    "memory, MB",
    "first batch, ms",
)
COLD_HEAD = ("loader", "epoch, s", "over s5cmd", "first batch, s", "S3 bytes / dataset", "a second job's, s")
DISK_HEAD = ("loader", "page cache warm, samples/s", "CPU-s/GB", "page cache cold, samples/s", "CPU-s/GB")
KIND_TITLES = {
    "records": "Warm, 3,072-byte records, batch 64",
    "varied": "Warm, records of 1.5 to 4.5 KB, batch 64, in process",
    "tokens": "Warm, sequences of 2,048 x uint16, batch 64",
    "blobs": "Warm, blobs of 55 to 165 KB, batch 32",
    "images": "Warm, JPEGs of 500 x 375 decoded by Pillow and cut to 224 x 224, batch 32, on two cores",
    "rows": "Warm, as many samples as ImageNet has, 128 bytes each, batch 256; only loaders that take little memory",
}
LIMITS: dict[str, str] = {"varied": "a plain join of slices", DECODED_KIND: "the decoder alone"}


def grids(results: Results) -> list[Grid]:
    """A warm table per kind, then those of the disk and of cold epochs."""
    warm = [_warm(results, kind) for kind in KIND_TITLES]
    return [*warm, _disk(results), _cold(results)]


def _name(peer: str, kind: str = "") -> str:
    limit = f"*{LIMITS.get(kind, 'the bare copy')}*"
    return f"**{peer}**" if peer == OURS else limit if peer == LIMIT else peer


def _median(answer: dict[str, Any], what: str) -> float:
    return statistics.median(run[what] for run in answer["runs"])


def _warm(results: Results, kind: str) -> Grid:
    shared = results.shared_bytes.get(kind, 0) / 1e6
    title = (
        f"{KIND_TITLES[kind]}, {results.sizes[kind] / 1e6:,.0f} MB. Memory is that of trainer and workers;"
        f" the daemon and its tier hold {shared:,.0f} MB more, once per node"
    )
    return Grid(title, WARM_HEAD, list(_warm_rows(results, kind)))


def _limits(results: Results, kind: str) -> Iterator[float]:
    """Rates of the limit, one per worker set-up."""
    for key, answer in results.warm.items():
        if key.startswith(f"{kind}/{LIMIT}/") and "runs" in answer:
            yield _median(answer, "samples_s")


def _warm_rows(results: Results, kind: str) -> Iterator[tuple[str, ...]]:
    limit = max(_limits(results, kind), default=float("nan"))
    for key, answer in results.warm.items():
        of_kind, peer, workers = key.split("/")
        if of_kind != kind:
            continue
        if "error" in answer:
            yield _name(peer, kind), workers, answer["error"]
            continue
        mark = "" if answer.get("exact", True) else " (NOT EACH SAMPLE ONCE)"
        yield (
            _name(peer, kind) + mark,
            workers,
            spread([run["samples_s"] for run in answer["runs"]]),
            f"{_median(answer, 'samples_s') / limit:.2f}",
            f"{_median(answer, 'bytes_s') / 1e9:.2f}",
            f"{_median(answer, 'cpu_s_gb'):.2f}",
            f"{answer['memory_bytes'] / 1e6:,.0f}",
            f"{answer['first_s'] * 1e3:,.0f}",
        )


def _disk(results: Results) -> Grid:
    title = f"Local {DISK_KIND} of four times the RAM tier, 0 workers: ours from NVMe, the others from their own files"
    rows: list[tuple[str, ...]] = []
    for peer, answer in results.disk.items():
        if "error" in answer:
            rows.append((_name(peer), answer["error"]))
            continue
        cells = (
            (
                spread([run["samples_s"] for run in answer[how]]),
                spread([run["cpu_s_gb"] for run in answer[how]], ".2f"),
            )
            for how in ("warm", "cold")
        )
        rows.append((_name(peer), *(cell for both in cells for cell in both)))
    return Grid(title, DISK_HEAD, rows)


def _cold(results: Results) -> Grid:
    size = results.sizes[COLD_KIND]
    title = f"Cold, {size / 1e6:,.0f} MB of {COLD_KIND} from S3, 20 ms a request and 90 MB/s a connection, 0 workers"
    copied = [one["epoch_s"] for one in results.cold.get(LIMIT, []) if "epoch_s" in one]
    bare = statistics.median(copied) if copied else float("nan")
    rows: list[tuple[str, ...]] = []
    for peer, answers in results.cold.items():
        name = "*`s5cmd cp` alone*" if peer == LIMIT else _name(peer)
        failed = [one["error"] for one in answers if "error" in one]
        if failed:
            rows.append((name, failed[0]))
            continue
        epochs = [one["epoch_s"] for one in answers]
        rows.append(
            (
                name,
                spread(epochs, ".2f"),
                f"{statistics.median(epochs) / bare:.2f}",
                spread([one["first_s"] for one in answers], ".2f"),
                f"{statistics.median(one['source_bytes'] for one in answers) / size:.2f}",
                "-" if peer == LIMIT else spread([one["second_s"] for one in answers], ".2f"),
            )
        )
    return Grid(title, COLD_HEAD, rows)
