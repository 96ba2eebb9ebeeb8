"""Mutual TLS, of the API's TCP port and between nodes. Certificates are renewed while a daemon runs: whoever puts
others in their files' place need not start it again."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


class Certificates:
    """What lies in the three files, read again when one was replaced. For many threads."""

    def __init__(self, tls: Tls) -> None:
        """Raises as `read_tls`."""
        self._tls = tls
        self._seen = _marks(tls)
        self._found = read_tls(tls)
        self._lock = threading.Lock()

    def renewed(self) -> bool:
        """Whether there are others since the last call. While they cannot be used, since one of them is not there yet
        perhaps, those of before are."""
        with self._lock:
            seen, self._seen = self._seen, _marks(self._tls)
            if seen == self._seen:
                return False
            try:
                found = read_tls(self._tls)
            except InvalidInput as error:
                log.warning("certificates are not renewed", extra={"error": str(error)})
                return False
            before, self._found = self._found, found
            return before != found

    def client(self) -> grpc.ChannelCredentials:
        """They show our certificate, and demand one of the host that is called."""
        import grpc

        key, certificate, ca = self._found
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def server(self) -> grpc.ServerCertificateConfiguration:
        """Ours, and who may sign the clients'."""
        import grpc

        key, certificate, ca = self._found
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """They demand a client certificate, and are looked for anew at each connection. Raises as `read_tls`."""
    import grpc

    found = Certificates(tls)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return found.server() if found.renewed() else None

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)  # None is for no change
    return grpc.dynamic_ssl_server_credentials(found.server(), fetch, require_client_authentication=True)


def _marks(tls: Tls) -> list[tuple[int, ...]]:
    """What changes when a file is replaced or written to; nothing of one that is not there."""
    return [_mark(name) for name in (tls.key, tls.certificate, tls.ca)]


def _mark(name: str) -> tuple[int, ...]:
    try:
        found = os.stat(name)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_tls(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and the certificates that sign the others'. Raises InvalidInput for files that cannot be used."""
    try:
        key, certificate, ca = (Path(name).read_bytes() for name in (tls.key, tls.certificate, tls.ca))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key, password="")  # else it would ask for one
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        reason = error.reason or "no PEM"
        raise InvalidInput(
            f"{tls.certificate}, {tls.key} or {tls.ca} is not what TLS needs ({reason})"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{error.filename} cannot be read ({error.strerror})") from None
    return key, certificate, ca
