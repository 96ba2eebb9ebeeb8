"""The stall clock names the causes of waits, and the causes sum to the wait."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import NotFound
from cachesvc.core.histogram import BUCKETS
from cachesvc.core.stalls import CAUSES, StallReport
from loader import DataLoader, open_dataset
from loader.batches.maker import BatchReport, MadeBatch, ReportTotals, move_batch
from loader.batches.stats import Stats
from loader.reading.reader import ORIGINS
from loader.reading.wait_clock import TRANSFER
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS, free_ports
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT, BATCH = 64, 8
SLOW_S = 0.1
TURNS = 5


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(COUNT * 1024, dtype="<i4").reshape(COUNT, 1024))
    return compiled(root / "r.bin", root, format="records", dtype="(1024,)i4", extent_bytes=16384)


def measured(make: Callable[[], DataLoader], cause: str) -> Stats:
    """Return the stats of an epoch in which this cause dominates: the first one that no other process disturbed."""
    for turn in range(TURNS):
        loader = make()
        steps = sum(1 for _ in loader)
        stats = loader.stats()
        assert stats.steps == steps
        assert set(stats.wait_by_cause_s) == set(CAUSES)
        assert sum(stats.wait_by_cause_s.values()) == pytest.approx(stats.wait_s, rel=0.05)
        assert stats.wait_p50_s <= stats.wait_p95_s <= stats.wait_p99_s <= stats.wait_s
        if stats.wait_by_cause_s[cause] > 0.5 * stats.wait_s:
            break
        assert turn < TURNS - 1, stats
    return stats


def slow(link: MemoryLink) -> MemoryLink:
    """A source that is slow for each extent."""
    return replace(link, delays_s=dict.fromkeys(range(COUNT), SLOW_S))


def busy(record: torch.Tensor) -> torch.Tensor:
    """A transform that uses CPU time."""
    end = time.thread_time() + 0.006
    while time.thread_time() < end:
        pass
    return record


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_source_is_named(link: MemoryLink, workers: int) -> None:
    stats = measured(lambda: DataLoader(in_memory(slow(link)), BATCH, num_workers=workers), "source")
    assert stats.wait_by_cause_s["source"] > SLOW_S


@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_for_a_missing_object_counts_as_source(link: MemoryLink, workers: int) -> None:
    lost = replace(link, lost={0: NotFound("gone")}, delays_s={0: SLOW_S})
    measured(lambda: DataLoader(in_memory(lost), BATCH, num_workers=workers, on_error="skip"), "source")


def test_waiting_for_an_extent_that_another_thread_fetches_counts_as_source(link: MemoryLink) -> None:
    dataset, both = in_memory(slow(link)), Barrier(2)

    def read(_: int) -> float:
        both.wait()
        dataset[0]
        return dataset.opened.reading_s()[0]

    with ThreadPoolExecutor(2) as threads:
        assert min(threads.map(read, range(2))) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_decoding_is_named(link: MemoryLink, workers: int) -> None:
    measured(lambda: DataLoader(in_memory(link, transform=busy), BATCH, num_workers=workers), "decode")


def test_a_slow_object_store_is_named(
    bucket: str,
    s3_server: SeaweedFS,
    s3_env: dict[str, str],
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": proxy.endpoint,
        "XDG_CACHE_HOME": str(tmp_path),
        "CACHESVC": "off",
    }.items():
        monkeypatch.setenv(name, value)
    rows = np.random.default_rng(0).integers(0, 99, (BATCH, 1000), np.uint8)
    for part in range(8):
        s3_server.client().put_object(Bucket=bucket, Key=f"d/{part}.bin", Body=rows.tobytes())
    dataset = open_dataset(f"s3://{bucket}/d/", format="records", record_bytes=1000)
    proxy.delay_s = SLOW_S
    measured(lambda: DataLoader(dataset, batch_size=BATCH), "source")
    dataset.close()


def test_reading_files_counts_as_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC", "off")
    datasets.records(tmp_path / "r.bin", 64, 1 << 18)
    dataset = open_dataset(tmp_path / "r.bin", format="records", record_bytes=1 << 18)
    loader = DataLoader(dataset, batch_size=BATCH)
    list(loader)
    assert loader.stats().wait_by_cause_s["disk"] > 0
    assert loader.stats().wait_by_cause_s["source"] == 0


def wide(record: torch.Tensor) -> torch.Tensor:
    """Turns a small record into 4 MiB."""
    return record[:1].expand(1 << 20)


def test_moving_batches_between_processes_counts_as_hand_over(link: MemoryLink) -> None:
    loader = DataLoader(in_memory(link, transform=wide), batch_size=BATCH, num_workers=1, collate_fn=list)
    list(loader)
    stats = loader.stats()
    assert stats.wait_by_cause_s["hand-over"] > 0
    assert sum(stats.wait_by_cause_s.values()) == pytest.approx(stats.wait_s)


def test_sending_a_batch_to_the_device_counts_as_transfer() -> None:
    def send(batch: str) -> str:
        time.sleep(SLOW_S)
        return batch

    asked = time.perf_counter()
    none = (0.0, 0.0, 0.0)
    made = move_batch(
        MadeBatch("batch", BatchReport(asked, time.perf_counter(), none, (0,) * len(ORIGINS))), send
    )
    totals = ReportTotals()
    totals.add(made.report, asked)
    waited = dict(zip(CAUSES, totals.waited_s, strict=True))
    assert waited["transfer"] >= SLOW_S
    assert min(waited.values()) >= 0
    assert SLOW_S <= sum(waited.values()) <= time.perf_counter() - asked
    totals.add(made.report, time.perf_counter())  # a later step did not wait for it
    assert totals.waited_s[TRANSFER] == waited["transfer"]


def test_log_stats_logs_one_line_per_epoch(link: MemoryLink, caplog: pytest.LogCaptureFixture) -> None:
    def lines(**more: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "cachesvc"):
            loader = DataLoader(in_memory(link, transform=busy), batch_size=BATCH, **more)
            list(islice(loader, len(loader)))  # without a fetch that raises StopIteration
        return [r.getMessage() for r in caplog.records if "waited" in r.getMessage()]

    assert lines() == []
    (line,) = lines(log_stats=True)
    assert line.startswith("rank 0, epoch 0: 8 batches, 64 samples in ")
    assert "(decode " in line
    assert "p99" in line


def test_causes_sum_to_the_wait_beside_other_reads(link: MemoryLink) -> None:
    dataset = in_memory(slow(link))
    loader = DataLoader(dataset.take(BATCH), batch_size=BATCH)
    for _ in loader:
        assert len(dataset[COUNT - 1]) == 1024
    stats = loader.stats()
    assert sum(stats.wait_by_cause_s.values()) == pytest.approx(stats.wait_s)


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=10 + BUCKETS, max_size=10 + BUCKETS))
def test_reports_survive_encoding_and_other_releases_read_their_part(numbers: list[int]) -> None:
    report = StallReport(numbers[0], tuple(numbers[1:7]), tuple(numbers[7:10]), tuple(numbers[10:]))
    assert StallReport.decode(report.encode()) == report
    assert StallReport.decode(report.encode(buckets=False)) == replace(report, buckets=())


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "1 " * 9 + "x", "-1 " + "1 " * 8 + "1", f"{1 << 63} " + "1 " * 8 + "1"]
)
def test_a_malformed_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        StallReport.decode(text)


@pytest.mark.slow
def test_the_daemons_metrics_show_wait_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    datasets.records(tmp_path / "data" / "r.bin", COUNT, 4096)
    options = [
        "--ram",
        "16MiB",
        "--fillers",
        "1",
        "--metrics",
        f"127.0.0.1:{port}",
        "--extent-bytes",
        "64KiB",
    ]
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "node", options, {}) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(tmp_path / "data", format="records", record_bytes=4096, transform=busy)
        loader = DataLoader(dataset, batch_size=BATCH)
        list(loader)
        stats = loader.stats()
        dataset.close()
        label, told_by = f'dataset="{dataset.version}"', time.monotonic() + 10
        served = ""
        # At first there may be only a report of no steps.
        while f"cachesvc_loader_batches_total{{{label}}} {float(stats.steps)}" not in served:
            assert time.monotonic() < told_by
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
                served = answer.read().decode()
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in served.splitlines()[:-1]
        if label in line
    }
    assert values[f"cachesvc_loader_batches_total{{{label}}}"] == stats.steps
    for cause, spent in stats.wait_by_cause_s.items():
        told = values[f'cachesvc_loader_wait_seconds_total{{cause="{cause}",{label}}}']
        assert told == pytest.approx(spent, abs=1e-4)
    assert f"cachesvc_step_wait_seconds_count {float(stats.steps)}" in served
    # promtool allows quantiles only in a summary
    assert "# TYPE cachesvc_loader_wait_quantile_seconds summary" in served
    told = values[f'cachesvc_loader_wait_quantile_seconds{{{label},quantile="0.95"}}']
    assert told == pytest.approx(stats.wait_p95_s, abs=1e-4)
