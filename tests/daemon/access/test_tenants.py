"""Tenants of one node: one cannot read, evict or learn of the data of another. Runs as root, since users are real."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.caller_token import TOKEN_KEY
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.config import Rule, parse_allow
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Op
from cachesvc.daemon.access.tenants import Peer, Tenants, admits, peer_of
from cachesvc.sources.uri import allowlist
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from testbed.node import Daemon
from tests.support.greetings import connected, greeted
from tests.support.users import ALICE, BOB, ML, as_root, as_user, effective_user
from tests.support.waiting import wait_until

RECORDS = Options(format="records", record_bytes=4096)
EXTENT = 64 << 10


def test_rules_are_parsed_and_mistakes_fail_closed() -> None:
    assert parse_allow("s3://b/k=v/") == ("s3://b/k=v/", None)
    assert parse_allow("s3://b/a/=uid:1,gid:2,uid:root") == ("s3://b/a/", Rule("s3://b/a/", (1, 0), (2,)))
    assert parse_allow("s3://b/a/=1001") == ("s3://b/a/=1001", None)  # a prefix without data below it
    with pytest.raises(InvalidInput, match="no-such-user"):
        parse_allow("s3://b/=uid:no-such-user")


def test_other_nodes_and_users_learn_no_name_of_a_restricted_prefix() -> None:
    tenants = Tenants(allowlist(["s3://b/", "s3://b/secret/"]), [Rule("s3://b/secret/", (ALICE,), ())])
    shown, hidden = tenants.allowed
    assert shown == "s3://b"
    assert hidden.startswith("restricted-")
    assert "secret" not in hidden
    same = Tenants(allowlist(["s3://b/", "s3://b/secret/"]), [Rule("s3://b/secret/", (BOB,), ())])
    other = Tenants(allowlist(["s3://b/", "s3://b/hidden/"]), [Rule("s3://b/hidden/", (ALICE,), ())])
    assert same.allowed == tenants.allowed != other.allowed
    assert Tenants(allowlist([]), []).allowed == ()


def test_the_longest_prefix_decides_and_a_listing_meets_every_rule_below_it() -> None:
    allowed = ["s3://b/", "s3://b/a/", "s3://b/a/open/"]
    rule = Rule("s3://b/a/", (ALICE,), (ML,))
    tenants = Tenants(allowlist(allowed), [rule])
    alice, bob, friend = Peer(ALICE, frozenset()), Peer(BOB, frozenset({1})), Peer(BOB, frozenset({ML}))
    for uri in ("s3://b/a/x", "s3://b/", "s3://b/*/x", "s3://b/{a,c}/x", "s3://b/a"):
        assert tenants.check(uri, alice) == tenants.check(uri, friend) == uri
        for stranger in (bob, None):
            with pytest.raises(NotAllowed, match=r"\(s3://b, s3://b/a/open\)"):
                tenants.check(uri, stranger)
    for uri in ("s3://b/c/", "s3://b/ab/", "s3://b/a/open/x", "s3://b/c/*"):
        assert tenants.check(uri, bob) == tenants.check(uri, None) == uri
    assert tenants.rules_of("s3://b/", ["s3://b/c", "s3://b/a/open/x"]) == frozenset()
    (over,) = tenants.rules_of("s3://b/", ["s3://b/c", "s3://b/a/x"])
    assert (over.uids, over.gids) == ((ALICE,), (ML,))
    assert admits([over], Peer(os.geteuid(), frozenset()))  # the daemon's own user
    with pytest.raises(InvalidInput):
        tenants.check("s3://b/a/../c", alice)


def test_a_dataset_in_storages_of_several_kinds_meets_the_rules_of_each() -> None:
    tenants = Tenants(allowlist(["s3://a/", "/b"]), [Rule("s3://a/", (ALICE,), ()), Rule("/b", (BOB,), ())])
    found = tenants.rules_of("/", ["s3://a/x", "file:///b/y"])  # their URIs have no common folder
    assert {rule.uids for rule in found} == {(ALICE,), (BOB,)}


def test_the_kernel_states_the_user_of_a_peer() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        assert peer_of(here) == Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tenants") / "data"
    for name in ("alice", "bob", "all"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}-secret.bin").write_bytes(os.urandom(4 * EXTENT))
    return folder


@pytest.fixture(scope="module")
def daemon(data: Path) -> Iterator[Daemon]:
    """RAM for two extents of a dataset, NVMe for the others."""
    nvme = data.parent / "nvme"
    nvme.mkdir()
    options = ["--ram", str(2 * EXTENT), "--nvme", f"{nvme}=8MiB", "--extent-bytes", str(EXTENT)]
    options += ["--allow", f"{data}/alice/=uid:{ALICE}", "--allow", f"{data}/bob/=uid:{BOB},gid:{ML}"]
    options += ["--allow", f"{data}/all", "--socket-mode", "666", "--fillers", "1"]
    with Daemon(data.parent / "node", options) as found:
        os.chmod(found.socket_dir, 0o755)
        yield found


def read_all(socket_dir: str, dataset: str) -> list[int]:
    grants = DaemonGrants(socket_dir, DatasetId(dataset))
    answers = grants.acquire(range(4), 20.0)
    return [os.pread(answer.fd, 1, 0)[0] for answer in answers if isinstance(answer, Granted)]


@as_root
def test_a_tenant_uses_its_own_data_and_sees_nothing_of_another_tenant(daemon: Daemon, data: Path) -> None:
    here = daemon.socket_dir

    def opened(name: str) -> Callable[[], object]:
        def work() -> object:
            with Control(here) as control:
                found = control.open_dataset([f"{data}/{name}/"], RECORDS).id
                *_, last = control.prefetch(found)
                assert last.done
                return found

        return work

    def seen() -> object:
        with Control(here) as control:
            status = control.status()
            others = [
                event for event in status.events if event.kind != "refused"
            ]  # these name what was asked for
            del status.events[:]
            status.events.extend(others)
            return [str(status), str(control.list())]

    alices, bobs = as_user(ALICE, opened("alice")), as_user(BOB, opened("bob"))
    assert isinstance(alices, str)
    assert isinstance(bobs, str)
    assert len(as_user(ALICE, lambda: read_all(here, alices))) == 4
    assert as_user(BOB + 1, opened("bob"), groups=(ML,)) == bobs  # by group
    for wanted in ([f"{data}/alice/"], [f"{data}/*/*.bin"], [f"{data}/bob/", f"{data}/alice/"], [f"{data}/"]):

        def open_it(uris: list[str] = wanted) -> object:
            with Control(here) as control:
                return control.open_dataset(uris, RECORDS).id

        kind, message = as_user(BOB, open_it)
        assert kind == "NotAllowed"
        assert f"({data}/bob, ".replace("(/", "(file:///") in message
        assert "alice" not in message.replace(wanted[-1], "")

    def use(verb: str, dataset: str) -> Callable[[], object]:
        def work() -> object:
            with Control(here) as control:
                if verb == "pin":
                    control.pin(DatasetId(dataset), True)
                elif verb == "evict":
                    control.evict(DatasetId(dataset))
                elif verb == "read":
                    read_all(here, dataset)
                else:
                    list(getattr(control, verb)(DatasetId(dataset)))
            return "done"

        return work

    never = "1" * 32
    for verb in ("pin", "evict", "verify", "prefetch", "read"):
        refused = as_user(BOB, use(verb, alices))
        nothing = as_user(BOB, use(verb, never))
        assert refused[0] in ("NotFound", "InvalidInput")
        assert json.dumps(refused).replace(alices, never) == json.dumps(
            nothing
        )  # the words are those for a missing dataset
    bob_sees, alice_sees = str(as_user(BOB, seen)), str(as_user(ALICE, seen))
    assert bobs in bob_sees
    assert alices not in bob_sees
    assert "alice" not in bob_sees
    assert "/all" in bob_sees
    assert alices in alice_sees
    assert "bob" not in alice_sees
    assert alices in str(seen())  # the daemon's own user user
    assert bobs in str(seen())


def test_listed_objects_may_have_names_that_no_typed_uri_may_have(tmp_path: Path) -> None:
    options = ["--ram", "1MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    for folder, name in (("a", "we\\ird.bin"), ("b", "x%2Fy.bin")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(bytes(EXTENT))
        options += ["--allow", str(tmp_path / folder)]
    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        assert control.open_dataset([f"{tmp_path}/a", f"{tmp_path}/b"], RECORDS).dataset.samples == 32


@pytest.mark.slow
@pytest.mark.parametrize("ruled", [False, True])
def test_what_an_allowlist_no_longer_has_is_as_if_it_were_not_there(tmp_path: Path, ruled: bool) -> None:
    """A client that kept a dataset's id learns no name of its objects and no prefix that is allowed now."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret.bin").write_bytes(bytes(EXTENT))
    rule = f"=uid:{os.geteuid()}" if ruled else ""
    options = ["--ram", "1MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow"]
    with (
        Daemon(tmp_path / "node", [*options, f"{tmp_path}/old/{rule}"]) as before,
        Control(before.socket_dir) as control,
    ):
        old = control.open_dataset([f"{tmp_path}/old/"], RECORDS).id
        control.pin(old, True)
    with (
        Daemon(tmp_path / "node", [*options, f"{tmp_path}/new/{rule}"]) as after,
        Control(after.socket_dir) as control,
    ):
        for call in (
            lambda wanted: control.pin(wanted, True),
            lambda wanted: list(control.prefetch(wanted)),
            lambda wanted: DaemonGrants(after.socket_dir, wanted).acquire([0], 5.0),
        ):
            said = []
            for wanted in (old, DatasetId("1" * 32)):
                with pytest.raises(NotFound) as caught:
                    call(wanted)
                said.append(str(caught.value).replace(old, "1" * 32))
            assert said[0] == said[1]
            assert str(tmp_path) not in said[0]
        assert "not below" in after.log  # the operator is told
    assert (
        old in (tmp_path / "node" / "state" / "pins.json").read_text()
    )  # it is pinned again once it is allowed


