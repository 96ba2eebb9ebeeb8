"""Mutual TLS for the API's TCP port and between nodes. A running daemon uses new certificates once their files are
replaced, and warns before that of this node ends: 30, 7 and 1 day before, and once it has ended.

Python's ssl module tells the validity of the other side's certificate alone, and `cryptography` is 15 MB for one date. So
this walks the few fields of X.509 before it (RFC 5280, section 4.1): certificate, its contents, version, serial number,
signature, issuer, validity.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    import grpc
import re
import time
from calendar import timegm
from time import strptime

from cachesvc.core.placement.traits import certificate_stage

log = logging.getLogger(__name__)


class Certificates:
    """The contents of the three files, read again when one of them changes. Safe from any thread."""

    def __init__(self, tls: Tls) -> None:
        """Raises as `read_tls`."""
        self._tls = tls
        self._seen = _marks(tls)
        self._found = read_tls(tls)
        self._ends = certificate_end(tls.certificate)
        self._lock = threading.Lock()

    def renewed(self) -> bool:
        """Tell whether the certificates changed since the last call. Files that cannot be used, perhaps because one of
        them is not written yet, leave the last certificates in use."""
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
            with suppress(OSError, InvalidInput):  # the file changes again
                self._ends = certificate_end(self._tls.certificate)
            return before != found

    def end(self) -> int:
        """Return when the certificate ends, in seconds of Unix time."""
        self.renewed()
        return self._ends

    def client(self) -> grpc.ChannelCredentials:
        """Return credentials that show our certificate and verify the certificate of the called host."""
        import grpc

        key, certificate, ca = self._found
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def server(self) -> grpc.ServerCertificateConfiguration:
        """Return our certificate and the authority of the clients' certificates."""
        import grpc

        key, certificate, ca = self._found
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


class TlsContexts:
    """The contexts of sockets between nodes, for both sides, made again when the files change. Safe from any thread."""

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
        server = _context(self._tls, ssl.PROTOCOL_TLS_SERVER)
        client = _context(self._tls, ssl.PROTOCOL_TLS_CLIENT)  # checks the host's name by default
        return server, client


def _context(tls: Tls, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Without a password OpenSSL would prompt for one.
    context.load_cert_chain(tls.certificate, tls.key, password="")
    context.load_verify_locations(tls.ca)
    return context


_OF_THE_OTHER = {
    9: "its certificate is not valid yet; compare the clocks of both nodes",
    10: "its certificate has expired; renew it",
    62: "its certificate is for another name; compare --tls-name and --advertise",
    64: "its certificate is for another address; compare --tls-name and --advertise",
}
"""Meanings of OpenSSL's X509_V_ERR_* codes. The others mean that no trusted authority signed the certificate."""
_OF_THIS_NODE = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refuses this node's certificate, which has expired or is not valid yet there",
    "TLSV1_ALERT_UNKNOWN_CA": "it refuses this node's certificate, which is of another authority than its --tls-ca",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this node's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it refuses this node's certificate, whose signature does not match its --tls-ca",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it demands a certificate, and this node shows none",
}
"""Meanings of the alerts with which the other side ends a handshake."""


def certificate_trouble(error: OSError) -> str:
    """Return what is wrong with a certificate, of "it", the other side, or of "this node"; "" for another error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        foreign = "its certificate is of another authority than this node's --tls-ca"
        return _OF_THE_OTHER.get(error.verify_code, foreign)
    if not isinstance(error, ssl.SSLError):
        return ""
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    return _OF_THIS_NODE.get(error.reason or "", "")


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials that require a client certificate and are checked for renewal at each connection. Raises as
    `read_tls`."""
    import grpc

    found = Certificates(tls)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return found.server() if found.renewed() else None

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)  # None: no change
    return grpc.dynamic_ssl_server_credentials(found.server(), fetch, require_client_authentication=True)


def _marks(tls: Tls) -> list[tuple[int, ...]]:
    return [file_mark(name) for name in (tls.key, tls.certificate, tls.ca)]


