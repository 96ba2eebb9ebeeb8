"""The verbs with a real daemon process over real files, and without a daemon."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.config import CONTROL_SOCKET
from testbed.node import Daemon
from testbed.servers import SeaweedFS

EXTENT = 1 << 20
RECORDS = ["--format", "records", "--record-bytes", "4096"]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Write eight extents of records in one file."""
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "0.bin").write_bytes(os.urandom(8 * EXTENT))
    return tmp_path / "records"


@pytest.fixture
def nobody(plain: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide any daemon and any settings of the environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_catalog_is_built_without_a_daemon_and_left_beside_the_data(
    nobody: None, pets: Path, capsys: Any
) -> None:
    assert run(["index", "--json", "--beside", str(pets)]) == 0
    (first,) = rows(capsys.readouterr().out)
    assert (first["samples"], first["format"]) == (6, "files")
    assert first["written"] == [f"{pets}/.cachesvc-catalog.lmdb"]
    assert os.path.getsize(first["written"][0]) == first["catalog_bytes"]
    assert run(["index", "--json", str(pets)]) == 0
    assert rows(capsys.readouterr().out)[0]["dataset"] == first["dataset"]


def test_an_output_that_is_not_a_regular_file_is_2(nobody: None, pets: Path, capsys: Any) -> None:
    pipe, link = pets.parent / "pipe", pets.parent / "link"
    os.mkfifo(pipe)
    link.symlink_to("nowhere")
    for place in (pets, next(pets.rglob("*.jpg")) / "x", pipe, link):
        assert run(["index", "--output", str(place), str(pets)]) == 2
        assert "name a file" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert not list(pets.parent.glob("*.tmp"))


def test_samples_are_found_without_a_daemon(nobody: None, pets: Path, capsys: Any) -> None:
    assert run(["find", str(pets), "label == 'cat'"]) == 0
    keys = capsys.readouterr().out.split()
    assert len(keys) == 3
    assert all("cat" in key for key in keys)
    assert run(["find", "--count", str(pets), "label == 'dog'"]) == 0
    assert capsys.readouterr().out == "3\n"


def test_a_dead_daemons_socket_is_ignored_unless_it_was_given(
    nobody: None, pets: Path, tmp_path: Path, capsys: Any
) -> None:
    directory = tmp_path / "cachesvc"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{directory}/{CONTROL_SOCKET}")
    assert run(["find", "--count", str(pets), "label == 'dog'"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert run(["find", str(pets), "label == 'dog'", "--socket", str(directory)]) == 10


CLASSES = ["label == 'fish'", "label != 'Cat'", "label in ('cat', 'dogs')", "not label == 'cat '"]
WRONG = ["colour == 'red'", "label ==", "__import__('os')"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        *((["find", "--count", "{pets}", each], 2, "there are: cat, dog") for each in CLASSES),
        *((["find", "{pets}", each], 2, "") for each in WRONG),
        (["find", "0" * 32, "key == 'x'"], 10, ""),  # an id needs a daemon
        (["index", "{pets}/cat/none"], 4, "none"),
        (["index", "--format", "orc", "{pets}"], 2, "webdataset"),
        (["index", "--beside", "--format", "files", "{pets}/cat/1.jpg"], 2, "--output"),
    ],
)
def test_what_cannot_be_found_or_indexed_is_one_line_and_its_code(
    nobody: None, pets: Path, capsys: Any, words: list[str], code: int, says: str
) -> None:
    assert run([word.replace("{pets}", str(pets)) for word in words]) == code
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert says in said.err


def test_an_estimate_names_fit_and_hit_rate(nobody: None, records: Path, capsys: Any) -> None:
    size = ["--ram", "2MiB", "--nodes", "2"]
    assert run(["estimate", "--json", *RECORDS, *size, str(records)]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row["size_bytes"] == 8 * EXTENT
    assert row["private"]["local"] == pytest.approx(0.25)
    assert (row["cooperative"]["local"], row["cooperative"]["peer"]) == pytest.approx((0.25, 0.25))
    assert run(["estimate", *RECORDS, *size, str(records)]) == 0
    assert "fits nowhere" in capsys.readouterr().out


def test_a_dataset_is_filled_listed_verified_and_evicted(daemon: Daemon, pets: Path, capsys: Any) -> None:
    assert run(["prefetch", "--json", "--verify", str(pets)]) == 0
    said = {row["event"]: row for row in rows(capsys.readouterr().out)}  # a slow machine prints progress too
    filled, verified = said["prefetched"], said["verified"]
    assert filled["resident"] is True
    assert verified["checked_extents"] == filled["extents"]
    assert run(["ls", "--json"]) == 0
    (listed,) = [row for row in rows(capsys.readouterr().out) if row["dataset"]["id"] == filled["dataset"]]
    assert listed["resident_bytes"] == 6000
    assert run(["pin", str(pets)]) == 0
    assert run(["unpin", str(pets)]) == 0
    capsys.readouterr()
    assert run(["find", filled["dataset"], "label == 'cat'", "--count", "--json"]) == 0
    assert rows(capsys.readouterr().out)[0]["count"] == 3
    assert run(["evict", "--json", str(pets)]) == 0
    (evicted,) = rows(capsys.readouterr().out)
    assert (evicted["dataset"], evicted["evicted_bytes"]) == (filled["dataset"], 6000)


def test_what_does_not_fit_is_8_and_the_rest_stays(daemon: Daemon, records: Path, capsys: Any) -> None:
    assert run(["prefetch", "--json", "--dry-run", *RECORDS, str(records)]) == 8
    predicted = rows(capsys.readouterr().out)[-1]
    assert predicted["resident_extents"] == 0
    assert run(["prefetch", "--json", *RECORDS, str(records)]) == 8
    out, err = capsys.readouterr()
    last = rows(out)[-1]
    assert last["resident_bytes"] + last["unfit_bytes"] == 8 * EXTENT
    assert last["unfit_bytes"] == predicted["unfit_bytes"]
    assert f"{last['unfit_bytes']:,} bytes" in err


def test_a_uri_that_cannot_be_opened_does_not_keep_the_next_from_being_filled(
    daemon: Daemon, pets: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(["prefetch", "--json", str(tmp_path / "nothing"), "0" * 8, "/etc", str(pets)]) == 4
    out, err = capsys.readouterr()
    assert rows(out)[-1]["target"] == str(pets)
    assert rows(out)[-1]["resident"] is True
    assert [row["code"] for row in rows(err)] == [4, 3, 4], "the first gives the exit code, and comes last"


@pytest.mark.parametrize(("uri", "code"), [("/etc", 3), ("{tmp_path}/nothing", 4)])
def test_a_path_that_is_missing_or_outside_the_allowlist_is_one_line(
    daemon: Daemon, tmp_path: Path, capsys: Any, uri: str, code: int
) -> None:
    assert run(["prefetch", uri.format(tmp_path=tmp_path)]) == code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("verb", ["prefetch", "pin", "unpin", "evict", "verify", "estimate", "index"])
def test_a_path_that_is_not_utf_8_is_2(daemon: Daemon, tmp_path: Path, capsys: Any, verb: str) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    assert run([verb, str(odd)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "not UTF-8: b'" in err


def test_working_directories_and_links_that_are_not_utf_8_are_2(
    daemon: Daemon, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    (tmp_path / "link").symlink_to(odd)
    monkeypatch.chdir(odd)
    for named in (".", str(tmp_path / "link")):
        assert run(["prefetch", named]) == 2
        assert "not UTF-8: b'" in capsys.readouterr().err


def test_doctor_sees_the_daemon(daemon: Daemon, capsys: Any) -> None:
    assert run(["doctor", "--ram", "1MiB", "--extent-bytes", "1MiB", "--json"]) == 0
    found = {row["check"]: row for row in rows(capsys.readouterr().out)}
    assert found["daemon"]["level"] == "ok"
    assert f"pid {daemon.pid if daemon.process else 0}" in found["daemon"]["text"]


def test_a_catalog_is_left_beside_data_in_s3(
    nobody: None, s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, capsys: Any
) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="data/0.bin", Body=os.urandom(EXTENT))
    uri = f"s3://{bucket}/data/"
    assert run(["index", "--beside", "--json", *RECORDS, uri]) == 0
    (row,) = rows(capsys.readouterr().out)
    stored = s3_server.client().head_object(Bucket=bucket, Key="data/.cachesvc-catalog.lmdb")
    assert stored["ContentLength"] == row["catalog_bytes"]
    assert run(["index", "--beside", *RECORDS, "s3://no-such-bucket-here/x/"]) == 4
    assert capsys.readouterr().err.count("\n") == 1
