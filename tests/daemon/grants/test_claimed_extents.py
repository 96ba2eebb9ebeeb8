"""The extents of the datasets that a user claims are bounded; these daemons have a low bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from testbed.node import Daemon
from tests.support.users import BOB, as_root, as_user

EXTENTS, MOST = 100, 300
_SERVE = f"""
import sys
import cachesvc.daemon.claims as claims
from cachesvc.__main__ import run
from testbed.service import fork_daemon
claims.MAX_CLAIMED_EXTENTS = {MOST}
sys.exit(run(launch=fork_daemon))
"""


class Narrow(Daemon):
    """A daemon with a low bound of claimed extents."""

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        with open(self.root / "daemon.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _SERVE, "serve", *self._options, *more], stdout=log, stderr=log
            )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("claimed")
    os.chmod(root, 0o755)
    (root / "0.bin").write_bytes(bytes(EXTENTS * 4096))
    options = ["--ram", "1MiB", "--extent-bytes", "4096", "--fillers", "1", "--allow", str(root)]
    with Narrow(root / "node", [*options, "--socket-mode", "666"]) as found:
        os.chmod(found.socket_dir, 0o755)
        yield found


@pytest.fixture(scope="module")
def datasets(daemon: Daemon) -> list[DatasetId]:
    """Four datasets of 100 extents each, without common extents."""
    uri = str(daemon.root.parent / "0.bin")
    sizes = (256, 512, 1024, 2048)
    with Control(daemon.socket_dir) as control:
        return [
            control.open_dataset([uri], Options(format="records", record_bytes=each)).id for each in sizes
        ]


def opened(socket_dir: str, datasets: list[DatasetId]) -> list[str]:
    """Claim each dataset with a reader of its own; return the error of each, "" for none."""
    found = []
    readers = [DaemonGrants(socket_dir, each) for each in datasets]
    for reader in readers:
        try:
            os.close(reader.catalog())
            found.append("")
        except CacheError as error:
            found.append(f"{type(error).__name__}: {error}")
    for reader in readers:
        reader.close()
    return found


@pytest.mark.slow
@as_root
def test_a_user_claims_no_more_extents_than_twice_what_that_leaves_free(
    daemon: Daemon, datasets: list[DatasetId]
) -> None:
    where = daemon.socket_dir
    found = as_user(BOB, lambda: opened(where, datasets))
    assert found == ["", "", refusal(200), refusal(200)]
    assert as_user(BOB, lambda: opened(where, datasets[2:])) == ["", ""], "claims that ended still count"
    assert opened(where, datasets) == [""] * len(datasets), "the daemon's own user is bounded"


@as_root
def test_a_claim_of_a_claimed_dataset_is_free(daemon: Daemon, datasets: list[DatasetId]) -> None:
    where = daemon.socket_dir
    reader = DaemonGrants(where, datasets[0])
    os.close(reader.catalog())
    assert as_user(BOB, lambda: opened(where, datasets)) == ["", "", "", refusal(200)]
    reader.close()


@as_root
def test_pins_and_prefetches_count_as_claims(daemon: Daemon, datasets: list[DatasetId]) -> None:
    where = daemon.socket_dir

    def claim() -> list[str]:
        found = []
        with Control(where) as control:
            for each in datasets[:3]:
                try:
                    control.pin(each, True)
                    found.append("")
                except CacheError as error:
                    found.append(str(error))
            try:
                list(control.prefetch(datasets[2]))
            except CacheError as error:
                found.append(str(error))
            for each in datasets[:2]:
                control.pin(each, False)
        return found

    assert as_user(BOB, claim) == ["", "", *[refusal(200).partition(" ")[2]] * 2]


def refusal(held: int) -> str:
    return (
        f"OutOfSpace: user {BOB} reads datasets of {held} extents, and has no room for {EXTENTS} more: close or unpin some,"
        " or open them with larger extents (extent_bytes=)"
    )
