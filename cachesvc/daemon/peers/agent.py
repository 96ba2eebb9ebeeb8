"""The peer agent, a process that speaks with the other nodes of the cluster: `python -m cachesvc.daemon.peers.agent FD`.

It watches the membership, and answers where the extents of this node are. It asks other owners for the daemon, tells them
what this node holds, and sends extents from descriptors that the daemon lends it. It faces the network, so it has no
credentials. It ends when its channel to the daemon closes.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from cachesvc.config import ClusterSettings, Tls
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, Answer
from cachesvc.core.placement.roster import PROTOCOL_VERSION, Greeting, Roster
from cachesvc.core.placement.traits import ClusterWarning, Traits, certificates, differences, sources
from cachesvc.core.placement.view import View
from cachesvc.daemon.access.tls import Certificates, server_credentials
from cachesvc.daemon.blocks.client import BlockClient
from cachesvc.daemon.blocks.server import HANDSHAKE_S, BlockServer
from cachesvc.daemon.blocks.wire import host_and_port
from cachesvc.daemon.peers import messages
from cachesvc.daemon.peers.announcements import Announcements
from cachesvc.daemon.peers.block_ports import BlockPorts
from cachesvc.daemon.peers.daemon_channel import DaemonChannel
from cachesvc.daemon.peers.leaving import Leaving
from cachesvc.daemon.peers.locator import Locator
from cachesvc.daemon.peers.members import Members
from cachesvc.daemon.peers.owned_extents import OwnedExtents, Question
from cachesvc.daemon.peers.peer_calls import KEEPALIVE_S, PeerCalls
from cachesvc.daemon.peers.relays import RELAYED, OwnDaemon
from cachesvc.daemon.peers.servicer import PeersServicer
from cachesvc.daemon.ports import next_port
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.threads import ThreadPool, run_in_background
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services

log = logging.getLogger(__name__)
CALLS = 16
"""Calls of other nodes at a time, beside those that are relayed to the daemon."""
SURVEYS = 2
"""Surveys at a time; each prefetch that waits for other nodes makes one now and then."""
CONNECTIONS = 512
"""Connections at the port of calls, those without a finished TLS handshake among them. A member has one or two."""
BIND_S = 0.2
"""The pause between tries to bind; a daemon that is taken over keeps the address until it ends."""
REPORT_S = 1.0
"""How often the daemon gets counters and members."""


class Agent:
    """Builds and wires the parts of the process."""

    def __init__(
        self,
        channel: socket.socket,
        cluster: ClusterSettings,
        weight_bytes: int,
        tls: Tls | None,
        traits: Traits,
        socket_dir: str,
    ) -> None:
        """`traits`: what of them does not change while this process runs. `socket_dir`: of the daemon's sockets."""
        self._cluster = cluster
        self._tls = tls
        me, instance = cluster.node_name, secrets.token_hex(8)
        self._greeting = Greeting(me, instance, PROTOCOL_VERSION, weight_bytes, cluster.zone)
        self._traits = traits
        self._state = messages.NodeChanged()
        self._certificates = Certificates(tls) if tls else None
        self._daemon = DaemonChannel(channel, self._on_message)
        self._calls = PeerCalls(tls, cluster.tls_name)
        self._ports = BlockPorts(BlockClient(tls, cluster.tls_name))
        roster = Roster(self._greeting, cluster.rejoin_grace_s, cluster.by_zone)
        hello = pb.HelloRequest(protocol=PROTOCOL_VERSION, name=me, instance=instance)
        self._members = Members(
            roster,
            self._calls,
            hello,
            self._view_changed,
            self._restarted,
            self._listed,
            greeted=self._ports.check,
            own=self._own_traits,
            list_wait_s=cluster.wait_s,
        )
        self._owned = OwnedExtents(me, self._daemon.keep)
        self._locator = Locator(me, self._members, self._owned, self._calls)
        self._announcements = Announcements(me, self._members, self._owned, self._calls)
        self._leaving = Leaving(me, self._members, self._owned, self._calls, self._daemon)
        self._surveys = ThreadPool(SURVEYS, "survey")
        self._sent_bytes = 0
        self._sent_lock = threading.Lock()
        self._warned = False
        self._blocks = BlockServer(
            self._daemon.lent, tls, float(cluster.bytes_per_s or math.inf), self._on_sent
        )
        self._servicer = PeersServicer(
            self._owned,
            self._hello,
            self._wrong,
            self._members.heard,
            self._members.left,
            self._members.forget,
            self._announcements.held,
            OwnDaemon(socket_dir).answer,
            self._leaving.take,
        )

    def run(self) -> None:
        """Run until the daemon ends."""
        threading.Thread(target=self._daemon.listen, name="daemon", daemon=True).start()
        address = self._cluster.advertise
        self._blocks.listen(next_port(address))
        threading.Thread(target=self._send_blocks, name="blocks", daemon=True).start()
        self._server = serve_calls(self._servicer, address, self._tls)
        registration = Registration(self._cluster.node_name, address, self._cluster.zone)
        self._members.start(open_membership(self._cluster.members, registration, self._tls))
        self._announcements.start()
        told = messages.ClusterReport()
        while True:
            report = self._report()
            if report != told:
                self._daemon.send(messages.ClusterState(report))
                told = report
            time.sleep(REPORT_S)

    def _send_blocks(self) -> None:
        run_in_background()  # this thread, and those of the connections; calls are answered at normal priority
        self._blocks.serve()

    def _hello(self) -> pb.HelloReply:
        me, own = self._greeting, self._own_traits()
        return pb.HelloReply(
            protocol=me.version,
            name=me.name,
            instance=me.instance,
            weight_bytes=self._members.view.weight_of(me.name),
            zone=me.zone,
            **{name: getattr(own, name) for name in Traits.__slots__},
        )

    def _own_traits(self) -> Traits:
        return replace(
            self._traits,
            extents=self._announcements.extents,
            source=self._ports.source(*self._state.requests),
            free_bytes=self._state.free_bytes,
            allow=self._state.allow,
            certificate_ends=self._certificates.end() if self._certificates else 0,
        )

    def _on_message(self, message: messages.ToAgent) -> None:
        if isinstance(message, messages.LocateExtent):
            self._locate(message)
        elif isinstance(message, messages.SurveyExtents):
            self._surveys.submit(self._survey, message)
        elif isinstance(message, messages.ResidencyChanged):
            self._announcements.changed(message.filled, message.dropped, message.progressing, message.anew)
        elif isinstance(message, messages.PlaceJudged):
            self._ports.judge(message.verdict)
        elif isinstance(message, messages.WrongCopy):
            self._announcements.wrong(message)
        elif isinstance(message, messages.NodeChanged):
            self._state = message
        elif isinstance(message, messages.Leave):
            self._members.leave(message.for_good)
            os._exit(0)
        elif isinstance(message, messages.Withdraw):
            self._surveys.submit(self._leaving.withdraw, message.weight_bytes)
        elif isinstance(message, messages.HandOn):
            self._surveys.submit(self._leaving.hand_on, message)
        elif isinstance(message, messages.ForgetNode):
            self._surveys.submit(self._forget, message)
        elif isinstance(message, messages.FindHolders):
            self._surveys.submit(self._find_holders, message)

    def _locate(self, wanted: messages.LocateExtent) -> None:
        extent, left_out = wanted.extent, self._ports.left_out()

        def done(answer: Answer) -> None:
            node = answer.node
            if not self._ports.begin(node) and node not in (SOURCE, *left_out):
                self._locate(wanted)  # it was left out meanwhile, or another fill is its probe
                return
            # An owner of a former release does not know what is left out.
            address = "" if node in left_out else self._members.address_of(node)
            self._announcements.leased(extent, answer.generation)
            self._owned.located(extent, node)
            found = messages.ExtentLocated(wanted.number)
            if address:
                compare = self._ports.suspected(node)
                found = messages.ExtentLocated(
                    wanted.number, node, next_port(address), answer.filling, compare
                )
            self._daemon.send(found)

        self._locator.locate(Question(extent, wanted.failed, wanted.late, left_out), done)

    def _survey(self, message: messages.SurveyExtents) -> None:
        self._members.wait_settled()
        held, coming = self._locator.survey(message.extents)
        self._daemon.send(messages.ExtentsSurveyed(message.number, frozenset(held), frozenset(coming)))

    def _find_holders(self, message: messages.FindHolders) -> None:
        self._members.wait_settled()
        held, failed = self._members.ask_present(lambda address: self._calls.held(address, message.extents))
        self._daemon.send(messages.HoldersFound(message.number, held, failed))

    def _forget(self, message: messages.ForgetNode) -> None:
        try:
            untold, listed = self._members.forget_everywhere(message.name)
        except CacheError as error:
            answer = messages.NodeForgotten(message.number, error.code, str(error))
        else:
            answer = messages.NodeForgotten(message.number, untold=untold, listed=listed)
        self._daemon.send(answer)

    def _view_changed(self, view: View) -> None:
        self._owned.view_changed(view)
        self._ports.forget({member.name for member in view.members})
        self._announcements.view_changed(view)
        self._daemon.send(messages.ClusterState(self._report()))

    def _restarted(self, node: str) -> None:
        self._ports.restarted(node)
        self._announcements.tell_all([node])

    def _listed(self, addresses: set[str]) -> None:
        advertised = self._cluster.advertise
        if not self._warned and (other := hidden_from(advertised, addresses)):
            self._warned = True
            log.warning(
                "this node's address is loopback, and other machines cannot reach it; give --advertise",
                extra={"advertise": advertised, "member": other},
            )

    def _on_sent(self, size_bytes: int) -> None:
        with self._sent_lock:  # each connection has a thread
            self._sent_bytes += size_bytes

    def _wrong(self, node: str, extents: list[ExtentId], differs: bool) -> None:
        for extent in extents:
            self._daemon.send(messages.WrongCopy(extent, node, differs))

    def _report(self) -> messages.ClusterReport:
        view, rows = self._members.view, self._members.rows()
        return messages.ClusterReport(
            me=view.me,
            settled=self._members.settled,
            by_zone=view.by_zone,
            members=view.members,
            away=view.away,
            rows=tuple(self._with_health(row) for row in rows),
            warnings=self._warnings(rows),
            list_read=self._members.list_read,
            sent_bytes=self._sent_bytes,
            refused=self._blocks.refused,
            lookups=self._owned.lookups,
            redirects=self._owned.redirects,
        )

    def _with_health(self, row: messages.NodeRow) -> messages.NodeRow:
        """Return a row with what is known of the way to the member's extents; of this node's, with that to its source."""
        if row.state != "present":
            return row
        me = row.name == self._greeting.name
        state, record = self._ports.of(SOURCE if me else row.name)
        return replace(
            row,
            state="present" if state == "works" else state,
            why=row.why if state == "works" else f"its source: {record.why}" if me else record.why,
            block_round_trip_us=int(record.round_trip_s * 1e6),
            bytes_per_s=0 if me else int(record.bytes_per_s),
        )

    def _warnings(self, rows: Sequence[messages.NodeRow]) -> tuple[ClusterWarning, ...]:
        present = [row for row in rows if row.state == "present"]
        traits = {row.name: row.traits for row in present}
        found = differences(self._greeting.name, traits, {row.name: row.zone for row in present})
        found += certificates(traits, time.time()) + sources(traits)
        if trouble := self._members.trouble:
            state = "the last one holds" if self._members.list_read else "this node is alone"
            found.append(
                ClusterWarning("list", "", f"the list of members cannot be read, and {state}: {trouble}")
            )
        return tuple(found)


