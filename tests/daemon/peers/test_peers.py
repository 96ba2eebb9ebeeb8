"""Nodes read extents from each other: before they ask the source, and to repair corrupt copies."""

from __future__ import annotations

import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import psutil
import pytest
import trustme

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.daemon.access.tls import Certificates, server_credentials
from cachesvc.daemon.fills.peer_client import PeerClient
from cachesvc.daemon.peers.sharer import MAX_CALLS
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from loader import DataLoader, open_dataset
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

EXTENT = 256 << 10
EXTENTS = 8
RECORD = 4096
OPTIONS = Options(format="records", record_bytes=RECORD)


def start(
    at: Path,
    data: Path,
    *more: str,
    ram: str = "8MiB",
    tls: list[str] | None = None,
    credentials: dict[str, str] | None = None,
) -> tuple[Daemon, str]:
    """A daemon over `data` that listens on TCP, not yet started, and its address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    given = ["--ram", ram, "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", f"{data}/"]
    return Daemon(at, [*given, "--share", address, *(tls or []), *more], credentials), address


def data_in(folder: Path) -> bytes:
    folder.mkdir()
    contents = np.random.default_rng(1).bytes(EXTENTS * EXTENT)
    (folder / "0.bin").write_bytes(contents)
    return contents


def listening(address: str) -> None:
    """Wait until the sharer listens."""
    host, port = address.split(":")

    def connects() -> bool:
        with suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            return True
        return False

    wait_until(connects)


def fill(daemon: Daemon, data: Path) -> tuple[DatasetId, pb.PrefetchReply]:
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/"], OPTIONS).id
        return dataset, list(control.prefetch(dataset))[-1]


def read(daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, dict[str, float]]:
    """Read every record in order through the loader; return the bytes and the waiting times of its steps."""
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    dataset = open_dataset(f"{data}/", format="records", record_bytes=RECORD)
    batches = DataLoader(dataset, batch_size=16)
    found = b"".join(np.asarray(batch).tobytes() for batch in batches)
    waited = batches.stats().wait_by_cause_s
    dataset.close()
    return found, waited


def copies(node: Path) -> list[Path]:
    """Files of the extents on a node's disk."""
    return sorted(path for path in (node / "nvme").rglob("?" * 32 + ".*"))


def flip(path: Path) -> None:
    """Flip one bit of an extent's file."""
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 4]))


