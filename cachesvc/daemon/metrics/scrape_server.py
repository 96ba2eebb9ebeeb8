"""Serves the metrics, the probes and the status page over HTTP."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import MetricsHandler

from cachesvc.core.errors import NotReady
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.page.page import Answer, Page

log = logging.getLogger(__name__)
TIMEOUT_S = 5.0
"""The timeout of one receive and of sending the answer. An idle connection is closed then, and its thread ends."""


class ScrapeServer(ThreadingHTTPServer):
    """Answers each connection on a thread of its own, until the process ends."""

    daemon_threads = True

    def __init__(self, address: str, page: Page, health: Health) -> None:
        """`address`: HOST:PORT. Raises NotReady when it cannot be bound."""
        self.page = page
        self.probes = {"/livez": health.alive, "/readyz": health.ready}
        host, _, port = address.rpartition(":")
        try:
            self.address_family, _, _, _, where = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            super().__init__((str(where[0]), int(port)), _Scrape)
        except OSError as error:
            raise NotReady(
                f"--metrics {address} cannot be bound ({error.strerror}); choose an address that is free"
            ) from None
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what broke a connection: a scraper that disconnects at debug level, anything else as an error."""
        error = sys.exc_info()[1]
        log.log(logging.DEBUG if isinstance(error, OSError) else logging.ERROR, "a scrape failed: %s", error)


class _Scrape(MetricsHandler):
    server: ScrapeServer
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        path, host = self.path.partition("?")[0], self.headers.get("Host", "")
        if (probe := self.server.probes.get(path)) is not None:
            why = probe()
            status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
            self._send(Answer(status, "text/plain; charset=utf-8", f"{why or 'ok'}\n".encode()))
            return
        answer = self.server.page.answer(path, host, str(self.client_address[0]))
        if answer is not None:
            self._send(answer)
        elif path.rstrip("/") == "/metrics":
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics, the status page is at /")

    do_HEAD = do_GET
    """Of the page only the head is sent."""

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


ANSWER_S = 4.0
"""A loop that takes longer to answer is no longer alive. Probes give up after seconds, too."""


class Health:
    """`waits`: a cluster's first list of members is waited for. Safe from any thread."""

    def __init__(self, loop: Loop, waits: Callable[[], bool], answer_s: float = ANSWER_S) -> None:
        """Made when the tiers are open and what they hold is known."""
        self._loop, self._waits, self._answer_s = loop, waits, answer_s
        self._leaving = False

    def leave(self) -> None:
        """Note that this daemon ends, and takes no new readers."""
        self._leaving = True

    def alive(self) -> str:
        """Return why the daemon should be started again; "" while its event loop answers."""
        answered = threading.Event()
        self._loop.post(answered.set)
        return (
            ""
            if answered.wait(self._answer_s)
            else f"the event loop has not answered for {self._answer_s:.0f} s"
        )

    def ready(self) -> str:
        """Return why this node cannot serve its own readers; "" if it can."""
        if self._leaving or self._loop.ended:
            return "this daemon is stopping"
        if self._waits():
            return "waiting for the first list of members"
        return self.alive()
