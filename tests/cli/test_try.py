"""`cachesvc try`: plain torch beside cachesvc on a user's own data, what limits, and what to give."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli.trial import limited, pasted, sized
from tests.loader.prepare.pictures import COUNT, write_pictures
from tests.support.faults.fake_s3 import Object, fake_s3

GIB = 1 << 30
WITH = "tests.loader.prepare.pictures:half"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pictures, and a temporary folder in which nothing may stay. A cluster in the environment is not joined."""
    write_pictures(tmp_path / "data")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CACHESVC_CLUSTER", "static:nowhere:1")
    with tempfile.TemporaryDirectory(prefix="cs-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield tmp_path
        assert os.listdir(short) == []


def rows(capsys: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check(found: list[dict[str, Any]]) -> None:
    opened, *passes, advice = found
    assert (opened["samples"], opened["tried"], opened["single"]) == (COUNT, COUNT, True)
    assert [(row["way"], row["warm"]) for row in passes] == [
        ("plain", False),
        ("plain", True),
        ("cachesvc", False),
        ("cachesvc", True),
    ]
    assert all(row["samples"] > 0 for row in passes)
    assert all(row["samples"] <= COUNT for row in passes[:3]), "of what is read once"
    assert advice["options"] == ["--ram", "128MiB"]
    assert advice["limits"]


@pytest.mark.slow
def test_a_bucket_is_read_four_times_and_nothing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with fake_s3() as store:
        for path in (folder / "data").rglob("*.png"):
            body = path.read_bytes()
            store.objects[str(path.relative_to(folder))] = Object(len(body), data=body)
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        words = ["try", "s3://b/data/", "--with", WITH, "--seconds", "2", "--workers", "0", "--json"]
        assert run(words) == 0
        check(rows(capsys))
        assert store.sent_bytes > 0


@pytest.mark.slow
def test_a_folder_is_tried_with_workers_and_its_disk(folder: Path, capsys: Any) -> None:
    words = ["try", str(folder / "data"), "--with", WITH, "--seconds", "20", "--workers", "2", "--json"]
    assert run([*words, "--nvme", str(folder)]) == 0
    found = rows(capsys)
    check(found)
    assert found[-1]["disk_bytes_per_s"] > 0
    assert "the disk reads" in found[-1]["limits"][-1]


@pytest.mark.slow
def test_an_unknown_function_ends_it_and_nothing_stays(folder: Path, capsys: Any) -> None:
    assert run(["try", str(folder / "data"), "--with", "nowhere:f", "--seconds", "5"]) == 2
    assert "--with nowhere:f: No module named 'nowhere'" in capsys.readouterr().err


def test_the_slower_of_source_samples_and_disk_limits() -> None:
    def said(first: float, later: float, cause: str, disk: float | None = None) -> list[str]:
        rates = {("cachesvc", False): first, ("cachesvc", True): later}
        return limited(rates, {"decode": 1.0, cause: 2.0}, 1000.0, disk)

    assert said(10, 100, "decode")[0].startswith("the first epoch is limited by the source")
    assert said(10, 100, "decode")[1].startswith("later epochs are limited by making samples")
    assert said(90, 100, "decode")[0].startswith("all epochs, the first too, are limited by making samples")
    assert "hand" not in said(90, 100, "decode")[0]
    assert "moving samples out of the worker" in said(90, 100, "hand-over")[0]
    assert "which limits epochs from it" in said(90, 100, "decode", 99_000.0)[-1]
    assert "which is enough" in said(90, 100, "decode", 101_000.0)[-1]


def test_data_goes_to_ram_then_to_a_disk_then_to_more_nodes() -> None:
    assert sized(10 * GIB, 20 * GIB, None, 0).options == ("--ram", "11GiB")
    assert sized(100 * GIB, 20 * GIB, None, 0).options == ("--ram", "10GiB", "--nvme", "DIR=102GiB")
    all_of_it = sized(100 * GIB, 20 * GIB, "/mnt", 200 * GIB)
    assert (all_of_it.options[-1], all_of_it.part) == ("/mnt=102GiB", 1.0)
    half = sized(100 * GIB, 20 * GIB, "/mnt", 50 * GIB)
    assert (half.options[-1], round(half.part, 2)) == ("/mnt=48GiB", 0.47)
    assert "--cluster" in half.says


def test_the_lines_to_paste_are_python() -> None:
    sizing = sized(GIB, 20 * GIB, None, 0)
    command, _, *script = pasted("s3://b/{0..9}/*.tar", "a.b:c.d", 4, {"format": "webdataset"}, sizing)
    assert command == "cachesvc serve --ram 2GiB --allow s3://b/{0..9}/"
    compile("\n".join(script), "script", "exec")
    assert "from a.b import c" in script
    assert "data = open_dataset('s3://b/{0..9}/*.tar', format='webdataset', transform=c.d)" in script
