"""A connection to the daemon's grants socket, on which a test sends single messages."""

from __future__ import annotations

import socket

from cachesvc.core import wire
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from testbed import WAIT_S
from testbed.node import Daemon


def connected(daemon: Daemon) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    channel.connect(f"{daemon.socket_dir}/grants.sock")
    return channel


def greeted(daemon: Daemon, dataset: DatasetId | None, job: int = 0) -> socket.socket:
    """Connect as a reader of a dataset, or, where it is None, as a caller who reads none."""
    channel, digest = connected(daemon), bytes.fromhex(dataset or "")
    tell(channel, Message(Op.HELLO if dataset else Op.IDENTIFY, wire.MAGIC, job, digest=digest or bytes(16)))
    assert wire.decode(channel.recv(wire.MAX_MESSAGE_BYTES)).op is Op.WELCOME
    return channel


def tell(channel: socket.socket, message: Message) -> None:
    channel.send(wire.encode(*message))
