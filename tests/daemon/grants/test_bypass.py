"""`cachesvc bypass`: readers of a real daemon go on with the source, in their place, until it is off."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.errors import DaemonUnavailable
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.users import BOB, as_root, as_user
from tests.support.waiting import wait_until

RECORD, RECORDS, BATCH = 4096, 256, 4


@pytest.mark.slow
@as_root
def test_a_bypass_outlives_the_daemon_and_costs_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.bin").write_bytes(contents := os.urandom(RECORDS * RECORD))
    options = ["--ram", "8MiB", "--extent-bytes", "64KiB", "--fillers", "1", "--allow", f"{data}/"]
    options += ["--socket-mode", "666"]
    monkeypatch.setenv("CACHESVC", "auto")
    with Daemon(tmp_path / "node", options) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        loader = DataLoader(open_dataset(f"{data}/", format="records", record_bytes=RECORD), BATCH, seed=1)
        batches = iter(loader)
        seen: list[bytes] = []

        def take(count: int) -> None:
            for _ in range(count):
                seen.extend(bytes(row.numpy()) for row in next(batches))

        def origins() -> dict[str, int]:
            return loader.stats().bytes_by_origin

        take(10)
        assert run(["bypass", "on"]) == 0
        take(10)
        assert daemon.stop() == 0
        daemon.start()
        with Control() as control:
            assert control.status().bypassed
        assert run(["status"]) == 0
        assert "bypassed" in capsys.readouterr().out
        take(10)
        direct = {name: count for name, count in origins().items() if name not in ("ram", "nvme", "peer")}
        assert sum(direct.values()) > 0, origins()

        with monkeypatch.context() as patch:
            patch.setenv("CACHESVC", "require")
            patch.setenv("CACHESVC_TIMEOUT_S", "0.5")
            required = DataLoader(open_dataset(f"{data}/", format="records", record_bytes=RECORD), BATCH)
            with pytest.raises(DaemonUnavailable, match="the operator bypasses the cache"):
                next(iter(required))
        directory = daemon.socket_dir
        os.chmod(directory, 0o755)

        def switch_off() -> None:
            with Control(directory) as other:
                other.bypass(False)

        refused = as_user(BOB, switch_off)
        assert refused == ["NotAllowed", "only user 0, who runs the daemon, may bypass the cache"]

        assert run(["bypass", "off"]) == 0
        take(RECORDS // BATCH - 30)
        expected = Counter(contents[at : at + RECORD] for at in range(0, len(contents), RECORD))
        assert Counter(seen) == expected

        def through_the_cache() -> bool:
            list(loader)
            return origins()["ram"] > 0

        wait_until(through_the_cache)
        with Control() as control:
            kinds = [event.kind for event in control.events(0.0)]
            assert not control.status().bypassed
        assert (kinds.count("bypassed"), kinds.count("bypass_ended")) == (1, 1)