@pytest.fixture(scope="module")
def metrics() -> str:
    """The address of the sharing daemon's metrics."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, metrics: str) -> Iterator[tuple[Daemon, str]]:
    """A daemon with `--share` over the data of all tests, and its address."""
    root, secret = tmp_path_factory.mktemp("sharing"), {"AWS_SECRET_ACCESS_KEY": "hush-hush"}
    daemon, address = start(root, root.parent, "--metrics", metrics, credentials=secret)
    with daemon:
        listening(address)
        yield daemon, address


@pytest.fixture
def sharing(shared: tuple[Daemon, str]) -> Iterator[tuple[Daemon, str]]:
    for daemon in for_one_test(shared[0]):
        yield daemon, shared[1]


def sent_bytes(metrics: str) -> float:
    """The bytes that the sharing daemon has sent."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=WAIT_S) as answer:
        found = re.search(r"^cachesvc_peer_sent_bytes_total (\S+)$", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def test_extents_of_a_peer_are_not_read_from_the_source(
    tmp_path: Path, sharing: tuple[Daemon, str], metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other, address), data = sharing, tmp_path / "data"
    contents = data_in(data)
    node, _ = start(tmp_path / "node", data, "--peer", address)
    before = sent_bytes(metrics)
    with node:
        _, there = fill(other, data)
        assert (there.source_bytes, there.peer_bytes) == (len(contents), 0)
        found, waited = read(node, data, monkeypatch)
        _, here = fill(node, data)
        sent = sent_bytes(metrics) - before
        with Control(node.socket_dir) as control:
            (status,) = control.status().datasets
    assert found == contents
    assert (here.source_bytes, here.peer_bytes, here.resident_extents) == (0, len(contents), EXTENTS)
    assert (status.source_bytes, status.peer_bytes) == (0, len(contents))
    assert sent == len(contents)
    assert waited["peer"] > 0
    assert waited["source"] == 0


def test_a_corrupt_copy_is_repaired_from_a_peer_where_the_source_is_gone(
    tmp_path: Path, sharing: tuple[Daemon, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (other, address), data = sharing, tmp_path / "data"
    contents = data_in(data)
    nvme = tmp_path / "node" / "nvme"
    node, _ = start(tmp_path / "node", data, "--peer", address, "--nvme", f"{nvme}=64MiB", ram="0")
    nvme.mkdir(parents=True)
    with node:
        fill(other, data)
        dataset, _ = fill(node, data)
        rotten = copies(tmp_path / "node")[3]
        flip(rotten)
        (data / "0.bin").rename(tmp_path / "away")
        with Control(node.socket_dir) as control:
            report = list(control.verify(dataset))[-1]
            assert report.corrupt_extents == 1
            list(control.prefetch(dataset))
            (status,) = control.status().datasets
        (tmp_path / "away").rename(data / "0.bin")  # the loader stats the files that it opens
        found, _ = read(node, data, monkeypatch)
    assert found == contents
    assert status.resident_bytes == len(contents)


def test_a_peer_checks_copies_from_before_its_start_before_it_lends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, nvme = tmp_path / "data", tmp_path / "other" / "nvme"
    contents = data_in(data)
    nvme.mkdir(parents=True)
    other, address = start(tmp_path / "other", data, "--nvme", f"{nvme}=64MiB", ram="0")
    node, _ = start(tmp_path / "node", data, "--peer", address)
    with other, node:
        fill(other, data)
        listening(address)
        other.stop()
        flip(copies(tmp_path / "other")[0])
        other.start()
        listening(address)
        with Control(other.socket_dir) as control:
            control.open_dataset([f"{data}/"], OPTIONS)
        _, here = fill(node, data)
        found, _ = read(node, data, monkeypatch)
        with Control(other.socket_dir) as control:
            corrupt = sum(tier.corrupt_extents for tier in control.status().tiers)
    assert found == contents
    assert (here.peer_bytes, here.source_bytes) == (len(contents) - EXTENT, EXTENT)
    assert corrupt == 1


def test_a_dataset_of_some_users_is_given_to_no_peer(tmp_path: Path) -> None:
    data = tmp_path / "data"
    contents = data_in(data)
    other, address = start(tmp_path / "other", tmp_path / "nothing", "--allow", f"{data}/=uid:64001")
    node, _ = start(tmp_path / "node", data, "--peer", address)
    with other, node:
        assert fill(other, data)[1].resident_extents == EXTENTS
        listening(address)
        _, here = fill(node, data)
    assert (here.peer_bytes, here.source_bytes) == (0, len(contents))


def test_a_peer_that_dies_loses_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    contents = data_in(data)
    other, address = start(tmp_path / "other", data)
    (port,) = free_ports(1)
    given = ["--peer", address, "--peer", "127.0.0.1:1", "--metrics", f"127.0.0.1:{port}"]
    node, _ = start(tmp_path / "node", data, *given)
    with other, node:
        fill(other, data)
        listening(address)
        other.kill()
        found, _ = read(node, data, monkeypatch)
        _, here = fill(node, data)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            failures = re.findall(
                r'^cachesvc_peer_failures_total{peer="(.*)"} (\S+)$', answer.read().decode(), re.M
            )
    assert sorted(peer for peer, _ in failures) == sorted([address, "127.0.0.1:1"])
    assert all(float(times) > 0 for _, times in failures), failures
    assert found == contents
    assert (here.peer_bytes, here.source_bytes) == (0, len(contents))


def test_few_peers_are_served_at_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.bin").write_bytes(bytes(32 << 20))
    other, address = start(tmp_path / "other", data, "--extent-bytes", str(32 << 20), ram="64MiB")
    with other, grpc.insecure_channel(address) as channel, Control(other.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/"], OPTIONS)
        list(control.prefetch(dataset.id))
        listening(address)
        grants = DaemonGrants(other.socket_dir, dataset.id)
        fd = grants.catalog()
        (extent,) = Catalog.open(f"/proc/self/fd/{fd}").extents()
        os.close(fd)
        grants.close()
        stub = services.Stub(channel, "Peers")
        streams = [stub.Read(pb.ReadRequest(extent=extent), timeout=60) for _ in range(MAX_CALLS)]
        for stream in streams:
            next(stream)  # the other replies wait for room in the connection
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Read(pb.ReadRequest(extent=extent), timeout=60))
        for stream in streams:
            assert sum(len(reply.data) for reply in stream) == 31 << 20
        assert sum(len(reply.data) for reply in stub.Read(pb.ReadRequest(extent=extent))) == 32 << 20
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def certified(folder: Path, name: str, signed_by: trustme.CA) -> list[str]:
    """Options for a node with a certificate in a folder, beside the `ca.pem` that it trusts."""
    issued = signed_by.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    files = {"--tls-key": f"{name}.key", "--tls-cert": f"{name}.pem", "--tls-ca": "ca.pem"}
    return [word for option, file in files.items() for word in (option, str(folder / file))]


def test_nodes_authenticate_by_certificates(tmp_path: Path) -> None:
    data = tmp_path / "data"
    contents = data_in(data)
    ca, strangers = authority(tmp_path), trustme.CA()
    other, address = start(tmp_path / "other", data, tls=certified(tmp_path, "other", ca))
    node, _ = start(tmp_path / "node", data, "--peer", address, tls=certified(tmp_path, "node", ca))
    strange_ones = certified(tmp_path, "stranger", strangers)
    stranger, _ = start(tmp_path / "stranger", data, "--peer", address, tls=strange_ones)
    with other, node, stranger:
        fill(other, data)
        listening(address)
        _, here = fill(node, data)
        _, strange = fill(stranger, data)
    assert (here.peer_bytes, here.source_bytes) == (len(contents), 0)
    assert (strange.peer_bytes, strange.source_bytes) == (0, len(contents))


def authority(folder: Path) -> trustme.CA:
    """Replace the trusted authority by another one."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return ca


def test_a_serving_node_uses_renewed_certificates(tmp_path: Path) -> None:
    data = tmp_path / "data"
    contents = data_in(data)
    other, address = start(tmp_path / "other", data, tls=certified(tmp_path, "other", authority(tmp_path)))
    with other:
        fill(other, data)
        listening(address)
        later = authority(tmp_path)
        certified(tmp_path, "other", later)
        node, _ = start(tmp_path / "node", data, "--peer", address, tls=certified(tmp_path, "node", later))
        with node:
            _, here = fill(node, data)
    assert (here.peer_bytes, here.source_bytes) == (len(contents), 0)


def test_a_reading_node_uses_renewed_certificates(tmp_path: Path) -> None:
    files = Tls(str(tmp_path / "node.pem"), str(tmp_path / "node.key"), str(tmp_path / "ca.pem"))
    honest = Liar(lambda: iter([pb.ReadReply(data=GOOD, digests=digests_of(GOOD), size_bytes=len(GOOD))]))
    certified(tmp_path, "node", authority(tmp_path))
    with ExitStack() as stack:
        (port,), target = free_ports(1), stack.enter_context(memory(len(GOOD)))
        peers = PeerClient([f"127.0.0.1:{port}"], files)
        certified(tmp_path, "node", authority(tmp_path))
        stack.enter_context(serving(honest, port, server_credentials(files)))
        assert peers.fill(ExtentId(bytes(16)), len(GOOD), target) == digests_of(GOOD)


def test_old_certificates_are_used_while_the_new_ones_do_not_match(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    certified(tmp_path, "node", ca)
    key, certificate = tmp_path / "node.key", tmp_path / "node.pem"
    found = Certificates(Tls(str(certificate), str(key), str(tmp_path / "ca.pem")))
    renewed = ca.issue_cert("127.0.0.1")
    renewed.private_key_pem.write_to_path(str(key))
    assert not found.renewed(), "the certificate is not there yet"
    certificate.unlink()
    assert not found.renewed()
    renewed.cert_chain_pems[0].write_to_path(str(certificate))
    assert found.renewed()
    assert not found.renewed()


def cmdline(pid: int) -> bytes:
    """The command line of a process, empty for one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def sharer_of(daemon: Daemon) -> int:
    """The process id of the sharer."""
    assert daemon.process is not None
    pid = daemon.process.pid
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            children += map(int, (thread / "children").read_text().split())
    (found,) = [each for each in children if b"sharer" in cmdline(each)]
    return found


def listens(pid: int, address: str) -> bool:
    """Tell whether this process listens; a predecessor may still be ending."""
    ports = [each.laddr.port for each in psutil.Process(pid).net_connections() if each.status == "LISTEN"]
    return int(address.rpartition(":")[2]) in ports


def wait_for_another(daemon: Daemon, than: int) -> None:
    """Wait until another process serves peers."""

    def replaced() -> bool:
        with suppress(ValueError):  # no sharer at the moment
            return sharer_of(daemon) != than
        return False

    wait_until(replaced)


def test_the_sharer_has_no_credentials_keeps_no_descriptors_and_is_replaced(
    tmp_path: Path, sharing: tuple[Daemon, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (other, address), data = sharing, tmp_path / "data"
    contents = data_in(data)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not apply to peers
    node, _ = start(tmp_path / "node", data, "--peer", address)
    with node:
        fill(other, data)
        first = sharer_of(other)
        assert b"hush-hush" not in Path(f"/proc/{first}/environ").read_bytes()
        files = len(os.listdir(f"/proc/{first}/fd"))
        dataset, here = fill(node, data)
        assert here.peer_bytes == len(contents)
        wait_until(lambda: len(os.listdir(f"/proc/{first}/fd")) <= files + 1)  # only the connection is left
        os.kill(first, signal.SIGKILL)
        wait_for_another(other, first)
        listening(address)
        with Control(node.socket_dir) as control:
            control.evict(dataset)
            again = list(control.prefetch(dataset))[-1]
    assert again.resident_extents == EXTENTS
    assert again.peer_bytes + again.source_bytes == 2 * len(contents)


@pytest.mark.parametrize(
    ("extent", "code"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (b"x" * 15, grpc.StatusCode.INVALID_ARGUMENT),
        (b"x" * 1_000_000, grpc.StatusCode.INVALID_ARGUMENT),
        (b"x" * 16, grpc.StatusCode.NOT_FOUND),
    ],
)
def test_an_invalid_extent_id_is_a_typed_error(
    sharing: tuple[Daemon, str], extent: bytes, code: grpc.StatusCode
) -> None:
    with grpc.insecure_channel(sharing[1]) as channel, pytest.raises(grpc.RpcError) as refused:
        list(services.Stub(channel, "Peers").Read(pb.ReadRequest(extent=extent), timeout=20))
    assert refused.value.code() is code


class Liar:
    """A peer whose answers the test gives."""

    def __init__(self, replies: Callable[[], Iterator[pb.ReadReply]]) -> None:
        self._replies = replies
        self.asked = 0

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Iterator[pb.ReadReply]:
        self.asked += 1
        return self._replies()


@contextmanager
def serving(servicer: Liar, port: int = 0, tls: grpc.ServerCredentials | None = None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    services.add_to_server(server, "Peers", servicer)
    address = f"127.0.0.1:{port}"
    port = server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def digests_of(contents: bytes) -> bytes:
    passing = StreamedChecksums(len(contents))
    passing.add(0, memoryview(contents))
    with memory(len(contents)) as fd:
        os.pwrite(fd, contents, 0)
        return passing.checksums(fd).digests


@contextmanager
def memory(size_bytes: int) -> Iterator[int]:
    fd = os.memfd_create("target")
    os.ftruncate(fd, size_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


GOOD = np.random.default_rng(2).bytes(200_000)
LIES = {
    "another byte": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), digests_of(GOOD)),
    "too short": (GOOD[:-1], digests_of(GOOD)),
    "too long": (GOOD + b"x", digests_of(GOOD)),
    "nothing": (b"", digests_of(GOOD)),
    "no checksums": (GOOD, b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_data_is_rejected_and_its_peer_paused(lie: str) -> None:
    data, digests = LIES[lie]
    liar = Liar(lambda: iter([pb.ReadReply(data=data, digests=digests, size_bytes=len(GOOD))]))
    with serving(liar) as address, memory(len(GOOD)) as target:
        peers = PeerClient([address])
        assert peers.fill(ExtentId(bytes(16)), len(GOOD), target) is None
        assert peers.fill(ExtentId(bytes(16)), len(GOOD), target) is None
    assert liar.asked == 1


def test_the_next_peer_is_asked_after_wrong_data() -> None:
    honest = Liar(lambda: iter([pb.ReadReply(data=GOOD, digests=digests_of(GOOD), size_bytes=len(GOOD))]))
    liar = Liar(lambda: iter([pb.ReadReply(data=bytes(len(GOOD)), digests=digests_of(GOOD))]))
    with serving(honest) as first, serving(liar) as second, memory(len(GOOD)) as target:
        peers = PeerClient([first, second])
        for number in range(8):
            assert peers.fill(ExtentId(number.to_bytes(16, "big")), len(GOOD), target) == digests_of(GOOD)
            assert os.pread(target, len(GOOD), 0) == GOOD
    assert liar.asked == 1
    assert honest.asked == 8


def test_pauses_of_a_silent_peer_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.daemon.fills.peer_client.FIRST_S", 0.1)
    now_s = 0.0
    monkeypatch.setattr("cachesvc.daemon.fills.peer_client.time", SimpleNamespace(monotonic=lambda: now_s))
    extent, found = ExtentId(bytes(16)), []
    with socket.create_server(("127.0.0.1", 0)) as silent, memory(len(GOOD)) as target:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peers = PeerClient([address])
        for _ in range(7):
            assert peers.fill(extent, len(GOOD), target) is None
            assert peers._ranked(extent) == []
            found.append(peers._paused_until[address] - now_s)
            now_s = peers._paused_until[address]
            assert peers._ranked(extent) == [address]
    assert found == [1, 2, 4, 8, 16, 30, 30]


def test_a_peer_that_was_silent_once_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachesvc.daemon.fills.peer_client.SHORT_PAUSE_S", 0.1)
    answers = iter([False, True, False, True])

    def replies() -> Iterator[pb.ReadReply]:
        if not next(answers):
            raise OSError("a fault of its own")
        return iter([pb.ReadReply(data=GOOD, digests=digests_of(GOOD), size_bytes=len(GOOD))])

    with serving(Liar(replies)) as address, memory(len(GOOD)) as target:
        peers = PeerClient([address])
        for _ in range(2):
            assert peers.fill(ExtentId(bytes(16)), len(GOOD), target) is None
            wait_until(lambda: peers._ranked(ExtentId(bytes(16))) == [address])
            assert peers.fill(ExtentId(bytes(16)), len(GOOD), target) == digests_of(GOOD)
            assert not peers._last_pause_s


def test_all_nodes_ask_the_same_peers_in_the_same_order() -> None:
    addresses = [f"10.0.0.{number}:7000" for number in range(16)]
    one, other = PeerClient(addresses), PeerClient(addresses[::-1])
    asked = [one._ranked(ExtentId(number.to_bytes(16, "big"))) for number in range(4096)]
    assert asked == [other._ranked(ExtentId(number.to_bytes(16, "big"))) for number in range(4096)]
    firsts = np.unique([each[0] for each in asked], return_counts=True)[1]
    assert len(firsts) == len(addresses)
    # 4,096 throws into 16: 256 each, and five standard deviations of a binomial are 78.
    assert np.abs(firsts - 256).max() < 78


def test_a_takeover_and_a_restart_go_on_sharing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    contents = data_in(data)
    other, address = start(tmp_path / "other", data)
    node, _ = start(tmp_path / "node", data, "--peer", address)
    with other, node:
        fill(other, data)
        first = sharer_of(other)
        other.take_over().wait(WAIT_S)
        wait_for_another(other, first)
        wait_until(lambda: listens(sharer_of(other), address))
        _, here = fill(node, data)
        other.kill()
        other.start()  # at once, while the killed one's sharer may still have the address
        listening(address)
    assert (here.peer_bytes, here.source_bytes) == (len(contents), 0)


def test_an_address_in_use_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = Daemon(tmp_path / "node", ["--ram", "64MiB", "--share", address])
        with pytest.raises(RuntimeError, match="cannot be bound"):
            stack.enter_context(daemon)


def test_a_peer_on_another_machine_needs_certificates(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "node", ["--ram", "64MiB", "--peer", "10.1.2.3:7000"])
    with (
        ExitStack() as stack,
        pytest.raises(RuntimeError, match="another machine, and its bytes are trusted"),
    ):
        stack.enter_context(daemon)
    (tmp_path / "no.pem").write_text("none")
    unusable = ["--tls-cert", "no.pem", "--tls-key", "no.pem", "--tls-ca", "no.pem"]
    words = [str(tmp_path / word) if word == "no.pem" else word for word in unusable]
    daemon = Daemon(tmp_path / "node", ["--ram", "64MiB", "--peer", "127.0.0.1:7000", *words])
    with ExitStack() as stack, pytest.raises(RuntimeError, match="is not what TLS needs"):
        stack.enter_context(daemon)
    with pytest.raises(InvalidInput, match="nowhere"):
        PeerClient(["10.1.2.3:7000"], Tls("nowhere.pem", "nowhere.key", "nowhere.ca"))
