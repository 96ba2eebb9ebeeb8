"""Extents of many small files: only unreadable files are bad samples; the rest is filled, kept and served."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core import holes
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.holes import Hole, Holes
from cachesvc.core.model import RAM, ObjectVersion, Piece, TierName, extent_of
from cachesvc.daemon.fills.holes import REFILL_S, CopyHoles, HoleRecords
from cachesvc.sources.fetch import Fetcher, encode_missing
from cachesvc.sources.source import OnReceived, ignore_received
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.nvme import open_nvme
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.core.names import DATASET, ONE, A
from tests.support.core.node import declare, node_of, tell
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.users import ALICE, as_root, as_user

COUNT = 200
GONE, CHANGED, REFUSED, LONGER, SHORTER = 7, 50, 101, 133, 199
BAD = {GONE, CHANGED, REFUSED, LONGER, SHORTER}


def datum(number: int) -> bytes:
    return f"{number:04}".encode() * (number + 1)


def name(number: int) -> str:
    return f"{number:04}.bin"


# ---- the encoding in grants


def test_holes_fit_in_one_datagram_and_are_read_back() -> None:
    found = (Hole(3, NotFound.code), Hole(17, NotAllowed.code))
    assert holes.decode(holes.encode(reversed(found))) == found
    assert holes.decode("") == ()


def test_only_a_range_that_touches_a_hole_raises_the_error_of_its_object() -> None:
    pieces = [Piece(ObjectVersion(f"s3://b/{at}", 10, "e"), 0, 10) for at in range(4)]
    found = Holes(extent_of(pieces), holes.encode([Hole(1, NotFound.code), Hole(3, NotAllowed.code)]))
    for inside, size, where in [(9, 2, 1), (10, 1, 1), (19, 1, 1), (0, 40, 1), (39, 1, 3), (25, 6, 3)]:
        with pytest.raises((NotFound, NotAllowed), match=f"s3://b/{where} ") as caught:
            found.check(inside, size)
        assert caught.value.of_object
    for inside, size in [(0, 10), (20, 10), (20, 1), (29, 1), (10, 0)]:
        found.check(inside, size)


# ---- the fill


class Store:
    """A source of objects by URI. Those in `errors` raise; with `gone` a probe of one byte raises for all."""

    def __init__(self, errors: dict[str, CacheError], gone: bool = False) -> None:
        self.errors, self.gone, self.reads = errors, gone, 0

    def checker(self, version: ObjectVersion) -> None:
        return None

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.reads += 1
        if version.uri in self.errors or (self.gone and len(into) == 1):
            raise self.errors.get(version.uri, NotFound(f"{version.uri}: the mount is gone"))
        into[:] = version.uri.encode().ljust(version.size_bytes, b".")[offset:][: len(into)]


def filled(store: Any, pieces: Sequence[Piece], path: Path, part_bytes: int = 64) -> tuple[str, bytes]:
    extent, fetcher = extent_of(pieces), Fetcher(lambda _: store, threads=4, part_bytes=part_bytes)
    try:
        with open(path, "w+b") as into:
            os.ftruncate(into.fileno(), extent.size_bytes)
            return encode_missing(fetcher.fetch(extent, into.fileno())), into.read()
    finally:
        fetcher.close()


def small(count: int, size: int = 100) -> list[Piece]:
    return [Piece(ObjectVersion(f"s/{at:05}", size, "e"), 0, size) for at in range(count)]


@pytest.mark.parametrize("kind", [NotFound, NotAllowed, SourceChanged, CorruptData])
def test_an_extent_of_many_objects_is_filled_without_the_unreadable_ones(
    tmp_path: Path, kind: type[CacheError]
) -> None:
    pieces = small(50)
    store = Store({pieces[at].object.uri: kind("no") for at in (3, 49)})
    told, data = filled(store, pieces, tmp_path / "x")
    assert holes.decode(told) == (Hole(3, kind.code), Hole(49, kind.code))
    for at in set(range(50)) - {3, 49}:
        assert data[at * 100 : at * 100 + 100] == pieces[at].object.uri.encode().ljust(100, b".")
    assert store.reads <= 2 * 50 + 1


def test_a_transient_error_makes_no_hole(tmp_path: Path) -> None:
    pieces = small(50)
    with pytest.raises(SourceUnavailable):
        filled(Store({pieces[3].object.uri: SourceUnavailable("later")}), pieces, tmp_path / "x")


@pytest.mark.parametrize("bad", [range(1), range(32)], ids=["the only object", "all of many"])
def test_an_extent_without_readable_objects_fails(tmp_path: Path, bad: range) -> None:
    pieces = small(len(bad))
    with pytest.raises(NotAllowed):
        filled(Store({piece.object.uri: NotAllowed("no") for piece in pieces}), pieces, tmp_path / "x")


def test_few_objects_are_requested_where_all_fail(tmp_path: Path) -> None:
    pieces = small(10_000)
    store = Store({piece.object.uri: NotAllowed("no") for piece in pieces})
    with pytest.raises(NotAllowed):
        filled(store, pieces, tmp_path / "x")
    assert store.reads < 100


@pytest.mark.parametrize(("bad", "fits"), [(150, True), (900, False)])
def test_an_extent_with_more_holes_than_a_grant_can_name_fails(tmp_path: Path, bad: int, fits: bool) -> None:
    pieces = small(2_000, 10)
    store = Store({piece.object.uri: NotFound("no") for piece in pieces[100 : 100 + bad]})
    if fits:
        assert len(holes.decode(filled(store, pieces, tmp_path / "x")[0])) == bad
        return
    with pytest.raises(NotFound):
        filled(store, pieces, tmp_path / "x")
    assert store.reads < 1_000


def test_a_mount_that_disappears_during_a_fill_makes_no_holes(tmp_path: Path) -> None:
    pieces = small(50)
    store = Store({piece.object.uri: NotFound("no") for piece in pieces[40:]}, gone=True)
    with pytest.raises(NotFound, match="the mount is gone"):
        filled(store, pieces, tmp_path / "x")


def test_an_extent_within_one_object_has_no_holes(tmp_path: Path) -> None:
    version = ObjectVersion("s/shard", 400, "e")
    pieces = [Piece(version, 0, 100), Piece(version, 200, 100)]
    with pytest.raises(SourceChanged):
        filled(Store({"s/shard": SourceChanged("no")}), pieces, tmp_path / "x")


# ---- the core


def test_a_copy_with_holes_is_granted_and_reported_in_progress() -> None:
    node = node_of(ram=1)
    tell(node, declare(A), ev.Prefetched(1, DATASET))
    tell(node, ev.Filled(A, RAM, code=4, message="a is gone"))
    progress = node.progress(1)
    assert (progress.resident_extents, progress.failed, progress.finished) == (1, {}, True)
    assert progress.incomplete == {A: (4, "a is gone")}
    assert [type(each) for each in tell(node, ev.Demanded(ONE, 1, A))] == [cmd.Grant]


def test_a_copy_with_holes_is_filled_again_and_is_not_corrupt() -> None:
    node = node_of(ram=1)
    tell(node, declare(A), ev.Prefetched(1, DATASET))
    tell(node, ev.Filled(A, RAM, code=4, message="a is gone"))
    assert tell(node, ev.FillAgain(A, RAM)) == [cmd.Evict(A, RAM)]
    assert tell(node, ev.FillAgain(A, RAM)) == []
    assert node.progress(1).incomplete == {}
    assert tell(node, ev.Evicted(A, RAM)) == [cmd.StartFill(A, RAM)]
    tell(node, ev.Filled(A, RAM))
    assert node.progress(1).incomplete == {}
    assert node.policy.tiers[RAM].corrupt_count == 0


# ---- the real thing


@contextmanager
def spoilt(root: Path) -> Iterator[None]:
    """Spoil some of the files after they were listed."""
    (root / name(GONE)).unlink()
    (root / name(CHANGED)).write_bytes(datum(CHANGED)[::-1])
    os.rename(root / name(REFUSED), root / "aside")
    os.mkdir(root / name(REFUSED))
    with open(root / name(LONGER), "ab") as file:
        file.write(b"more")
    os.truncate(root / name(SHORTER), 5)
    yield


def ledger(data: Any, **settings: Any) -> tuple[list[int], set[int]]:
    """Numbers of the samples that came, whose bytes are checked, and of the bad ones."""
    loader = DataLoader(data, 16, shuffle=True, on_error="skip", collate_fn=list, **settings)
    came = []
    for batch in loader:
        for sample in batch[: loader.valid]:
            number = int(bytes(sample[:4]))
            assert bytes(sample) == datum(number)
            came.append(number)
    return sorted(came), {int(Path(bad.key).stem) for bad in loader.bad_samples}


def expect(data: Any, expected: set[int] = BAD, **settings: Any) -> None:
    came, bad = ledger(data, **settings)
    assert bad == expected
    assert came == sorted(set(range(COUNT)) - expected)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for number in range(COUNT):
        (root / name(number)).write_bytes(datum(number))
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_only_unreadable_local_files_are_bad_samples(files: Path, workers: int) -> None:
    data = open_dataset(str(files), format="files", decode=None)
    with spoilt(files):
        expect(data, num_workers=workers)
        with pytest.raises(CacheError, match=r"\d{4}\.bin .*: .*open the dataset again"):
            list(DataLoader(data, 16, collate_fn=list))
    data.close()


@pytest.mark.slow
@as_root
def test_only_a_local_file_without_permission_is_a_bad_sample(files: Path) -> None:
    for folder in (files, *files.parents):
        folder.chmod(0o755)
        if folder.name.startswith("pytest-of-"):
            break
    (files / name(REFUSED)).chmod(0)
    root = str(files)

    def work() -> list[object]:
        os.environ |= {"XDG_CACHE_HOME": tempfile.mkdtemp(), "CACHESVC": "off"}
        came, bad = ledger(open_dataset(root, format="files", decode=None))
        return [len(came), sorted(bad)]

    assert as_user(ALICE, work) == [COUNT - 1, [REFUSED]]


def test_records_are_gathered_around_a_hole_and_no_array_is_made_over_it(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / name(number)).write_bytes(bytes([number]) * 640)
    data = open_dataset(str(tmp_path), format="records", record_bytes=64)
    (tmp_path / name(3)).unlink()
    loader = DataLoader(data, 10, shuffle=True, on_error="skip")
    rows = sorted(int(row) for batch in loader for row in batch[: loader.valid, 0])
    assert rows == [number for number in range(20) if number != 3 for _ in range(10)]
    with pytest.raises(NotFound, match=r"0003\.bin"):
        data.array()
    data.close()


def refusing(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
    return (403, "AccessDenied") if handler.path.endswith(name(REFUSED)) else None


@pytest.fixture
def store(fake: FakeS3) -> FakeS3:
    fake.objects = {
        f"d/{name(number)}": Object(len(datum(number)), f"e{number}", datum(number))
        for number in range(COUNT)
    }
    return fake


def spoil(store: FakeS3) -> None:
    del store.objects[f"d/{name(GONE)}"]
    store.objects[f"d/{name(CHANGED)}"].etag = "other"
    for number, data in ((LONGER, datum(LONGER) + b"more"), (SHORTER, b"short")):
        store.objects[f"d/{name(number)}"] = Object(len(data), f"e{number}", data)
    store.refuse, store.asked = refusing, []


MOST = COUNT + 6 * len(BAD) + 1
"""Requests of one fill: each object once, a few retries of the bad ones, and one probe of the source."""


@pytest.mark.parametrize("tier", ["ram", pytest.param("nvme", marks=pytest.mark.slow)])
def test_only_unreadable_objects_are_bad_samples_through_a_daemon(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    room = ["--ram", "64MiB"] if tier == "ram" else ["--ram", "0", "--nvme", f"{disk}=64MiB"]
    options = [*room, "--fillers", "1", "--allow", "s3://bucket/"]
    with Daemon(tmp_path / "node", options, {"AWS_ENDPOINT_URL": store.endpoint}) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        data, checked, later = (
            open_dataset("s3://bucket/d/", format="files", decode=None, verify=verify)
            for verify in (False, True, False)
        )
        spoil(store)
        expect(data)
        expect(data)
        assert len(store.asked) <= MOST, "the second epoch reads what the first one filled"
        expect(checked)
        with pytest.raises(CacheError, match=r"\.bin .*: .*open the dataset again"):
            list(DataLoader(data, 16, collate_fn=list))
        # A copy with holes does not survive the daemon; the next one fills it with the objects readable by then.
        daemon.kill()
        store.asked, store.refuse = [], lambda handler: None
        daemon.start()
        expect(later, BAD - {REFUSED})
        assert len(store.asked) <= MOST
        for each in (data, checked, later):
            each.close()


@pytest.mark.slow
def test_copies_with_holes_are_neither_handed_over_nor_lent(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (f"127.0.0.1:{port}" for port in free_ports(2))
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", "s3://bucket/"]
    options += ["--cluster", f"static:{one},{two}"]
    first, second = (["--node-name", name, "--advertise", at] for name, at in (("one", one), ("two", two)))
    credentials = {"AWS_ENDPOINT_URL": store.endpoint}
    monkeypatch.setenv("CACHESVC", "require")
    with Daemon(tmp_path / "one", [*options, *first], credentials) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        data, later = (open_dataset("s3://bucket/d/", format="files", decode=None) for _ in range(2))
        with Daemon(tmp_path / "two", [*options, *second], credentials) as other:
            monkeypatch.setenv("CACHESVC_SOCKET", other.socket_dir)
            beside = open_dataset("s3://bucket/d/", format="files", decode=None)
            spoil(store)
            expect(data)
            store.refuse = lambda handler: None
            expect(beside, BAD - {REFUSED})
            beside.close()
        daemon.take_over()
        expect(data)  # this reader still holds the copy with its holes
        expect(later, BAD - {REFUSED})
        data.close()
        later.close()


@pytest.mark.slow
def test_a_prefetch_reports_missing_objects_and_retries_later(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--ram", "64MiB", "--fillers", "1", "--allow", "s3://bucket/"]
    with (
        Daemon(tmp_path / "node", options, {"AWS_ENDPOINT_URL": store.endpoint}) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        dataset = control.open_dataset(["s3://bucket/d/"], Options(format="files"))
        spoil(store)
        last = list(control.prefetch(dataset.id))[-1]
        assert last.resident_extents == last.extents
        assert last.done
        (failure,) = last.failures
        assert "5 of 200 objects of an extent are missing" in failure.message


def test_holes_are_due_for_a_refill_once_an_interval() -> None:
    now = 0.0
    records, holes = HoleRecords(lambda: now), CopyHoles("3:4", 4, "gone")
    records.filled(A, RAM, holes)
    assert records.of(A, RAM) == holes
    assert records.due({A}) == []
    now = REFILL_S
    assert records.due({A}) == [(A, RAM)]
    assert records.due(set()) == []
    records.filled(A, RAM, holes)
    assert records.due({A}) == []
    records.filled(A, RAM, CopyHoles())
    assert records.of(A, RAM) == CopyHoles()


def test_a_file_with_holes_is_not_recovered_by_the_next_daemon(tmp_path: Path) -> None:
    tier = open_nvme(TierName("nvme0"), tmp_path)
    fd = tier.reserve(A, 5)
    os.pwrite(fd, b"bytes", 0)
    checksums = StreamedChecksums(5).checksums(fd)
    os.close(fd)
    tier.hold(A, checksums)
    fd, found = tier.open(A)
    assert (os.pread(fd, 5, 0), found) == (b"bytes", checksums)
    assert footer.read(fd, A, 5) == checksums
    os.close(fd)
    tier.evict(A)
    assert not any(path.is_file() for path in (tmp_path / "cachesvc-nvme/v1").rglob("*"))
    fd = tier.reserve(A, 5)
    os.close(fd)
    tier.hold(A, checksums)
    tier.close()
    tier = open_nvme(TierName("nvme0"), tmp_path)
    assert tier.recover() == {}
    tier.close()
