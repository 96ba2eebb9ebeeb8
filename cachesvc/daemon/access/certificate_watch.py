"""Reads when a certificate ends, and warns before that of this node does: 30, 7 and 1 day before, and once it has ended.

Python's ssl module tells the validity of the other side's certificate alone, and `cryptography` is 15 MB for one date. So
this walks the few fields of X.509 before it (RFC 5280, section 4.1): certificate, its contents, version, serial number,
signature, issuer, validity.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
from calendar import timegm
from collections.abc import Callable
from pathlib import Path
from time import strptime

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.traits import certificate_stage

log = logging.getLogger(__name__)
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
