"""Extents to bytes: mapped, read, refused, forked, gone."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import os
import resource
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.keepalive import leave_alone
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.errors import (
    CorruptData,
    DaemonUnavailable,
    InvalidInput,
    NotAllowed,
    NotFound,
    OutOfSpace,
    SourceChanged,
    SourceUnavailable,
    TierFailed,
)
from cachesvc.core.model import Extent
from cachesvc.system import mapping
from cachesvc.system.memory import Memory
from loader.datasets.decode import decoded, decoder
from loader.reading.direct_access import reads_around
from loader.reading.direct_fills import DirectGrants
from loader.reading.easing import Easing
from loader.reading.failover import Failover
from loader.reading.reader import Reader
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, compiled, extent_bytes, in_memory


def descriptors() -> int:
    gc.collect()  # other tests' loaders hold some until then
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLink, dict[str, bytes]]:
    """Files of 0 to 20 KB in extents of 8 KB: some span several extents, some are empty."""
    root = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(1)
    files = {f"{n:03d}.bin": rng.bytes(int(rng.integers(0, 20_000)) if n % 9 else 0) for n in range(60)}
    datasets.write_files(root / "data", files)
    return compiled(root / "data", root, format="files", extent_bytes=8192), files


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLink, np.ndarray]:
    """Overlapping token sequences in extents that cut them."""
    root = tmp_path_factory.mktemp("tokens")
    stream = datasets.tokens(root / "t.bin", 40_000)
    wanted = np.lib.stride_tricks.sliding_window_view(stream, 101)[::100]
    options = {"format": "tokens", "dtype": "uint16", "seq_len": 100, "overlap": 1, "extent_bytes": 8192}
    return compiled(root / "t.bin", root, **options), wanted


@pytest.mark.parametrize("origin", ["ram", "nvme"])
@pytest.mark.parametrize("limit", [1 << 30, 20_000, 0])
def test_records_that_span_extents_are_right_however_they_are_held(
    sequences: tuple[MemoryLink, np.ndarray], origin: str, limit: int
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    layout = catalog.layout
    before = descriptors()
    reader = Reader(catalog, MemoryGrants(catalog.extent, origin), limit)
    rng = np.random.default_rng(0)
    for count in (1, 7, 64, 300):
        samples = rng.integers(0, catalog.samples, count)
        slots = layout.slots(samples)
        first, last = reader.spans(slots * layout.stride_bytes, np.full(count, layout.record_bytes))
        found = reader.gather(slots, first, last).view("<u2").reshape(count, -1)
        assert (found == wanted[samples]).all()
    assert reader.origin_bytes()[origin] == 372 * layout.record_bytes
    reader.close()
    assert descriptors() <= before


def test_what_is_given_back_while_others_read_is_leased_anew(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    layout = catalog.layout
    grants = MemoryGrants(catalog.extent)
    reader, over = Reader(catalog, grants), threading.Event()

    def read(seed: int) -> bool:
        rng, right = np.random.default_rng(seed), True
        while not over.is_set():
            samples = rng.integers(0, catalog.samples, 64)
            slots = layout.slots(samples)
            first, last = reader.spans(slots * layout.stride_bytes, np.full(64, layout.record_bytes))
            found = reader.gather(slots, first, last).view("<u2").reshape(64, -1)
            right = right and bool((found == wanted[samples]).all())
        return right

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, seed) for seed in range(3)]
        while grants.calls < 40 and not any(one.done() for one in reads):
            reader.ease()
        over.set()
    assert all(one.result() for one in reads)
    reader.ease()
    assert not any(grants.leases.values())
    reader.close()


def test_readers_give_back_while_memory_is_short_and_only_then(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    grants, memory = MemoryGrants(catalog.extent), [Memory(1000, 51)]
    reader = Reader(catalog, grants)
    easing = Easing(reader.ease, lambda: memory[0])
    slots = catalog.layout.slots(np.arange(64))
    first, last = reader.spans(slots * catalog.layout.stride_bytes, np.full(64, catalog.layout.record_bytes))

    def read() -> bool:
        return bool((reader.gather(slots, first, last).view("<u2").reshape(64, -1) == wanted[:64]).all())

    assert read()
    easing.look()
    assert any(grants.leases.values())
    memory[0] = Memory(1000, 49)
    easing.look()
    assert not any(grants.leases.values())
    assert read()
    leave_alone(easing)
    reader.close()


def test_an_array_stays_however_short_memory_is(tmp_path: Path) -> None:
    rows = datasets.records(tmp_path / "r.bin", 100, 4096)
    whole = in_memory(compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=4096))
    found = whole.array()
    whole.opened.reader().ease()
    assert (found == rows).all()


@pytest.mark.parametrize(
    ("origin", "limit", "room"), [("ram", 1 << 30, 999), ("ram", 9000, 999), ("nvme", 0, 3)]
)
def test_files_of_any_size_are_right_however_they_are_held(
    blobs: tuple[MemoryLink, dict[str, bytes]], origin: str, limit: int, room: int
) -> None:
    link, files = blobs
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, origin, max(room, 4))
    reader = Reader(catalog, grants, limit)
    order = np.random.default_rng(2).permutation(catalog.samples)
    addresses, lengths = catalog.locate(order)
    found = reader.read(addresses[:, 0], lengths[:, 0])
    assert found == [files[catalog.key(int(n))] for n in order]
    reader.close()
    assert not grants.leases


def test_what_the_kernel_maps_no_more_is_read_from_its_descriptor(
    sequences: tuple[MemoryLink, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    layout = catalog.layout
    place, asked = mapping.place, itertools.count()

    def short(
        address: int, size_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0
    ) -> int:
        if fd >= 0 and next(asked) % 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return place(address, size_bytes, protection, flags, fd, offset)

    monkeypatch.setattr(mapping, "place", short)
    before, grants = descriptors(), MemoryGrants(catalog.extent, "ram")
    reader = Reader(catalog, grants)
    slots = layout.slots(np.arange(catalog.samples))
    first, last = reader.spans(slots * layout.stride_bytes, np.full(len(slots), layout.record_bytes))
    found = reader.gather(slots, first, last).view("<u2").reshape(len(slots), -1)
    assert (found == wanted).all()
    assert next(asked) > 4
    reader.close()
    assert not grants.leases
    assert descriptors() <= before


def test_a_sample_that_no_room_can_hold_is_a_typed_error(blobs: tuple[MemoryLink, dict[str, bytes]]) -> None:
    link, files = blobs
    catalog = link.catalog()
    large = max(range(catalog.samples), key=lambda n: len(files[catalog.key(n)]))
    addresses, lengths = catalog.locate(np.asarray([large]))
    reader = Reader(catalog, MemoryGrants(catalog.extent, "ram", 1), timeout_s=0.1)
    with pytest.raises(OutOfSpace, match="--ram"):
        reader.read(addresses[:, 0], lengths[:, 0])


def test_a_forked_child_reads_right_bytes_and_keeps_nothing(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    dataset = in_memory(link)
    assert (dataset[3].numpy() == wanted[3]).all()
    child = os.fork()
    if child == 0:
        right = bool((dataset[7].numpy() == wanted[7]).all())
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (dataset[3].numpy() == wanted[3]).all()


@pytest.mark.parametrize("origin", ["ram", "nvme"])
def test_a_dataset_that_nobody_has_any_more_leaves_nothing(
    sequences: tuple[MemoryLink, np.ndarray], origin: str
) -> None:
    link, wanted = sequences

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:test")

    before = descriptors(), mapped()
    for _ in range(3):
        dataset = in_memory(replace(link, origin=origin))
        assert (dataset.take(5)[3].numpy() == wanted[3]).all()
        rest = dataset.take(3)
        del dataset
        assert (rest[1].numpy() == wanted[1]).all()
        del rest
        assert descriptors() <= before[0]  # fewer, where others' are closed meanwhile
        assert mapped() <= before[1]
    array = in_memory(link).array()
    assert array[3, 0] == wanted[3, 0]


def test_array_is_the_whole_dataset_without_a_copy(tmp_path: Path) -> None:
    rows = datasets.records(tmp_path / "r.bin", 100, 4096)
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=4096, extent_bytes=16384)
    whole = in_memory(link)
    found = whole.array()
    assert found.shape == rows.shape
    assert (found == rows).all()
    assert not found.flags.writeable
    assert np.shares_memory(found, whole.array())


class Streaming(MemoryGrants):
    """Room of what streams by: others wait for it."""

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        answers = super().acquire(extents, timeout_s)
        return [each._replace(brief=True) if isinstance(each, Granted) else each for each in answers]


def test_nothing_of_an_array_is_given_back_whatever_is_read_later(tmp_path: Path) -> None:
    datasets.records(tmp_path / "r.bin", 100, 4096)
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=4096, extent_bytes=4096)
    catalog = link.catalog()
    grants = Streaming(catalog.extent)
    reader = Reader(catalog, grants)
    reader.array()
    reader.read(np.asarray([0]), np.asarray([8]))
    assert grants.leases == dict.fromkeys(range(100), 1), "a touch of what is gone would end the process"
    reader.close()


def test_a_forked_child_may_look_at_its_parents_array(tmp_path: Path) -> None:
    rows = datasets.records(tmp_path / "r.bin", 100, 4096)
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=4096, extent_bytes=16384)
    whole = in_memory(link)
    found = whole.array()
    child = os.fork()
    if child == 0:
        right = bool((found == rows).all() and (whole[7].numpy() == rows[7]).all())
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_array_that_does_not_fit_keeps_nothing(tmp_path: Path) -> None:
    datasets.records(tmp_path / "r.bin", 100, 4096)
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", record_bytes=4096, extent_bytes=4096)
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, room=90)
    reader = Reader(catalog, grants)
    with pytest.raises(OutOfSpace, match="not all in a daemon's memory: start one whose --ram"):
        reader.array()
    assert not any(grants.leases.values())
    reader.close()


@pytest.mark.parametrize("record_bytes", [48, 3000, 4096])
def test_array_has_the_samples_in_their_order_and_nothing_else(tmp_path: Path, record_bytes: int) -> None:
    (tmp_path / "data").mkdir()
    parts = [datasets.records(tmp_path / "data" / f"{n}.npy", 50 + n, record_bytes) for n in range(3)]
    link = compiled(tmp_path / "data", tmp_path, format="records", extent_bytes=16384)
    whole, rows = in_memory(link), np.concatenate(parts)
    assert np.array_equal(whole.array(), rows)
    chosen = [140, 3, 3, 77]
    assert np.array_equal(whole.select(chosen).array(), rows[chosen])
    assert whole.take(0).array().shape == rows[:0].shape
    assert not whole.select(chosen).array().flags.writeable


def test_array_of_overlapping_sequences_has_each_of_them(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    link = compiled(tmp_path / "t.npy", tmp_path, format="tokens", seq_len=16, overlap=1)
    whole = in_memory(link)
    found = whole.array()
    assert len(found) == len(whole)
    assert all((row == whole[n].numpy()).all() for n, row in enumerate(found))


def test_array_of_samples_of_several_sizes_is_refused(blobs: tuple[MemoryLink, dict[str, bytes]]) -> None:
    with pytest.raises(InvalidInput, match="one size"):
        in_memory(blobs[0]).array()


def test_local_files_are_read_without_a_daemon_and_a_changed_one_is_refused(home: Path) -> None:
    rows = datasets.records(home / "r.npy", 50, 3000)
    link = compiled(home / "r.npy", home, format="records", extent_bytes=8192)
    catalog = link.catalog()

    def first_row() -> bytes | None:
        reader = Reader(catalog, reads_around(catalog).grants)
        addresses, lengths = catalog.locate(np.asarray([0]))
        try:
            return reader.read(addresses[:, 0], lengths[:, 0])[0]
        finally:
            reader.close()

    before = descriptors()
    assert first_row() == rows[0].tobytes()
    assert descriptors() <= before
    datasets.records(home / "r.npy", 51, 3000)
    with pytest.raises(SourceChanged):
        first_row()
    (home / "r.npy").unlink()
    with pytest.raises(NotFound):
        first_row()


def test_a_local_file_that_cannot_be_opened_is_a_typed_error(home: Path) -> None:
    (home / "data").mkdir()
    datasets.records(home / "data" / "r.npy", 50, 3000)
    catalog = compiled(home / "data", home, format="records", extent_bytes=8192).catalog()
    grants = reads_around(catalog).grants
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(SourceUnavailable, match="open files"):
            grants.acquire([0], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (home / "data" / "r.npy").unlink()
    os.mkfifo(home / "data" / "r.npy")
    with pytest.raises(SourceChanged):
        grants.acquire([0], 1)
    shutil.rmtree(home / "data")
    (home / "data").touch()
    with pytest.raises(NotFound):
        grants.acquire([0], 1)
    grants.close()


def filled(catalog: Catalog, budget: int, failures: int = 0) -> DirectGrants:
    left = [failures]

    def fill(extent: Extent, fd: int) -> None:
        if left[0]:
            left[0] -= 1
            raise SourceUnavailable("the source is busy; try again")
        os.pwrite(fd, extent_bytes(extent), 0)

    return DirectGrants(catalog.extent, fill, lambda _: 0.0, budget)


def test_direct_reads_stay_within_their_budget(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    link, _ = sequences
    catalog = link.catalog()
    before = descriptors()
    direct = filled(catalog, budget=3 * 8192)
    direct.plan(range(10))
    for index in range(9):
        [answer] = direct.acquire([index], 10)
        assert isinstance(answer, Granted)
        assert os.pread(answer.fd, 8192, 0) == extent_bytes(catalog.extent(index))
        os.close(answer.fd)
        assert direct._used <= 3 * 8192
        direct.release([index])
    wait([copy.filled for copy in direct._copies.values()], 10)  # room that is being filled ahead is taken
    leased = direct.acquire([0, 1, 2, 3], 10)
    assert [type(answer) for answer in leased].count(Refused) == 1
    for answer in leased:
        if isinstance(answer, Granted):
            os.close(answer.fd)
    direct.close()
    assert descriptors() <= before


def test_too_many_open_files_are_a_typed_error_and_keep_nothing_leased(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    grants = filled(sequences[0].catalog(), 10 << 20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    for spare in (0, 1):  # no memory for an extent; memory for it, and no descriptor of it for the reader
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
        try:
            with pytest.raises(TierFailed, match="open-file limit"):
                grants.acquire([0], 5.0)
            wait([copy.filled for copy in grants._copies.values()])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (found,) = grants.acquire([0], 5.0)
    grants.plan(range(8))
    assert isinstance(found, Granted)
    os.close(found.fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (found.fd + 1, limits[1]))
    try:  # what is needed gets its descriptor before anything is read ahead
        (found,) = grants.acquire([0], 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(found, Granted)
    os.close(found.fd)
    grants.release([0])
    assert [copy.leases for copy in grants._copies.values()] == [1, *[0] * (len(grants._copies) - 1)]
    grants.close()


def test_what_was_read_directly_makes_room_for_what_comes_next(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    direct = filled(sequences[0].catalog(), budget=3 * 8192)
    direct.plan(range(10))
    ahead = []
    for index in range(9):
        [answer] = direct.acquire([index], 10)
        assert isinstance(answer, Granted)
        os.close(answer.fd)
        ahead.append(index + 1 in direct._copies)
        direct.release([index])
    assert all(ahead)
    direct.close()


def test_a_failed_fill_is_raised_and_tried_again_at_the_next_demand(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    catalog = sequences[0].catalog()
    direct = filled(catalog, 1 << 20, failures=1)
    with pytest.raises(SourceUnavailable):
        direct.acquire([0], 10)
    [answer] = direct.acquire([0], 10)
    assert isinstance(answer, Granted)
    os.close(answer.fd)
    direct.close()


def test_who_fails_gives_back_no_lease_of_another(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    catalog, slow, left = sequences[0].catalog(), threading.Event(), [1]

    def fill(extent: Extent, fd: int) -> None:
        if extent.id == catalog.extent(1).id:
            slow.wait(WAIT_S)
        elif left[0]:
            left[0] -= 1
            raise SourceUnavailable("the source is busy; try again")

    direct = DirectGrants(catalog.extent, fill, lambda _: 0.0, 2 * 8192)
    with ThreadPoolExecutor() as others:
        failing = others.submit(direct.acquire, [0, 1], 10)  # knows of the first when the second is there
        while left[0]:
            pass
        answers = list[Granted | Refused]()
        while not answers:
            with suppress(SourceUnavailable):
                answers = direct.acquire([0], 10)
        slow.set()
        with pytest.raises(SourceUnavailable):
            failing.result()
    answers += direct.acquire([1], 10)
    assert direct.acquire([2], 10) == [Refused(2)], "both places are leased"
    for answer in answers:
        assert isinstance(answer, Granted)
        os.close(answer.fd)
    direct.close()


def test_reads_go_around_a_dead_daemon_and_come_back(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    catalog = sequences[0].catalog()
    daemon, around = MemoryGrants(catalog.extent), MemoryGrants(catalog.extent, "direct")
    both = Failover(daemon, around)

    def origin(index: int) -> str:
        [answer] = both.acquire([index], 5)
        assert isinstance(answer, Granted)
        os.close(answer.fd)
        return answer.origin

    assert origin(0) == "ram"
    daemon.alive = False
    assert origin(1) == "direct"
    assert both.around_bytes == 8192
    asked = daemon.calls
    assert origin(2) == "direct"
    assert daemon.calls == asked, "a daemon that is down is not knocked at for every extent"
    daemon.alive, both._knock_at = True, 0.0
    assert origin(3) == "ram"
    both.release([0, 1, 2, 3])
    assert not any(daemon.leases.values())
    assert not any(around.leases.values())


class Forbidden(MemoryGrants):
    """A source without credentials."""

    def acquire(self, extents, timeout_s):  # type: ignore[no-untyped-def]
        raise NotAllowed("no credentials for this bucket; set them")


def test_without_credentials_readers_wait_for_the_daemon_with_a_deadline(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    catalog = sequences[0].catalog()
    daemon = MemoryGrants(catalog.extent)
    daemon.alive = False
    with pytest.raises(DaemonUnavailable, match="no way around it: the fake daemon is down; start it again"):
        Failover(daemon, Forbidden(catalog.extent)).acquire([0], 0.3)
    with pytest.raises(DaemonUnavailable):
        Failover(daemon, None).acquire([0], 0.3)


def test_what_the_daemon_refuses_is_read_elsewhere(sequences: tuple[MemoryLink, np.ndarray]) -> None:
    catalog = sequences[0].catalog()
    both = Failover(MemoryGrants(catalog.extent, room=1), MemoryGrants(catalog.extent, "direct"))
    answers = both.acquire([0, 1], 5)
    assert [a.origin for a in answers if isinstance(a, Granted)] == ["ram", "direct"]
    for answer in answers:
        if isinstance(answer, Granted):
            os.close(answer.fd)


@pytest.mark.parametrize("encoding", ["pkl", "pickle", "pt"])
def test_pickles_are_refused(encoding: str) -> None:
    with pytest.raises(InvalidInput, match="pickle"):
        decoder("x", encoding)


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1))
def test_numbers_decode_to_what_was_written(value: int) -> None:
    assert decoder("n", "int32")(value.to_bytes(4, "little", signed=True)) == value
    assert decoder("n", "cls")(str(value).encode()) == value
    assert decoder("n", "json")(str(value).encode()) == value


def test_null_is_a_value_and_not_an_absent_field(home: Path) -> None:
    rows = [{"n": b"7", "x": b"null"}, {"n": b"8", "x": b"{}"}]
    datasets.mds_shards(home / "d", {"n": "str_int", "x": "json"}, rows, 2)
    assert list(in_memory(compiled(home / "d", home))) == [{"n": 7, "x": None}, {"n": 8, "x": {}}]


def test_images_as_mosaicml_writes_them(home: Path) -> None:
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8)
    pil = np.asarray([4, 6, 3], "<u4").tobytes() + b"RGB" + pixels.tobytes()
    files = [io.BytesIO(), io.BytesIO()]
    for at, file in enumerate(files):
        Image.new("RGB", (8 + at, 8)).save(file, "JPEG")
    bodies = [file.getvalue() for file in files]
    several = np.asarray([2, *map(len, bodies)], "<u4").tobytes() + b"".join(bodies)
    columns = {"one": "pil", "some": "jpeg_array", "same": "jpegarray"}
    datasets.mds_shards(home / "d", columns, [{"one": pil, "some": several, "same": several}], 1)
    (sample,) = in_memory(compiled(home / "d", home))
    assert (sample["one"].mode, sample["one"].size) == ("RGB", (4, 6))
    assert np.array_equal(np.asarray(sample["one"]).ravel(), pixels)
    for name in ("some", "same"):
        assert [image.size for image in sample[name]] == [(8, 8), (9, 8)]


def test_arrays_and_lists_as_mosaicml_writes_them(home: Path) -> None:
    open_shape = b"\x08\x02\x03" + np.arange(6, dtype="<f4").tobytes()
    wide = b"\x05\x2c\x01" + bytes(300)  # one side, in two bytes
    picture = np.asarray([4, 1, 1], "<u4").tobytes() + b"Lgrey"
    row = {
        "shape": open_shape,
        "dtype": b"\x11" + np.asarray([-1, 2], "<i2").tobytes(),
        "both": b"\x42" + open_shape[:3] + np.arange(6, dtype="<f8").tobytes(),
        "wide": wide,
        "pictures": np.asarray([0, 2, 17, 17], "<u4").tobytes() + picture * 2,
        "none": bytes(8),
        "exact": b"1.10",
    }
    encodings = [
        "ndarray:float32",
        "ndarray::2",
        "ndarray",
        "ndarray:uint8",
        "list[pil]",
        "list[png]",
        "str_decimal",
    ]
    datasets.mds_shards(home / "d", dict(zip(row, encodings, strict=True)), [row], 1)
    (sample,) = in_memory(compiled(home / "d", home), image_mode=None)
    assert sample["shape"].dtype == "f4"
    assert sample["shape"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sample["dtype"].tolist() == [-1, 2]
    assert sample["wide"].shape == (300,)
    assert sample["both"].dtype == "f8"
    assert sample["both"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [image.tobytes() for image in sample["pictures"]] == [b"grey"] * 2
    assert sample["none"] == []
    assert str(sample["exact"]) == "1.10"


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.asarray(7), np.zeros((0, 3), ">i2")])
def test_an_array_decodes_to_what_was_saved(array: np.ndarray, version: tuple[int, int]) -> None:
    found = decoded(decoder("x", "npy"), saved(array, version), lambda: "sample 3")
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())


def test_an_array_that_is_not_there_or_is_several_is_corrupt() -> None:
    several = io.BytesIO()
    np.savez(several, a=np.zeros(3))
    whole = saved(np.zeros(1000, "u1"))
    huge = whole.replace(b"(1000,), }           ", b"(100000000000000,), }")
    assert len(huge) == len(whole)
    for raw in (whole[:-1], huge, several.getvalue(), b""):
        with pytest.raises(CorruptData, match="does not decode"):
            decoded(decoder("x", "npy"), raw, lambda: "sample 3")


@pytest.mark.parametrize("encoding", ["pil", "jpeg_array", "list[pil]", "ndarray", "ndarray:uint8"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff" * 4, b"\xff" * 40, b"\2\0\0\0\2\0\0\0\3\0\0\0RGB12", b"\1\0\0\0\1\0\0\0\4\0\0\0nosuch"],
)
def test_images_that_are_none_are_corrupt(encoding: str, raw: bytes) -> None:
    with pytest.raises(CorruptData, match="does not decode"):
        decoded(decoder("x", encoding), raw, lambda: "sample 3")


def bitmap_of(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "BMP")
    return file.getvalue()[:18] + np.asarray([width, height], "<i4").tobytes() + file.getvalue()[26:]


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("npy", b""),
        ("npy", b"\x93NUMPY\1\0\2\0{\n"),
        ("json", b"[" * 200_000),
        ("bmp", bitmap_of(1 << 15, 1 << 15)),
        ("pil", b"\xff\xff\xff\xff\0\0\0\0\1\0\0\0L"),
    ],
    ids=["an empty file", "a cut header", "too deep", "too large", "too wide"],
)
def test_whatever_a_decoder_raises_over_bytes_it_cannot_read_is_corrupt_data(kind: str, raw: bytes) -> None:
    with pytest.raises(CorruptData, match=r"^sample 3 does not decode"):
        decoded(decoder(f"x.{kind}", kind), raw, lambda: "sample 3")


def test_a_sample_that_does_not_decode_is_named(home: Path) -> None:
    datasets.write_files(home / "d", {"a.json": b"{", "b.json": b"{}"})
    dataset = in_memory(compiled(home / "d", home, format="files"))
    with pytest.raises(CorruptData, match=r"a\.json"):
        list(dataset)


@pytest.mark.parametrize("origin", ["ram", "nvme"])
def test_what_is_expected_is_only_announced_and_changes_no_byte(
    sequences: tuple[MemoryLink, np.ndarray], origin: str
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, origin)
    reader = Reader(catalog, grants)
    rng = np.random.default_rng(4)
    batches = [rng.integers(0, catalog.samples, 32) for _ in range(12)]
    for samples, following in itertools.pairwise(batches):
        addresses, lengths = catalog.locate(following)
        asked = grants.calls
        reader.expect(addresses[:, 0], lengths[:, 0])
        assert grants.calls == asked, "what is not held is not asked for ahead"
        addresses, lengths = catalog.locate(samples)
        found = reader.read(addresses[:, 0], lengths[:, 0])
        assert found == [row.tobytes() for row in wanted[samples]]
    assert reader.on_disk == (origin == "nvme")
    reader.close()
    assert not grants.leases


@pytest.mark.parametrize("encoding", ["jpeg:90", "list[jpeg:90]"])
def test_the_quality_that_mosaicml_wrote_a_jpeg_with_does_not_keep_it_from_being_decoded(
    encoding: str,
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "JPEG", quality=90)
    raw = file.getvalue()
    if encoding.startswith("list"):
        raw = np.asarray([0, 1, len(raw)], "<u4").tobytes() + raw
    found = decoded(decoder("x", encoding), raw, lambda: "sample 3")
    assert (found[0] if isinstance(found, list) else found).size == (3, 2)
