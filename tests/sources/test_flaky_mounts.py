"""A mount that sometimes answers a call late or with ESTALE or EIO: no wrong byte, no hang, and errors that name the
file."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError, SourceChanged, SourceUnavailable
from cachesvc.core.holes import Holes
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.faults.fuse import FaultyMount, File
from tests.support.faults.outages import needs_fuse

FILES, FILE_BYTES = 40, 50_000
EXTENT = 256 << 10
OPTIONS = ["--ram", "32MiB", "--extent-bytes", str(EXTENT)]


def mount_faults(seed: int, each: float, told: set[int]) -> Callable[[], int]:
    """Inject ESTALE, EIO and a delay of 0.2 s with the given frequencies, and record which of them occurred."""
    draw, lock = random.Random(seed), threading.Lock()

    def now() -> int:
        with lock:
            chance = draw.random()
        if chance < each:
            time.sleep(0.2)
        found = {1: errno.ESTALE, 2: errno.EIO}.get(int(chance / each), 0)
        told.add(found)
        return found

    return now


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    bodies = {f"{number:03}.bin": random.Random(number).randbytes(FILE_BYTES) for number in range(FILES)}
    with FaultyMount(tmp_path / "nfs", {name: File(body) for name, body in bodies.items()}) as found:
        yield found


def opened(daemon: Daemon, folder: Path) -> DatasetId:
    """Retry like a user would after an error that says that the source is unavailable."""
    said: list[str] = []
    with Control(daemon.socket_dir) as control:
        while len(said) < 20:
            try:
                return control.open_dataset([f"{folder}/"], Options(format="files")).id
            except SourceUnavailable as error:
                said.append(str(error))
    raise AssertionError(said)


class Reading:
    """An open dataset of files, read sample by sample."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.grants = DaemonGrants(daemon.socket_dir, opened(daemon, folder))
        fd = self.grants.catalog()
        self.catalog = Catalog.open(f"/proc/self/fd/{fd}")

    def read(self) -> dict[str, bytes | CacheError]:
        """Return for each file its bytes, or the error in their place."""
        found: dict[str, bytes | CacheError] = {}
        addresses, lengths = self.catalog.locate(np.arange(self.catalog.samples))
        for index, start in enumerate(self.catalog.extent_starts.tolist()):
            names = range(*self.catalog.extent_first[index : index + 2].tolist())
            try:
                (answer,) = self.grants.acquire([index], WAIT_S)
            except CacheError as error:
                found |= {self.catalog.key(sample): error for sample in names}
                continue
            assert isinstance(answer, Granted)
            holes = Holes(self.catalog.extent(index), answer.holes)
            for sample in names:
                at, length = int(addresses[sample, 0]) - start, int(lengths[sample, 0])
                try:
                    holes.check(at, length)
                except CacheError as error:
                    found[self.catalog.key(sample)] = error
                else:
                    found[self.catalog.key(sample)] = os.pread(answer.fd, length, at)
            os.close(answer.fd)
            self.grants.release([index])
        return found


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("seed", range(3))
def test_on_a_flaky_mount_bytes_are_right_and_errors_are_typed(
    tmp_path: Path, mount: FaultyMount, seed: int
) -> None:
    whole = {name: file.data for name, file in mount.files.items()}
    with Daemon(tmp_path / "node", [*OPTIONS, "--allow", f"{tmp_path}/"]) as daemon:
        told: set[int] = set()
        mount.weather = mount_faults(seed, 0.02, told)
        reading = Reading(daemon, mount.path)
        with closing(reading.grants):
            began, found = time.monotonic(), reading.read()
            assert time.monotonic() - began < WAIT_S
            for name, body in found.items():
                assert isinstance(body, SourceUnavailable) or body == whole[name]
            assert told == {0, errno.ESTALE, errno.EIO}
            mount.weather = None
            assert reading.read() == whole
        assert "Traceback" not in daemon.log


@needs_fuse
@pytest.mark.parametrize("code", [errno.ESTALE, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_file_that_is_stale_in_the_middle_of_a_fill_of_many_is_read_again(
    tmp_path: Path, mount: FaultyMount, code: int
) -> None:
    whole = {name: file.data for name, file in mount.files.items()}
    with Daemon(tmp_path / "node", [*OPTIONS, "--allow", f"{tmp_path}/"]) as daemon:
        reading = Reading(daemon, mount.path)
        for name in ("007.bin", "020.bin", "021.bin"):
            mount.files[name].fail, mount.files[name].times = code, 3
        with closing(reading.grants):
            assert reading.read() == whole


@needs_fuse
@pytest.mark.parametrize("kind", ["replaced", "cut", "longer"])
def test_a_file_that_changes_under_a_fill_of_many_is_lost_alone_and_named(
    tmp_path: Path, mount: FaultyMount, kind: str
) -> None:
    whole = {name: file.data for name, file in mount.files.items()}
    after = {
        "replaced": whole["007.bin"][::-1],
        "cut": whole["007.bin"][:100],
        "longer": bytes(2 * FILE_BYTES),
    }
    with Daemon(tmp_path / "node", [*OPTIONS, "--allow", f"{tmp_path}/"]) as daemon:
        reading = Reading(daemon, mount.path)
        mount.files["007.bin"].write_while_read = after[kind]
        with closing(reading.grants):
            found = reading.read()
        lost = [name for name, body in found.items() if body != whole[name]]
        assert lost == ["007.bin"]
        assert isinstance(found["007.bin"], SourceChanged)
        assert "007.bin was overwritten" in str(found["007.bin"])
        again = Reading(daemon, mount.path)
        with closing(again.grants):
            assert again.read() == whole | {"007.bin": after[kind]}