@as_root
def test_a_call_without_a_valid_token_is_anonymous(daemon: Daemon, data: Path) -> None:
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/alice/"], RECORDS).id
        public = control.open_dataset([f"{data}/all/"], RECORDS).id
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        stub = services.Stub(channel, "Cache")
        for token in ("1", "-1", "x", str(2**64 - 1), "9" * 5000, ""):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Evict(pb.EvictRequest(dataset=dataset), metadata=((TOKEN_KEY, token),))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError):
            stub.Evict(pb.EvictRequest(dataset=dataset))
        stub.Evict(pb.EvictRequest(dataset=public))
        (listed,) = stub.List(pb.ListRequest()).datasets
        assert listed.dataset.id == public


def test_tokens_are_random_unique_and_end_with_their_connection(daemon: Daemon, data: Path) -> None:
    def hello() -> tuple[socket.socket, int]:
        channel = connected(daemon)
        channel.send(wire.encode(Op.IDENTIFY, wire.MAGIC))
        return channel, wire.decode(channel.recv(4096)).size

    found = [hello() for _ in range(64)]
    tokens = [token for _, token in found]
    assert len(set(tokens)) == 64
    ones = sum(token.bit_count() for token in tokens)
    assert abs(ones - 64 * 32) < 6 * 32  # six standard deviations
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as grpc_channel:
        stub = services.Stub(grpc_channel, "Cache")

        def prefixes(token: int) -> list[str]:
            return list(stub.Status(pb.StatusRequest(), metadata=((TOKEN_KEY, str(token)),)).allow)

        (channel, token), *others = found
        assert any("alice" in prefix for prefix in prefixes(token))  # the daemon's own user user sees all
        channel.close()
        wait_until(lambda: not any("alice" in prefix for prefix in prefixes(token)))
        assert str(token) not in daemon.log
    for channel, _ in others:
        channel.close()


