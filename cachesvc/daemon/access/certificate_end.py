"""The end of a certificate's validity.

Python's ssl module tells the validity of the other side's certificate alone, and `cryptography` is 15 MB for one date. So
this walks the few fields of X.509 before it (RFC 5280, section 4.1): certificate, its contents, version, serial number,
signature, issuer, validity.
"""

from __future__ import annotations

import re
import ssl
from calendar import timegm
from pathlib import Path
from time import strptime

from cachesvc.core.errors import InvalidInput

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
