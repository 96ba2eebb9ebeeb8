"""Serves the metrics to scrapers: so many connections, each for so long, and whoever dawdles gives way to a newcomer."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import MetricsHandler

from cachesvc.core.errors import InvalidInput

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 64
"""Each has a thread. One that has not said what it wants is closed when the next one comes and finds them all taken: a
scraper asks as soon as it is connected."""
TIMEOUT_S = 5.0
"""How long one receive, or the sending of the answer, may take."""


class Scrapes(ThreadingHTTPServer):
    """Answers from a thread of its own until the process ends."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT. Raises InvalidInput when it cannot be bound."""
        host, _, port = address.rpartition(":")
        self._lock = threading.Lock()
        self._connections = 0
        self._dawdling: dict[Any, None] = {}
        try:
            self.address_family, _, _, _, where = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            super().__init__((str(where[0]), int(port)), _Scrape)
        except OSError as error:
            raise InvalidInput(
                f"--metrics {address} cannot be bound ({error.strerror}); choose an address that is free"
            ) from None
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection; False, and it is closed, where nobody dawdles."""
        with self._lock:
            self._connections += 1
            if self._connections > MAX_CONNECTIONS:
                oldest = next(iter(self._dawdling), None)
                if oldest is None:
                    return False
                del self._dawdling[oldest]
                with suppress(OSError):  # its peer has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes, and ends
            self._dawdling[request] = None
            return True

    def asked(self, request: Any) -> None:
        """A connection said what it wants: from here on it keeps its place."""
        with self._lock:
            self._dawdling.pop(request, None)

    def close_request(self, request: Any) -> None:
        """Close a connection, answered or not."""
        with self._lock:
            self._dawdling.pop(request, None)
            self._connections -= 1
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that breaks off is nobody's trouble."""
        error = sys.exc_info()[1]
        log.log(logging.DEBUG if isinstance(error, OSError) else logging.ERROR, "a scrape failed: %s", error)


class _Scrape(MetricsHandler):
    timeout = TIMEOUT_S
    server: Scrapes

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        if self.path.partition("?")[0].rstrip("/") in ("", "/metrics"):
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
