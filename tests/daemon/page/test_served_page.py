"""The status page shows what `cachesvc status --json` says, without users, and sums of datasets with access rules."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.model import DatasetId
from cachesvc.v1.plain import plain
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.reading import contents
from tests.support.waiting import wait_until

EXTENT = 64 << 10
SIZES = {"all": 4 * EXTENT, "secret": 3 * EXTENT}
OLDER = {"now_s", "uptime_s", "throughput", "history", "others", "events"}
"""Fields that differ between two snapshots, and the one that only the page has."""


def asked(port: int, method: str, path: str, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
    """Send one request; return the status, the headers and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def shown(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(port, "GET", "/status.json")[2])
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, int, dict[str, DatasetId]]]:
    """A daemon with a dataset for all and one for another user, the port of its page, and the datasets' ids."""
    root = tmp_path_factory.mktemp("page")
    (port,), data = free_ports(1), root / "data"
    options = [
        "--ram",
        "1MiB",
        "--extent-bytes",
        str(EXTENT),
        "--fillers",
        "1",
        "--metrics",
        f"127.0.0.1:{port}",
    ]
    options += ["--allow", f"{data}/all", "--allow", f"{data}/secret/=uid:64001"]
    ids = {}
    with Daemon(root / "node", options) as daemon, Control(daemon.socket_dir) as control:
        for name, size in SIZES.items():
            (data / name).mkdir(parents=True)
            (data / name / "0.bin").write_bytes(os.urandom(size))
            plain_records = Options(format="records", record_bytes=4096)
            ids[name] = control.open_dataset([f"{data}/{name}/"], plain_records).id
            assert list(control.prefetch(ids[name]))[-1].done
        yield daemon, port, ids
    assert "Traceback" not in daemon.log


def test_the_page_has_the_numbers_of_status(served: tuple[Daemon, int, dict[str, DatasetId]]) -> None:
    daemon, port, ids = served
    page: dict[str, Any] = {}

    def agree() -> bool:
        """The process that fills reports its requests to sources a moment after the fill, so two snapshots may differ."""
        nonlocal page
        with Control(daemon.socket_dir) as control:
            told = plain(control.status())
        page = shown(port)
        told["datasets"] = [row for row in told["datasets"] if row["dataset"]["id"] == ids["all"]]
        told["allow"] = page["allow"] = []
        return all(page[name] == told[name] for name in told.keys() - OLDER)

    wait_until(agree)
    (dataset,) = page["datasets"]
    assert dataset["resident_bytes"] == SIZES["all"]
    assert dataset["residency"] == {"ram": [100] * 4, "nvme": [0] * 4, "filling": [0] * 4}


def test_datasets_with_access_rules_are_shown_as_sums(
    served: tuple[Daemon, int, dict[str, DatasetId]],
) -> None:
    daemon, port, ids = served
    reader = DaemonGrants(daemon.socket_dir, ids["secret"], job=7)
    reader.connect()
    try:
        wait_until(lambda: shown(port)["others"]["readers"] == 1)
        page = shown(port)
    finally:
        reader.close()
    assert page["others"] == {
        "datasets": 1,
        "size_bytes": SIZES["secret"],
        "resident_bytes": SIZES["secret"],
        "readers": 1,
        "source_bytes": SIZES["secret"],
    }
    assert page["jobs"] == []
    assert ids["secret"] not in json.dumps(page)
    assert "secret" not in json.dumps(page)


def test_events_of_data_for_all_are_shown_in_words_and_without_their_user(
    served: tuple[Daemon, int, dict[str, DatasetId]],
) -> None:
    daemon, port, ids = served
    with Control(daemon.socket_dir) as control:
        own = [(each.kind, each.uid, each.dataset) for each in control.status().events]
    events = shown(port)["events"]
    assert ("opened", os.getuid(), ids["secret"]) in own
    (opened,) = (each for each in events if each["kind"] == "opened")
    assert opened["words"].startswith("a dataset is opened: ")
    assert (opened["dataset"], opened["uid"], opened["pid"]) == (ids["all"], -1, 0)
    assert {"started", "opened", "prefetched"} <= {each["kind"] for each in events}


def test_jobs_are_shown_without_their_user(served: tuple[Daemon, int, dict[str, DatasetId]]) -> None:
    daemon, port, ids = served
    reader = DaemonGrants(daemon.socket_dir, ids["all"], job=0x1234_5678 << 32)
    reader.acquire([0, 1], WAIT_S)
    try:
        wait_until(
            lambda: shown(port)["jobs"] and shown(port)["jobs"][0]["readers"][0]["leased_extents"] == 2
        )
        (job,) = shown(port)["jobs"]
        with Control(daemon.socket_dir) as control:
            (told,) = control.status().jobs
    finally:
        reader.close()
    assert (job["id"], job["user"], job["waits_for"]) == ("12345678", "", "")
    assert (told.user, told.readers[0].pid) == (str(os.getuid()), os.getpid())
    assert job["readers"][0]["dataset"] == ids["all"]


def test_only_reads_are_answered_and_only_under_names_of_this_host(
    served: tuple[Daemon, int, dict[str, DatasetId]],
) -> None:
    _, port, _ = served
    status, headers, body = asked(port, "HEAD", "/")
    assert (status, body) == (200, b"")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert int(headers["Content-Length"]) == len(asked(port, "GET", "/")[2])
    assert asked(port, "GET", "/status.json", "evil.example")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(port, method, "/status.json")[0] == 501


def test_status_top_and_page_agree_under_load(
    served: tuple[Daemon, int, dict[str, DatasetId]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All three are read while a reader goes on, and the last before the reader ends and after: each has what the ones
    before it had, and all have the same in the end."""
    daemon, port, ids = served

    def verb(name: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run([name, "--json", "--socket", daemon.socket_dir]) == 0
        rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return rows[0]

    def demands(status: dict[str, Any]) -> int:
        (row,) = [row for row in status["datasets"] if row["dataset"]["id"] == ids["all"]]
        return int(row["hits"]) + int(row["ahead"]) + int(row["misses"])

    ends = threading.Event()

    def read() -> None:
        with closing(DaemonGrants(daemon.socket_dir, ids["all"])) as reader:
            while not ends.is_set():
                for granted in reader.acquire([0, 1, 2, 3], WAIT_S):
                    contents(granted)
                reader.release([0, 1, 2, 3])

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            wait_until(lambda: demands(verb("status")) > 100)
            first, second = demands(verb("status")), demands(verb("top"))
            assert 100 < first <= second
            wait_until(lambda: demands(shown(port)) >= second)  # a snapshot of the page is up to a second old
            assert demands(shown(port)) <= demands(verb("status"))
        finally:
            ends.set()
        reading.result()
    wait_until(lambda: not verb("status")["readers"])
    wait_until(lambda: demands(shown(port)) == demands(verb("status")) == demands(verb("top")))