@as_root
def test_other_users_cannot_read_the_daemons_state(daemon: Daemon, data: Path) -> None:
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/alice/"], RECORDS).id
    os.chmod(daemon.root.parent, 0o755)
    state = daemon.root / "state"

    def look() -> object:
        found = []
        for path in (state / "catalogs", state / "metadata", state / "catalogs" / f"{dataset}.lmdb"):
            found.append(os.access(path, os.R_OK) or os.access(path, os.X_OK))
        return found

    assert as_user(BOB, look) == [False, False, False]


@as_root
def test_another_user_cannot_write_through_a_granted_descriptor(daemon: Daemon, data: Path) -> None:
    here = daemon.socket_dir
    with Control(here) as control:
        for each in control.list():
            control.pin(DatasetId(each.dataset.id), False)
            control.evict(DatasetId(each.dataset.id))
        dataset = control.open_dataset([f"{data}/all/"], RECORDS).id
        assert list(control.prefetch(dataset))[-1].resident_extents == 4

    def tamper() -> object:
        grants, origins = DaemonGrants(here, dataset), set()
        for answer in grants.acquire(range(4), 10.0):
            assert isinstance(answer, Granted)
            fd, path = answer.fd, f"/proc/self/fd/{answer.fd}"
            origins.add(answer.origin)
            attempts = attempts_to_write(fd, path)
            assert [refused(attempt) for attempt in attempts] == [True] * len(attempts), answer
        return sorted(origins)

    assert as_user(BOB, tamper) == ["nvme", "ram"]
    with Control(here) as control:
        *_, last = control.verify(dataset)
        assert (last.checked_extents, last.corrupt_extents) == (4, 0)


