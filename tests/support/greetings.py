"""A connection to the daemon's grants socket, on which a test sends single messages."""

from __future__ import annotations

import socket

from cachesvc.core import wire
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from testbed import WAIT_S
from testbed.node import Daemon


def greeted(daemon: Daemon, dataset: DatasetId, job: int = 0) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    channel.connect(f"{daemon.socket_dir}/grants.sock")
    tell(channel, Message(Op.HELLO, wire.MAGIC, job, digest=bytes.fromhex(dataset)))
    assert wire.decode(channel.recv(4096)).op is Op.WELCOME
    return channel


def tell(channel: socket.socket, message: Message) -> None:
    channel.send(wire.encode(*message))
