"""Quotas of `--quota`, parsed and enforced by the daemon."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.catalog.options import Options
from cachesvc.cli.options import QUOTA
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import CONTROL_SOCKET, QuotaSpec, parse_quota
from cachesvc.core.errors import InvalidInput, OutOfSpace
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas, UserCap
from cachesvc.daemon.access.tenants import ANONYMOUS
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from loader import open_dataset
from testbed.node import Daemon
from tests.support.reading import read_extent
from tests.support.users import ALICE, BOB, as_root, as_user

EXTENT = 64 << 10
RECORDS = Options(format="records", record_bytes=4096)


def data_in(root: Path, extents: int) -> Path:
    """A folder below `root` with a file of so many extents."""
    (root / "data").mkdir(parents=True)
    (root / "data" / "0.bin").write_bytes(os.urandom(extents * EXTENT))
    return root / "data"


def options(ram: str, quota: str) -> list[str]:
    return ["--ram", ram, "--extent-bytes", str(EXTENT), "--fillers", "1", "--quota", quota]


def test_the_longest_prefix_and_the_users_own_quota_decide() -> None:
    texts = ["s3://b/=4GiB", "s3://b/big/=1GiB", "user=2GiB", "user:7=3GiB"]
    quotas = Quotas([parse_quota(text) for text in texts])
    assert quotas.of_dataset("s3://b/big/train/") == 1 << 30
    assert quotas.of_dataset("s3://b/small/") == 4 << 30
    assert quotas.of_dataset("s3://c/") is None
    assert [quotas.of_user(uid) for uid in (7, 8, -1)] == [3 << 30, 2 << 30, None]
    assert QUOTA.convert("user=1", None, None) == QuotaSpec("user", 1)


def test_callers_without_a_token_share_the_smallest_quota_of_a_user() -> None:
    texts: list[list[str]] = [
        [],
        ["s3://b/=1GiB"],
        ["user=2GiB", "user:7=3GiB"],
        ["user:7=3GiB", "user:8=1GiB"],
    ]
    quotas = [Quotas([parse_quota(text) for text in each]) for each in texts]
    assert [each.of_user(ANONYMOUS) for each in quotas] == [None, None, 2 << 30, 1 << 30]


def test_a_prefetch_without_a_token_is_bound_by_the_user_quota(tmp_path: Path) -> None:
    data = data_in(tmp_path, 8)
    with Daemon(tmp_path / "node", options("1MiB", f"user={2 * EXTENT}")) as daemon:
        with Control(daemon.socket_dir) as control:
            found = control.open_dataset([str(data)], RECORDS).id
        with grpc.insecure_channel(f"unix:{daemon.socket_dir}/{CONTROL_SOCKET}") as channel:
            stub = services.Stub(channel, "Cache")
            *_, last = stub.Prefetch(pb.PrefetchRequest(dataset=found))
    assert last.resident_extents == 2


@pytest.mark.parametrize("twice", ["user=2MiB", "s3://b=2GiB"])
def test_two_quotas_of_one_name_are_refused(twice: str) -> None:
    with pytest.raises(InvalidInput, match="more than once"):
        Quotas([parse_quota(text) for text in ("user=5MiB", "user:7=1MiB", "s3://b/=1GiB", twice)])


@pytest.mark.slow
@as_root
def test_a_pin_counts_for_its_user_after_a_restart(tmp_path: Path) -> None:
    data_in(tmp_path, 8)
    shared = ["--allow", f"{tmp_path}/", "--socket-mode", "666"]
    with Daemon(tmp_path / "node", [*options("1MiB", f"user={3 * EXTENT}"), *shared]) as daemon:
        os.chmod(daemon.socket_dir, 0o755)
        here = daemon.socket_dir

        def resident() -> tuple[int, int]:
            *_, last = control.prefetch(dataset)
            return last.resident_extents, last.over_quota_bytes

        with Control(daemon.socket_dir) as control:
            dataset = control.open_dataset([f"{tmp_path}/data/"], RECORDS).id
            assert resident() == (3, 5 * EXTENT)
        assert as_user(ALICE, lambda: pinned(here, dataset)) == "pinned"
        daemon.kill()
        daemon.start()
        with Control(daemon.socket_dir) as control:
            assert resident() == (3, 5 * EXTENT)


def pinned(socket_dir: str, dataset: str) -> str:
    with Control(socket_dir) as control:
        control.pin(DatasetId(dataset), True)
    return "pinned"


def read_through(socket_dir: str, dataset: str, extents: int) -> int:
    """Acquire a dataset's first extents one after the other; return how many, all of them granted."""
    with closing(DaemonGrants(socket_dir, DatasetId(dataset))) as grants:
        return sum(bool(read_extent(grants, extent)) for extent in range(extents))


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("quota", ["user={}", "{{data}}/={}"], ids=["of users", "of data"])
def test_a_user_cannot_pin_more_than_its_quota_and_who_runs_the_daemon_can(
    tmp_path: Path, quota: str
) -> None:
    """RAM holds 16 extents, a quota 4. A pin leaves other users their room, also after a restart."""
    for name in ("a", "b"):
        data_in(tmp_path / name, 16)
    given = options("1MiB", quota.format(4 * EXTENT).format(data=tmp_path / "a"))
    with Daemon(tmp_path / "node", [*given, "--allow", f"{tmp_path}/", "--socket-mode", "666"]) as daemon:
        here = daemon.socket_dir

        def opened(name: str) -> str:
            with Control(here) as control:
                return control.open_dataset([f"{tmp_path}/{name}/data/"], RECORDS).id

        def kept(dataset: str) -> int:
            with Control(here) as control:
                (found,) = [each for each in control.list() if each.dataset.id == dataset]
            return found.kept_bytes // EXTENT

        os.chmod(here, 0o755)
        ours, others = opened("a"), opened("b")
        assert as_user(ALICE, lambda: read_through(here, ours, 16)) == 16
        assert as_user(ALICE, lambda: pinned(here, ours)) == "pinned"
        assert kept(ours) == 4
        assert as_user(BOB, lambda: read_through(here, others, 16)) == 16
        daemon.kill()
        daemon.start()
        os.chmod(here, 0o755)
        assert as_user(BOB, lambda: read_through(here, others, 16)) == 16
        assert as_user(ALICE, lambda: read_through(here, ours, 16)) == 16
        assert kept(ours) == 4
        pinned(here, ours)
        assert read_through(here, ours, 16) == 16
        assert kept(ours) > 4
        assert as_user(ALICE, lambda: pinned(here, ours)) == "pinned"
        assert kept(ours) > 4, "the pin stays that of the daemon's own user"


