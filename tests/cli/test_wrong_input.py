"""Wrong input is one clear line and its exit code on the command line, and the same typed error in a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.__main__ import run
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    DaemonUnavailable,
    InvalidInput,
    NotAllowed,
    NotFound,
    OutOfSpace,
)
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support import datasets
from tests.support.shell import complaint, serve

EXTENT = 1 << 20


@dataclass(frozen=True)
class Wrong:
    """A request and its expected error. `{bucket}` stands for a real bucket."""

    uri: str
    error: type[CacheError]
    says: str
    opening: dict[str, Any] = field(default_factory=dict)


RECORDS: dict[str, Any] = {"format": "records", "record_bytes": 4096}
CASES = {
    "outside the allowlist": Wrong("s3://elsewhere/data/", NotAllowed, "s3://elsewhere"),
    "a missing bucket": Wrong("s3://no-such-bucket-here/data/", NotFound, "no-such-bucket-here"),
    "an empty dataset": Wrong("s3://{bucket}/empty/", NotFound, "empty/"),
    "a missing object": Wrong("s3://{bucket}/records/nothing.bin", NotFound, "nothing.bin"),
    "a truncated tar": Wrong("s3://{bucket}/tar/", CorruptData, "1.tar"),
    "a corrupt MDS index": Wrong("s3://{bucket}/mds/", CorruptData, "index.json"),
    "an unknown format": Wrong("s3://{bucket}/records/", InvalidInput, "orc", {"format": "orc"}),
    "a format that does not fit": Wrong(
        "s3://{bucket}/records/", NotFound, "webdataset", {"format": "webdataset"}
    ),
    "an unknown scheme": Wrong("gopher://host/data/", InvalidInput, "gopher"),
    "records of no size": Wrong("s3://{bucket}/records/", InvalidInput, "record", {"format": "records"}),
}


@dataclass(frozen=True)
class Place:
    """Create a bucket and run a daemon."""

    daemon: Daemon
    bucket: str
    s3: SeaweedFS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Place]:
    bucket = s3_server.create_bucket(f"wrong-{uuid.uuid4().hex[:8]}")
    root = tmp_path_factory.mktemp("wrong")
    samples = {f"{n:04d}": {"jpg": os.urandom(5000), "cls": b"1"} for n in range(20)}
    whole = datasets.tar_bytes(samples)
    bodies = {"tar/0.tar": whole, "tar/1.tar": whole[:60_000], "records/0.bin": os.urandom(6 * EXTENT)}
    datasets.mds_shards(root / "mds", {"x": "bytes"}, [{"x": b"abc"}] * 8, 4)
    bodies |= {f"mds/{path.name}": path.read_bytes() for path in (root / "mds").iterdir()}
    bodies["mds/index.json"] = bodies["mds/index.json"][:-40]
    for key, body in bodies.items():
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=body)
    options = ["--ram", "2MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    allowed = (f"s3://{bucket}/", "s3://no-such-bucket-here/", "gopher://host/")
    options += [f"--allow={each}" for each in allowed]
    with Daemon(root / "node", options, s3_server.env()) as daemon:
        yield Place(daemon, bucket, s3_server)


@pytest.fixture
def through(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Have this process read through the daemon, without credentials."""
    monkeypatch.setenv("CACHESVC_SOCKET", place.daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    return place


@pytest.fixture
def around(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Have this process read directly, with its own credentials."""
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in place.s3.env().items():
        monkeypatch.setenv(name, value)
    return place


def one_line(capfd: Any, error: type[CacheError], says: str) -> None:
    """Assert that stderr is exactly one JSON object with the error and its code."""
    told = capfd.readouterr().err
    assert told.count("\n") == 1, told
    found = json.loads(told)
    assert found["code"] == error.code
    assert says in found["error"]
    assert "\n" not in found["error"]
    assert "Traceback" not in told


def plain_line(capfd: Any, says: str) -> None:
    """Assert that stderr is exactly one line of ours with the error."""
    told = capfd.readouterr().err
    assert told.startswith("cachesvc: "), told
    assert told.count("\n") == 1, told
    assert says in told


def arguments(opening: dict[str, Any]) -> list[str]:
    return [part for name, value in opening.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("name", CASES)
def test_prefetch_says_what_is_wrong_in_one_line(through: Place, capfd: Any, name: str) -> None:
    case = CASES[name]
    uri = case.uri.format(bucket=through.bucket)
    assert run(["prefetch", "--json", *arguments(case.opening), uri]) == case.error.code
    one_line(capfd, case.error, case.says)
    assert "Traceback" not in through.daemon.log


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ["through", "around"])
def test_a_trainer_gets_the_same_typed_error_with_and_without_a_daemon(
    request: pytest.FixtureRequest, way: str, name: str
) -> None:
    if (way, name) == ("around", "outside the allowlist"):
        return
    case, bucket = CASES[name], request.getfixturevalue(way).bucket
    with pytest.raises(case.error, match=case.says) as caught:
        open_dataset(case.uri.format(bucket=bucket), **case.opening)
    assert "\n" not in str(caught.value)


def test_wrong_credentials_in_a_trainer_are_not_allowed(
    around: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(NotAllowed, match=around.bucket) as caught:
        open_dataset(f"s3://{around.bucket}/records/", **RECORDS)
    assert "\n" not in str(caught.value)


def test_wrong_credentials_in_the_daemon_are_not_allowed(
    place: Place, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = place.s3.env() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    uri = f"s3://{place.bucket}/records/"
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", uri], wrong) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        assert run(["prefetch", "--json", *arguments(RECORDS), uri]) == NotAllowed.code
        one_line(capfd, NotAllowed, place.bucket)
        with pytest.raises(NotAllowed, match=place.bucket):
            open_dataset(uri, **RECORDS)


@pytest.mark.slow
def test_a_dataset_that_does_not_fit_fails_prefetch_and_streams_to_a_trainer(
    through: Place, capfd: Any
) -> None:
    uri = f"s3://{through.bucket}/records/"
    assert run(["prefetch", "--json", *arguments(RECORDS), uri]) == OutOfSpace.code
    out = capfd.readouterr()
    assert "does not fit" in json.loads(out.err)["error"]
    assert json.loads(out.out.splitlines()[-1])["fits"] is False
    for workers, window in ((0, EXTENT), (2, EXTENT), (0, 4 * EXTENT)):  # also one that exceeds all tiers
        found = open_dataset(uri, **RECORDS)
        batches = DataLoader(found, batch_size=64, shuffle=True, window=window, num_workers=workers)
        seen = np.concatenate([batches.indices for _ in batches])
        assert sorted(seen.tolist()) == list(range(6 * EXTENT // 4096))
        found.close()


def test_a_missing_daemon_is_reported_with_advice(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    monkeypatch.setenv("CACHESVC", "require")
    assert run(["prefetch", "s3://bucket/data/"]) == DaemonUnavailable.code
    plain_line(capfd, "cachesvc serve")
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        open_dataset("s3://bucket/data/")


@pytest.mark.parametrize("given", ["never", "-1", "0", "nan"])
def test_an_invalid_deadline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("CACHESVC_TIMEOUT_S", given)
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    datasets.records(tmp_path / "data" / "0.bin", 4, 4096)
    with pytest.raises(InvalidInput, match="CACHESVC_TIMEOUT_S"):
        open_dataset(tmp_path / "data", **RECORDS)[0]


def test_a_ram_budget_below_one_extent_is_refused(tmp_path: Path) -> None:
    ended = serve("--ram", "1MiB", "--socket", str(tmp_path), "--state-dir", str(tmp_path))
    assert ended.returncode == InvalidInput.code
    assert "--ram" in complaint(ended)


def test_a_socket_in_use_is_refused(place: Place, tmp_path: Path) -> None:
    ended = serve("--ram", "64MiB", "--socket", place.daemon.socket_dir, "--state-dir", str(tmp_path))
    assert ended.returncode == InvalidInput.code
    assert place.daemon.socket_dir in complaint(ended)
    assert run(["status", "--json", "--socket", place.daemon.socket_dir]) == 0  # the first directory works


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB and fill it."""
    mounted = tmp_path / "full"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", mounted], capture_output=True)
    if done.returncode:
        pytest.skip(f"THE FULL DISK IS NOT TESTED: mounting needs root ({done.stderr.decode().strip()})")
    try:
        with open(mounted / "others", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:  # the disk is full
                pass
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_full_cache_disk_at_start_is_reported(full_disk: Path, tmp_path: Path) -> None:
    places = ["--socket", str(tmp_path / "run"), "--state-dir", str(tmp_path)]
    ended = serve("--ram", "64MiB", "--nvme", f"{full_disk}=100MiB", *places)
    assert ended.returncode == OutOfSpace.code
    assert str(full_disk) in complaint(ended)


def test_doctor_fails_a_full_cache_disk_as_serve_does(full_disk: Path, capfd: Any) -> None:
    assert run(["doctor", "--ram", "64MiB", "--nvme", f"{full_disk}=128KiB", "--json"]) == 1
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["level"] for row in rows if row["check"] == "nvme"] == [
        "warn",
        "fail",
    ]  # a warning for tmpfs; a failure for the full disk


def test_doctor_looks_at_the_state_directory_as_serve_does(
    full_disk: Path, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "file").touch()
    for state, level in (
        (full_disk / "a/b", "fail"),
        (tmp_path / "file/a", "fail"),
        (tmp_path / "a/b", "ok"),
    ):
        code = run(["doctor", "--ram", "64MiB", "--state-dir", str(state), "--json"])
        rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [row["level"] for row in rows if row["check"] == "state"] == [level]
        assert code == (level == "fail")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("verb", ["prefetch", "pin", "evict", "verify", "find", "index"])
def test_an_empty_uri_is_not_the_working_directory(through: Place, capfd: Any, verb: str) -> None:
    more = ["label >= 0"] if verb == "find" else []
    assert run([verb, "", *more]) == InvalidInput.code
    plain_line(capfd, "an empty URI")


@pytest.mark.parametrize("uri", ["", " ", [""], None, [None], 7, b"bytes", []])
def test_a_trainer_without_a_uri_gets_a_typed_error(around: Place, uri: Any) -> None:
    with pytest.raises(InvalidInput, match="URI"):
        open_dataset(uri)


def test_a_full_disk_for_the_daemons_state_is_reported(full_disk: Path, tmp_path: Path) -> None:
    state = ["--state-dir", str(full_disk / "state")]
    ended = serve("--ram", "64MiB", "--socket", str(tmp_path / "run"), *state)
    assert ended.returncode == OutOfSpace.code
    assert str(full_disk) in complaint(ended)
