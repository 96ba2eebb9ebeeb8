"""Mutual TLS of sockets between nodes, from the same files as the TLS of gRPC (`tls.py`)."""

from __future__ import annotations

import logging
import socket
import ssl
import threading

from cachesvc.config import Tls
from cachesvc.daemon.access.tls import Certificates

log = logging.getLogger(__name__)


class TlsContexts:
    """The contexts of both sides, made again when the files change. Safe from any thread."""

    def __init__(self, tls: Tls, name: str = "") -> None:
        """`name`: the name in the certificates of all nodes, "" where each node has one for its own host. Raises
        InvalidInput for files that cannot be used."""
        self._tls = tls
        self._name = name
        self._certificates = Certificates(tls)
        self._lock = threading.Lock()
        self._contexts = self._load()
        self.generation = 0
        """A number that changes with the certificates."""

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the server's side of a connection; the handshake is still to be made. It requires a certificate of the
        client that our authority signed."""
        server, _ = self._current()
        return server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connect(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Make the handshake of a client, and verify that the certificate is for the common name, else for `host`. Raises
        OSError."""
        _, client = self._current()
        return client.wrap_socket(connection, server_hostname=self._name or host)

    def renew(self) -> int:
        """Read the files again when they changed; return the generation."""
        self._current()
        return self.generation

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            if self._certificates.renewed():
                try:
                    self._contexts = self._load()
                    self.generation += 1
                except OSError as error:  # changed once more; the next change of the files is read again
                    log.warning("certificates are not renewed", extra={"error": str(error)})
            return self._contexts

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)  # checks the host's name by default
        return server, client

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._tls.certificate, self._tls.key, password="")
        context.load_verify_locations(self._tls.ca)
        return context
