"""Whoever holds calls of the control API for ever leaves room for others. As root: users are real."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.build import Options
from cachesvc.client.caller_token import Identity
from cachesvc.client.control import CODE_KEY, Control
from cachesvc.core.errors import Busy
from cachesvc.daemon.control.call_quota import OWN_PLACES, PLACES, Places
from testbed.node import Daemon
from tests.support.users import ALICE, BOB, as_root, being
from tests.support.waiting import wait_until

CALLS = 640
CONNECTIONS = 16
SILENT = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/cachesvc.v1.Cache/Status")
"""A stream, and a call that waits for its one message."""
OWN, USERS = 0, st.integers(1, 9)


@given(st.lists(st.tuples(USERS | st.just(OWN), st.booleans()), max_size=600))
def test_any_order_of_calls_keeps_to_the_places(said: list[tuple[int, bool]]) -> None:
    places, held = Places(OWN), Counter[int]()
    for user, comes in said:
        if comes:
            held[user] += places.take(user)
        elif held[user]:
            places.leave(user)
            held[user] -= 1
        assert held.total() <= PLACES
        assert held.total() - held[OWN] <= PLACES - OWN_PLACES


@given(st.integers(1, 4), st.booleans())
def test_there_is_a_place_for_one_more_however_many_hoard(hoarders: int, in_turns: bool) -> None:
    places, users = Places(OWN), range(1, hoarders + 1)
    turns = [user for _ in range(PLACES) for user in users]
    taken = Counter(user for user in (turns if in_turns else sorted(turns)) if places.take(user))
    assert places.take(hoarders + 1)
    assert sum(places.take(OWN) for _ in range(PLACES)) >= OWN_PLACES
    if hoarders == 1:
        assert taken[1] > 8 * 16 + 1  # a node's ranks and workers, all at once, and the builder


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("places")
    (root / "data").mkdir()
    (root / "data" / "0.bin").write_bytes(bytes(1 << 16))
    options = ["--ram", "1MiB", "--extent-bytes", str(1 << 16), "--fillers", "1", "--socket-mode", "666"]
    with Daemon(root / "node", [*options, "--allow", f"{root}/data"]) as found:
        os.chmod(found.socket_dir, 0o755)
        yield found
    assert "Traceback" not in found.log


def identified(daemon: Daemon, uid: int) -> Identity:
    """A user's connection, for calls of this process."""
    found = Identity(daemon.socket_dir)
    with being(uid):
        assert found.metadata()
    return found


@contextlib.contextmanager
def hoarded(daemon: Daemon, method: str, who: Identity | None) -> Iterator[list[grpc.Call]]:
    """Calls that never end, as many as get a place; those that were refused."""
    over, refused, counted = threading.Event(), list[grpc.Call](), threading.Semaphore(0)
    metadata = who.metadata() if who else ()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    def ended(call: grpc.Call) -> None:
        refused.append(call)
        counted.release()

    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"unix:{daemon.socket_dir}/cachesvc.sock"
        channels = [stack.enter_context(grpc.insecure_channel(address, options)) for _ in range(CONNECTIONS)]
        for number in range(CALLS):
            open_one = channels[number % CONNECTIONS].stream_stream(method)
            open_one(nothing(), metadata=metadata).add_done_callback(ended)
        for _ in range(CALLS - PLACES):
            assert counted.acquire(timeout=60)
        yield refused


def pid_seen(daemon: Daemon, uid: int) -> int:
    with being(uid), Control(daemon.socket_dir) as control:
        return control.status().pid


@as_root
@pytest.mark.parametrize("method", SILENT)
def test_one_user_s_endless_calls_keep_nobody_else_out(daemon: Daemon, method: str) -> None:
    assert daemon.process is not None
    pid, bob = daemon.process.pid, identified(daemon, BOB)
    with hoarded(daemon, method, bob) as refused:
        assert pid_seen(daemon, ALICE) == pid
        with hoarded(daemon, method, None):  # and, without its token, as somebody else
            assert pid_seen(daemon, ALICE) == pid
            assert pid_seen(daemon, 0) == pid
        for call in refused[:10]:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (CODE_KEY, str(Busy.code)) in call.trailing_metadata()
            assert f"user {BOB} holds a full share" in call.details()
    wait_until(lambda: answered(daemon, bob))  # its places came back with the end of its calls
    bob.close()


def answered(daemon: Daemon, who: Identity) -> bool:
    """Whether as many calls as one user can have at once are answered."""

    def ask(_: int) -> bool:
        call = channel.unary_unary("/cachesvc.v1.Cache/Status")
        try:
            return bool(call(b"", metadata=who.metadata(), timeout=20))
        except grpc.RpcError:
            return False

    with (
        grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel,
        futures.ThreadPoolExecutor(64) as callers,
    ):
        return all(callers.map(ask, range(140)))


@as_root
def test_more_openings_of_one_user_at_once_than_it_has_places_all_succeed(daemon: Daemon) -> None:
    """Who is refused asks again: those that hold the places end by and by."""
    data, bob = str(daemon.root.parent / "data"), identified(daemon, BOB)

    def opened(_: int) -> str:
        with Control(daemon.socket_dir) as control:
            return control.open_dataset([data], Options(format="records", record_bytes=4096)).id

    with hoarded(daemon, SILENT[0], bob), being(ALICE), futures.ThreadPoolExecutor(160) as callers:
        assert len(set(callers.map(opened, range(160)))) == 1
    bob.close()


@pytest.mark.parametrize("body", [None, b"\xff"])
def test_a_call_without_its_message_is_a_typed_error(daemon: Daemon, body: bytes | None) -> None:
    with grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock") as channel:
        for method in ("Status", "Prefetch"):
            call = channel.stream_stream(f"/cachesvc.v1.Cache/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([] if body is None else [body]), timeout=20))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
