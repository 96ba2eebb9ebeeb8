"""Finds the daemon and calls its control API (gRPC). Extents are granted over another socket (`grants.DaemonGrants`)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cachesvc.client.caller_token import CallerIdentity
from cachesvc.client.fork_delay import delay_forks
from cachesvc.client.members import MemberStub
from cachesvc.config import CONTROL_SOCKET, UPGRADING, check_socket_dir, control_address, socket_dirs
from cachesvc.core.errors import (
    Busy,
    CacheError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidInput,
    NotAllowed,
    from_code,
)
from cachesvc.core.limits import BUSY_PAUSE_S, CONTROL_CALL_S, CONTROL_RETRY_S, PROBE_FIRST_S, UPGRADE_WAIT_S
from cachesvc.core.model import DatasetId
from cachesvc.system.deadline import Deadline

if TYPE_CHECKING:
    from cachesvc.catalog.options import Options
    from cachesvc.catalog.prepared import Recipe
    from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 24 << 20
"""The daemon's limit: 100,000 URIs of 240 characters."""
CODE_KEY = "cachesvc-code"


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """A dataset version as the daemon resolved it."""

    id: DatasetId
    dataset: pb.Dataset
    notes: tuple[str, ...] = ()
    stale: str = ""
    """The warning where the source is down, and this is the version that was opened last; "" otherwise."""
    kept: tuple[str, ...] = ()
    """The versions that open on this node without the source, where it is down."""
    sharing: tuple[DatasetId, ...] = ()
    """For `format="objects"`: datasets in use that may have the same bytes in other extents."""


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """A prepared dataset: the digest of the function that makes it, and the versions of libraries when that was first
    opened."""

    id: DatasetId
    digest: str
    versions: Mapping[str, str]


def find_daemon() -> str | None:
    """The directory of a daemon's sockets, or None without one."""
    return next((d for d in socket_dirs() if os.path.exists(f"{d}/{CONTROL_SOCKET}")), None)