def file_mark(name: str) -> tuple[int, ...]:
    """Return values that change when a file is replaced, also by way of a link to it, or written to."""
    try:
        found = os.stat(name)
    except OSError as error:
        return (error.errno or 0,)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_tls(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Return the key, the certificate and the authority's certificates, as PEM. Raises InvalidInput for files that cannot
    be used."""
    try:
        key, certificate, ca = (Path(name).read_bytes() for name in (tls.key, tls.certificate, tls.ca))
        _context(tls, ssl.PROTOCOL_TLS_SERVER)
    except ssl.SSLError as error:
        reason = error.reason or "no PEM"
        raise InvalidInput(
            f"{tls.certificate}, {tls.key} or {tls.ca} is not what TLS needs ({reason})"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{error.filename} cannot be read ({error.strerror})") from None
    return key, certificate, ca


LOOK_S = 60.0
"""How often the file is read: a certificate may be replaced at any time."""


class CertificateWatch:
    """Reads the file on a thread of its own, since a disk may hang. `ends`: the end in seconds of Unix time; 0 before the
    first look, and where the file cannot be read."""

    def __init__(self, tls: Tls, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = tls.certificate, now
        self._said: int | None = None
        self._closed = threading.Event()
        self.ends = 0

    def start(self) -> None:
        """Watch from now on, until `close`."""
        threading.Thread(target=self._run, name="certificate", daemon=True).start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def look(self) -> None:
        """Read the file, and log a warning where a stage has begun since the last look."""
        try:
            self.ends = certificate_end(self._path)
        except (OSError, InvalidInput) as error:
            self.ends = 0
            log.warning("the certificate cannot be read", extra={"error": str(error)})
            return
        stage = certificate_stage(self.ends, self._now())
        if stage is not None and stage != self._said:
            log.warning(certificate_text(self.ends, self._now()), extra={"certificate": self._path})
        self._said = stage

    def _run(self) -> None:
        self.look()
        while not self._closed.wait(LOOK_S):
            self.look()


def certificate_text(ends: int, now: float) -> str:
    """Return when a certificate ends, and what to do, for people. Both times are seconds of Unix time."""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends))
    if ends <= now:
        return f"this node's certificate has expired at {day}: other nodes and clients refuse it; renew it"
    return f"this node's certificate ends at {day}, in {(ends - now) / 86_400:.1f} days; renew it"


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME, _SEQUENCE = 0xA0, 0x17, 0x30
_Element = tuple[int, int, int]
"""The tag, and the first index of the contents and the one behind them."""


def certificate_end(path: str) -> int:
    """Return when the first of the certificates in a PEM file ends to be valid, a chain's others included, in seconds of
    Unix time. Raises InvalidInput, OSError."""
    found = _PEM.findall(Path(path).read_text(errors="replace"))
    if not found:
        raise InvalidInput(f"{path} has no certificate in PEM")
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in found)
    except (ValueError, IndexError) as error:
        raise InvalidInput(f"{path} has a certificate that cannot be read ({error})") from None


def _not_after(der: bytes) -> int:
    _, at, _ = _element(der, 0, _SEQUENCE)
    _, at, _ = _element(der, at, _SEQUENCE)
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        _, _, end = _element(der, end)
    for _ in ("signature", "issuer"):
        _, _, end = _element(der, end, _SEQUENCE)
    _, begin, _ = _element(der, end, _SEQUENCE)
    _, _, end = _element(der, begin)
    tag, begin, end = _element(der, end)
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:  # two digits of a year between 1950 and 2049
        text = ("20" if text[:2] < "50" else "19") + text
    return timegm(strptime(text, "%Y%m%d%H%M%SZ"))


def _element(der: bytes, at: int, expected: int = 0) -> _Element:
    """Read the tag and length at an index. Raises ValueError, IndexError."""
    tag, length = der[at], der[at + 1]
    at += 2
    if expected and tag != expected:
        raise ValueError(f"tag {tag} where {expected} is expected")
    if length >= 0x80:
        size = length & 0x7F
        length = int.from_bytes(der[at : at + size], "big")
        at += size
    if at + length > len(der):
        raise ValueError("it is cut short")
    return tag, at, at + length