def serve_calls(
    servicer: PeersServicer, address: str, tls: Tls | None, connections: int = CONNECTIONS
) -> grpc.Server:
    """Serve the calls of other nodes at `address`, HOST:PORT, as soon as it is free; return the server."""
    server = grpc.server(
        ThreadPool(CALLS + RELAYED, "peer"),
        options=[
            ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
            ("grpc.max_allowed_incoming_connections", connections),
        ],
        maximum_concurrent_rpcs=8 * CALLS,
    )
    services.add_to_server(server, "Peers", servicer)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    logged = False
    while True:
        try:
            if tls is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, server_credentials(tls))
            break
        except RuntimeError:
            if not logged:
                log.warning("an address for peers cannot be bound yet", extra={"advertise": address})
            logged = True
            time.sleep(BIND_S)
    server.start()
    return server


def hidden_from(address: str, others: Iterable[str]) -> str:
    """Return one of the addresses `others` that is on another machine, where `address` resolves to loopback, as the name of
    a host does that its own hosts file maps there; else "". Addresses are HOST:PORT. Blocks for name services."""
    if not _is_loopback(address):
        return ""
    return next((other for other in others if not _is_loopback(other)), "")


def _is_loopback(address: str) -> bool:
    """Return whether an address resolves to loopback. One that cannot be resolved counts as that: nothing is known."""
    host, port = host_and_port(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


class Given(msgspec.Struct, frozen=True):
    """The start arguments of the process."""

    cluster: ClusterSettings
    weight_bytes: int
    tls: Tls | None
    log_format: str
    log: str
    traits: Traits
    socket_dir: str


def main() -> None:
    """Run the process until the daemon ends."""
    given = msgspec.json.decode(os.environ.pop("CACHESVC_GIVEN"), type=Given)
    configure_logging(given.log_format, given.log)
    channel = socket.socket(fileno=int(sys.argv[1]))
    Agent(channel, given.cluster, given.weight_bytes, given.tls, given.traits, given.socket_dir).run()


if __name__ == "__main__":
    main()