def test_a_quota_counts_below_its_prefix_only() -> None:
    quotas = Quotas([parse_quota("s3://b/a=1GiB")])
    uris = ("s3://b/a", "s3://b/a/", "s3://b/a/x", "s3://b/ab/x", "s3://b/")
    assert [quotas.of_dataset(uri) for uri in uris] == [1 << 30, 1 << 30, 1 << 30, None, None]


def test_a_quota_of_a_link_counts_for_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    quotas = Quotas([parse_quota(f"{tmp_path}/link/=1GiB")], lambda each: Lookups().resolve(each, "--quota"))
    assert quotas.of_dataset(f"file://{tmp_path.resolve()}/real/train/") == 1 << 30


def test_a_quota_of_a_path_counts_for_file_uris() -> None:
    quotas = Quotas(
        [parse_quota("/mnt/a/=1GiB"), parse_quota("file:///mnt/b/=2GiB"), parse_quota("/user=3GiB")]
    )
    found = [quotas.of_dataset(f"file:///{path}/") for path in ("mnt/a/train", "mnt/b", "mnt/c", "user")]
    assert found == [1 << 30, 2 << 30, None, 3 << 30]
    with pytest.raises(InvalidInput, match="names no bucket"):
        Quotas([parse_quota("s3:///a/=1GiB")])


@pytest.mark.parametrize("text", ["5GiB", "user:me=5GiB", "s3://b/=much"])
def test_an_invalid_quota_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_quota(text)


def test_a_user_keeps_no_more_than_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_in(tmp_path, 4)
    with Daemon(tmp_path / "node", options("1MiB", f"user:{os.getuid()}=128KiB")) as node:
        monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        dataset = open_dataset(str(data), format="records", record_bytes=4096)
        assert len([dataset[at] for at in range(len(dataset))]) == 64
        with Control(node.socket_dir) as control:
            (found,) = control.status().datasets
        assert found.kept_bytes == 128 << 10


OF_QUOTA = "; 384.0 KiB are beyond the quota of its data or user: raise --quota"
OF_ROOM = "; give the daemon more --ram or --nvme, or evict other data"


@pytest.mark.parametrize(
    ("ram", "quota", "of_quota", "advice"),
    [
        ("4MiB", "{data}/=128KiB", 384 << 10, OF_QUOTA),
        ("4MiB", "user=128KiB", 384 << 10, OF_QUOTA),
        ("256KiB", "/elsewhere/=128KiB", 0, OF_ROOM),
        ("256KiB", "{data}/=448KiB", 0, OF_ROOM),
        ("448KiB", "{data}/=128KiB", None, "raise --quota, and give the daemon more --ram or --nvme"),
    ],
)
def test_a_prefetch_that_does_not_fit_names_each_limit_that_is_too_small(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ram: str,
    quota: str,
    of_quota: int | None,
    advice: str,
) -> None:
    data = data_in(tmp_path, 8)
    words = ["prefetch", "--json", "--format", "records", "--record-bytes", "4096", str(data)]
    with Daemon(tmp_path / "node", options(ram, quota.format(data=data))) as node:
        monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
        unfit_bytes = []
        for more in (["--dry-run"], []):
            assert run([*words, *more]) == OutOfSpace.code
            out, err = capsys.readouterr()
            row = json.loads(out.splitlines()[-1])
            assert row["over_quota_bytes"] == of_quota or of_quota is None
            unfit_bytes.append(row["unfit_bytes"])
            assert advice in json.loads(err)["error"]
        planned, filled = unfit_bytes
        assert planned == filled == (of_quota or filled)


OWN = os.geteuid()
PER_USER, TOTAL = 5, 12


@given(st.lists(st.tuples(st.sampled_from([OWN, 64001, 64002, 64003]), st.integers(-3, 3)), max_size=60))
def test_any_order_of_takes_and_returns_keeps_to_both_limits(steps: list[tuple[int, int]]) -> None:
    cap, held = UserCap(PER_USER, TOTAL), Counter[int]()
    for uid, count in steps:
        if count >= 0:
            fits = held.total() + count <= TOTAL and (uid == OWN or held[uid] + count <= PER_USER)
            assert cap.take(uid, count) == fits
            held[uid] += count * fits
        elif held[uid] >= -count:
            cap.give_back(uid, -count)
            held[uid] += count
        assert cap.count == held.total()