class Control:
    """One gRPC channel. Close it before a fork, which waits for the threads of a closed channel (`delay_forks`). Raises
    the errors of core/errors.py: DaemonUnavailable without a daemon, InvalidInput for a directory whose path is too long
    for sockets. With `node`, the name or address of another member of the cluster, that member answers."""

    def __init__(self, directory: str | None = None, node: str = "") -> None:
        path = directory or find_daemon()
        if path is None:
            raise next(filter(None, map(_removed, socket_dirs())), None) or DaemonUnavailable(
                f"no daemon is listening in {' or '.join(socket_dirs())}; start one: cachesvc serve"
            )
        check_socket_dir(path)
        # grpc costs 0.15 s to import, and its fork support a log line for every DataLoader worker.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc

        from cachesvc.v1 import cachesvc_pb2, services

        delay_forks()
        self.directory = path
        log.debug("the daemon in %s is asked", path)
        self._identity = CallerIdentity(path)
        self._pb = cachesvc_pb2
        limits = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", int(PROBE_FIRST_S * 1000)),
            ("grpc.min_reconnect_backoff_ms", int(PROBE_FIRST_S * 1000)),
            ("grpc.max_reconnect_backoff_ms", int(PROBE_FIRST_S * 1000)),
        ]
        self._channel = grpc.insecure_channel(control_address(path), limits)
        stub = services.Stub(self._channel, "Cache")
        self._node, self._stub = node, MemberStub(stub, node) if node else stub

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        self._identity.close()

    def open_dataset(
        self,
        uris: Sequence[str],
        options: Options,
        version: str = "",
        refresh: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> DatasetInfo:
        """Resolve URIs to one dataset version; `progress(done, total)` in bytes while it is indexed."""
        wanted = self._pb.DatasetOptions(**asdict(options))
        request = self._pb.OpenDatasetRequest(uris=uris, options=wanted, version=version, refresh=refresh)
        for reply in self._stream(self._stub.OpenDataset, request):
            if reply.HasField("dataset"):
                of_source = tuple(reply.notes), reply.stale, tuple(reply.kept)
                sharing = tuple(map(DatasetId, reply.sharing))
                return DatasetInfo(DatasetId(reply.dataset.id), reply.dataset, *of_source, sharing)
            if progress is not None:
                progress(reply.indexed_bytes, reply.total_bytes)
        raise CacheError("the daemon ended OpenDataset without an answer; see its log")

    def open_prepared(self, source: DatasetId, recipe: Recipe, form: str = "") -> PreparedInfo | None:
        """Resolve what a function makes of each sample of a dataset. Without the `form` of its records, None for one that
        the daemon does not know."""
        request = self._pb.OpenPreparedRequest(
            source=source,
            name=recipe.name,
            digest=recipe.digest,
            given_name=recipe.given_name,
            spec=recipe.spec,
            form=form,
            versions=recipe.versions,
        )
        reply = self._ask(self._stub.OpenPrepared, request)
        if not reply.HasField("dataset"):
            return None
        return PreparedInfo(DatasetId(reply.dataset.id), reply.digest, dict(reply.versions))

    def prefetch(self, dataset: DatasetId, dry_run: bool = False) -> Iterator[pb.PrefetchReply]:
        """Fill a dataset; the last reply has `done` set. Closing the iterator stops filling."""
        yield from self._stream(
            self._stub.Prefetch, self._pb.PrefetchRequest(dataset=dataset, dry_run=dry_run)
        )

    def start_prefetch(self, dataset: DatasetId, id: str = "") -> str:
        """Fill a dataset without waiting; return the id of the prefetch."""
        reply = self._ask(self._stub.StartPrefetch, self._pb.StartPrefetchRequest(dataset=dataset, id=id))
        return str(reply.id)

    def prefetches(self) -> Sequence[pb.PrefetchStatus]:
        """The prefetches under way, and those that ended lately."""
        reply: pb.PrefetchesReply = self._ask(self._stub.Prefetches, self._pb.PrefetchesRequest())
        return reply.prefetches

    def cancel_prefetch(self, id: str) -> None:
        """End a prefetch. What is resident stays."""
        self._ask(self._stub.CancelPrefetch, self._pb.CancelPrefetchRequest(id=id))

    def verify(self, dataset: DatasetId) -> Iterator[pb.VerifyReply]:
        """Check a dataset's resident extents; the last reply has `done` set."""
        yield from self._stream(self._stub.Verify, self._pb.VerifyRequest(dataset=dataset))

    def status(self) -> pb.StatusReply:
        """Tiers, datasets, readers and counters."""
        reply: pb.StatusReply = self._ask(self._stub.Status, self._pb.StatusRequest())
        return reply

    def nodes(self) -> pb.NodesReply:
        """The members of the cluster."""
        reply: pb.NodesReply = self._ask(self._stub.Nodes, self._pb.NodesRequest())
        return reply

    def events(self, since: float) -> Iterator[pb.Event]:
        """The events that the daemon keeps, from `since` (Unix time) on."""
        request = self._pb.EventsRequest(since=since)

        def call() -> Iterator[Any]:  # all or none, since the call may be repeated
            yield from list(self._stub.Events(request, metadata=self._identity.metadata()))

        return self._retried(call)

    def follow_events(self, since: float) -> Iterator[pb.Event]:
        """Those, and then each new one, until the daemon ends. Closing the iterator ends the call."""
        request = self._pb.EventsRequest(since=since, follow=True)
        answers = self._stub.Events(request, metadata=self._identity.metadata())
        try:
            with _typed(self.directory):
                yield from answers
        finally:
            answers.cancel()

    def reload(self) -> pb.ReloadReply:
        """Have the daemon read its settings again. Raises the error of wrong ones, which change nothing."""
        reply: pb.ReloadReply = self._ask(self._stub.Reload, self._pb.ReloadRequest())
        return reply

    def examine(self) -> list[pb.Finding]:
        """Check what the daemon needs, with its settings and in its environment."""
        return list(self._stream(self._stub.Examine, self._pb.ExamineRequest()))

    def remove_node(self, name: str) -> pb.RemoveNodeReply:
        """Have all present members of the cluster forget one that is away."""
        request = self._pb.RemoveNodeRequest(name=name)
        reply: pb.RemoveNodeReply = self._ask(self._stub.RemoveNode, request)
        return reply

    def drain(self, timeout_s: float) -> Iterator[pb.DrainReply]:
        """Have the other members take over what this node alone holds, and end the daemon; the last reply has `done` set.
        Closing the iterator leaves the node a member."""
        yield from self._stream(self._stub.Drain, self._pb.DrainRequest(timeout_s=timeout_s))

    def bypass(self, on: bool) -> None:
        """Have this node's readers read from the source, or through the cache again."""
        self._ask(self._stub.Bypass, self._pb.BypassRequest(on=on))

    def where(self, dataset: DatasetId) -> pb.WhereReply:
        """How much of a dataset each member of the cluster holds."""
        reply: pb.WhereReply = self._ask(self._stub.Where, self._pb.WhereRequest(dataset=dataset))
        return reply

    def evict_later(self, nodes: Sequence[str], datasets: Sequence[DatasetId]) -> None:
        """Have datasets evicted on members that do not answer now, once each is back."""
        self._ask(self._stub.EvictLater, self._pb.EvictLaterRequest(nodes=nodes, datasets=datasets))

    def list(self) -> Sequence[pb.DatasetStatus]:
        """The datasets that the daemon knows."""
        reply: pb.ListReply = self._ask(self._stub.List, self._pb.ListRequest())
        return reply.datasets

    def pin(self, dataset: DatasetId, pinned: bool) -> None:
        """Pin or unpin a dataset."""
        self._ask(self._stub.Pin, self._pb.PinRequest(dataset=dataset, pinned=pinned))

    def evict(self, dataset: DatasetId) -> pb.EvictReply:
        """Drop a dataset from every tier. Its bytes are free on return, except on a disk that takes longer than 10 s."""
        reply: pb.EvictReply = self._ask(self._stub.Evict, self._pb.EvictRequest(dataset=dataset))
        return reply

    def _ask(self, method: Any, request: Any) -> Any:
        """Make a call with one answer."""
        log.debug("%s %s", type(request).__name__, str(request).replace("\n", " "))

        def call() -> Iterator[Any]:
            yield method(request, timeout=CONTROL_CALL_S, metadata=self._identity.metadata())

        return next(self._retried(call))

    def _stream(self, method: Any, request: Any) -> Iterator[Any]:
        """Make a call with many answers; it starts again where a daemon took over. Closing the iterator ends the call."""

        def call() -> Iterator[Any]:
            answers = method(request, metadata=self._identity.metadata())
            try:
                yield from answers
            finally:
                answers.cancel()

        return self._retried(call)

    def _retried(self, call: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Retry a call that a living daemon refuses, as Busy or since its connection has too many streams, and one that
        breaks off while another daemon replaces this one."""
        deadline: Deadline | None = None
        again = True
        while True:
            try:
                with _typed(self.directory):
                    yield from call()
                return
            except DaemonUnavailable as error:
                waits = isinstance(error, Busy) or self._identity.is_alive() or is_upgrading(self.directory)
                worth_it, again = waits or (again and is_back(self.directory)), waits
                deadline = deadline or Deadline(CONTROL_RETRY_S)
                # Until the other daemon binds its socket, or another call ends.
                pause_s = BUSY_PAUSE_S if isinstance(error, Busy) else PROBE_FIRST_S
                log.debug("asked again in %.2f s: %s", pause_s, error)
                if self._node and not isinstance(error, Busy):  # the other daemon is away
                    raise
                if not worth_it or not deadline.pause(pause_s):
                    raise


@contextmanager
def _typed(directory: str) -> Iterator[None]:
    """Translates gRPC's errors to ours."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise _translate(error, directory) from None


def _removed(directory: str) -> DaemonUnavailable | None:
    """Return the error where a directory of sockets was removed behind a mount: a container sees the old one, which stays
    empty, and the daemon is in a new one of that name."""
    with suppress(OSError):
        if not os.stat(directory).st_nlink:
            error = DaemonUnavailable(
                f"{directory} was removed outside of this container and made anew, so no daemon can appear in it; start"
                " the container again, or mount the directory that holds it"
            )
            error.for_good = True
            return error
    return None


def no_answer(path: str, error: OSError) -> CacheError:
    """The error for a socket that refuses a connection: no daemon, or not for this user."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotAllowed(
            f"{path} is not open to user {os.geteuid()}; join the group that owns it, or ask for a wider"
            " --socket-mode"
        )
    return _removed(os.path.dirname(path)) or DaemonUnavailable(
        f"no daemon answers at {path} ({error.strerror}); start one: cachesvc serve"
    )


def _translate(error: Any, directory: str) -> CacheError:
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return from_code(int(value), error.details())
    name = error.code().name
    # A server that stops answers calls that it has not begun with CANCELLED (grpc/grpc 41785). Clients cancel none.
    if name in ("UNAVAILABLE", "CANCELLED"):
        return _unavailable(f"{directory}/{CONTROL_SOCKET}")
    if name == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(f"the daemon in {directory} did not answer in {CONTROL_CALL_S:.0f} s")
    if name == "INVALID_ARGUMENT":
        return InvalidInput(error.details())
    return CacheError(f"the daemon answered {name}: {error.details()}")


def _unavailable(path: str) -> CacheError:
    """Connect once more to find the reason, which gRPC does not pass on."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return no_answer(path, error)
    return DaemonUnavailable(f"the daemon at {path} broke the connection; try again, and see its log")


def answers(directory: str) -> bool:
    """True if a daemon answers at its socket, which may be left from one that ended."""
    if not os.path.exists(f"{directory}/{CONTROL_SOCKET}"):
        return False
    try:
        with Control(directory) as control:
            control.status()
    except DaemonUnavailable:
        return False
    return True


def is_upgrading(directory: str) -> bool:
    """Tell whether the daemon in a directory of sockets is being replaced by another, which serves in a moment."""
    try:
        return time.time() - os.stat(f"{directory}/{UPGRADING}").st_mtime < UPGRADE_WAIT_S
    except OSError:
        return False


def is_back(directory: str) -> bool:
    """Tell whether a call that failed may succeed now: a daemon has bound its socket again."""
    return os.path.exists(f"{directory}/{CONTROL_SOCKET}")
