"""Calls of the control API that a daemon ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cachesvc.client.control import Control
from cachesvc.config import control_address
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1.services import add_to_server


class Stopping:
    """A service that ends the first calls as a stopping gRPC server does, and answers the rest."""

    def __init__(self, ended: int) -> None:
        self.ended = ended

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        if self.ended:
            self.ended -= 1
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return pb.StatusReply(pid=7)


@pytest.mark.parametrize("ended", [1, 2])
def test_a_call_that_a_stopping_server_ends_is_made_once_again(tmp_path: Path, ended: int) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    add_to_server(server, "Cache", Stopping(ended))
    server.add_insecure_port(control_address(str(tmp_path)))
    server.start()
    try:
        with Control(str(tmp_path)) as control:
            if ended == 1:
                assert control.status().pid == 7
            else:
                with pytest.raises(DaemonUnavailable, match="broke the connection"):
                    control.status()
    finally:
        server.stop(None).wait()