def attempts_to_write(fd: int, path: str) -> list[Callable[[], object]]:
    return [
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_WRITE),
        lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        lambda: os.pwrite(os.open(path, os.O_RDWR), b"x", 0),
        lambda: os.fchmod(fd, 0o666),
        lambda: os.unlink(os.readlink(path)),
    ]


def refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(
    ("quota", "most"),
    [("", 8), ("--quota=user=256KiB", 4), ("--quota=user=1GiB", 16)],
)
def test_who_says_to_hold_what_it_never_had_takes_no_more_than_its_part(
    data: Path, tmp_path: Path, quota: str, most: int
) -> None:
    """RAM holds 16 extents, 4 of them of another user; claims are accepted in the first minute."""
    wide = tmp_path / "wide"
    wide.mkdir()
    (wide / "0.bin").write_bytes(bytes(64 * EXTENT))
    options = ["--ram", str(16 * EXTENT), "--extent-bytes", str(EXTENT), "--fillers", "1"]
    options += ["--allow", f"{data}/", "--allow", f"{wide}/", "--socket-mode", "666", *[quota] * bool(quota)]
    with Daemon(tmp_path / "node", options) as daemon:
        here = daemon.socket_dir
        os.chmod(here, 0o755)
        with Control(here) as control:
            named = control.open_dataset([f"{wide}/"], RECORDS).id
            mine = control.open_dataset([f"{data}/alice/"], RECORDS).id
            *_, last = control.prefetch(mine)
            assert last.resident_extents == 4

        def held() -> int:
            with Control(here) as control:
                (tier,) = control.status().tiers
            return tier.held_bytes // EXTENT

        hoarders = [hoarding(daemon, named, range(first, first + 32)) for first in (0, 32)]
        wait_until(lambda: held() == most)
        daemon.take_over()
        hoarders += [hoarding(daemon, named, span) for span in (range(32), range(32, 64), range(64))]
        wait_until(lambda: held() == most)
        assert daemon.log.count("not counted") == 2, "once by each daemon"
        for each in hoarders:
            each.close()
        wait_until(lambda: held() == 0)


def hoarding(daemon: Daemon, dataset: str, extents: range) -> socket.socket:
    """Connect as another user that claims to hold extents in memory from before the start."""
    with effective_user(BOB):  # the kernel notes the effective user at connect
        channel = greeted(daemon, DatasetId(dataset))
    for extent in extents:
        channel.send(wire.encode(Op.HOLD, 0, extent, text="ram"))
    return channel


def test_a_caller_outlives_a_restart_of_the_daemon(daemon: Daemon) -> None:
    assert daemon.process is not None
    with Control(daemon.socket_dir) as control:
        assert control.status().pid == daemon.pid
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait()
        with pytest.raises(CacheError):
            control.status()
        daemon.start()
        assert control.list() is not None
        with pytest.raises(NotFound):
            control.pin(DatasetId("1" * 32), True)
