"""Idle connections to the control API are closed."""

from __future__ import annotations

import socket
import tempfile
import threading
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cachesvc.daemon.control.server import connection_limits
from testbed import WAIT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and empty settings


def test_a_connection_without_calls_is_closed_and_the_next_call_connects_again() -> None:
    """Uses the daemon's own options with shorter timeouts."""
    options = [(name, min(value, 300)) for name, value in connection_limits(300)]
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=options)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            gone = threading.Semaphore(0)

            def changed(state: grpc.ChannelConnectivity) -> None:
                if state is grpc.ChannelConnectivity.IDLE:
                    gone.release()

            channel.subscribe(changed)
            gone.acquire()  # the initial state
            for _ in range(2):
                ask(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert gone.acquire(timeout=WAIT_S)
            ask(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            for sent in (b"", PREFACE):
                with socket.socket(socket.AF_UNIX) as idle:
                    idle.settimeout(WAIT_S)
                    idle.connect(f"{folder}/s")
                    idle.sendall(sent)
                    while idle.recv(4096):
                        pass  # gRPC's settings, then the end
        server.stop(None)
