"""Lists the members of a tar archive by its headers: ustar, pax and GNU long names. Bodies are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cachesvc.core.errors import CorruptData, InvalidInput

BLOCK = 512
_MAX_NAME_BYTES = 1 << 20
_REGULAR = b"0\x007"
_LINKS = b"12"
_BODILESS = b"123456"
"""Links, devices, folders and pipes. POSIX says that a body follows the header of any unknown kind."""
_ZERO = bytes(BLOCK)
_TAIL_BYTES = 1 << 20
"""Bytes checked behind the end: archives are padded to records, of 10 KiB unless the writer chose more."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file in an archive, whose body is bytes [offset, offset + size) of the archive; or a `link` to one."""

    name: str
    offset: int
    size: int
    link: bool = False


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    size: int
    kind: bytes


def members(uri: str, size_bytes: int, read: Callable[[int, int], bytes]) -> Iterator[TarMember]:
    """Yield regular members and links in order; `read(offset, length)` returns exactly those bytes of the archive, or fewer
    at its end where `size_bytes` is only a limit.

    Raises CorruptData, naming archive and offset, for broken headers and for an archive that ends early. Raises
    InvalidInput for sparse members, whose stored bytes are not their content, and for another archive behind the first.
    """
    at, extra, lasting = 0, {}, {}  # type: ignore[var-annotated]
    while True:
        if at + BLOCK > size_bytes:
            raise CorruptData(
                f"{uri}: truncated at offset {at}: no end-of-archive block in {size_bytes} bytes"
            )
        block = read(at, BLOCK)
        if len(block) < BLOCK:
            raise CorruptData(f"{uri}: truncated at offset {at}: no end-of-archive block")
        if block == _ZERO:
            _check_last(uri, at + BLOCK, size_bytes, read)
            return
        header = _parse(uri, at, block)
        size = _pax_size(uri, at, {**lasting, **extra}, header)
        body, at = at + BLOCK, at + BLOCK + -(-size // BLOCK) * BLOCK
        if at > size_bytes:
            raise CorruptData(
                f"{uri}: truncated: the member at offset {body - BLOCK} ends at {body + size} of {size_bytes}"
            )
        if header.kind == b"S":
            raise _sparse(uri, body - BLOCK)
        if header.kind in (b"x", b"X", b"g", b"L"):
            raw = _small(uri, body, size, read)
            if header.kind == b"L":
                extra["path"] = raw.rstrip(b"\0")
            else:
                (lasting if header.kind == b"g" else extra).update(_pax(uri, body, raw))
            continue
        if header.kind in _REGULAR + _LINKS:
            path = extra.get("path", lasting.get("path"))
            name = header.name if path is None else path.decode("utf-8", "surrogateescape")
            yield TarMember(name, body, size, header.kind in _LINKS)
        if header.kind != b"K":
            extra = {}


def _check_last(uri: str, at: int, size_bytes: int, read: Callable[[int, int], bytes]) -> None:
    """Raise InvalidInput where a header follows the end of the archive: the members behind it would be left out."""
    for begin in range(at, min(at + _TAIL_BYTES, size_bytes - BLOCK + 1), BLOCK):
        block = read(begin, BLOCK)
        if block == _ZERO:
            continue
        if len(block) < BLOCK:
            return
        try:
            _parse(uri, begin, block)
        except CorruptData:
            return
        raise InvalidInput(
            f"{uri}: another archive begins at offset {begin}, behind the end of the first: join them with tar "
            "--concatenate, or keep each in a file of its own"
        )


def _parse(uri: str, at: int, block: bytes) -> _Header:
    stated = _number(uri, at, block[148:156], "checksum")
    if not _sums_to(stated, block[:148] + b" " * 8 + block[156:]):
        raise CorruptData(f"{uri}: no tar header at offset {at} (checksum does not match)")
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    size = _number(uri, at, block[124:136], "size")
    kind = block[156:157]
    return _Header(name.decode("utf-8", "surrogateescape"), 0 if kind in _BODILESS else size, kind)


def _sums_to(stated: int, block: bytes) -> bool:
    """Compare a checksum: the sum of unsigned bytes, or of signed ones, as some old writers compute it."""
    unsigned = sum(block)
    return stated == unsigned or stated == unsigned - 256 * sum(byte >> 7 for byte in block)


def _number(uri: str, at: int, raw: bytes, what: str) -> int:
    """Parse an octal field, or GNU's base 256 where the first bit is set."""
    try:
        if raw[0] & 0x80:
            value = int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big") if raw[0] != 0xFF else -1
        else:
            value = int(raw.strip(b" \0") or b"0", 8)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 62:
        raise CorruptData(f"{uri}: the tar header at offset {at} has an invalid {what}")
    return value


def _small(uri: str, body: int, size: int, read: Callable[[int, int], bytes]) -> bytes:
    if size > _MAX_NAME_BYTES:
        raise CorruptData(f"{uri}: the extended header at offset {body} has {size} bytes")
    raw = read(body, size)
    if len(raw) < size:
        raise CorruptData(f"{uri}: truncated at offset {body}: in an extended header")
    return raw


def _pax_size(uri: str, at: int, records: dict[str, bytes], header: _Header) -> int:
    if "size" not in records or header.kind not in _REGULAR:
        return header.size
    raw = records["size"]
    if not raw.isdigit() or len(raw) > 18:
        raise CorruptData(f"{uri}: the pax header before offset {at} has an invalid size")
    return int(raw)


def _pax(uri: str, body: int, raw: bytes) -> dict[str, bytes]:
    """Parse `length key=value\\n` records; return those that change the path or size of a member."""
    records, at = {}, 0
    while at < len(raw):
        digits, space, _ = raw[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        key, equals, value = raw[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not equals or at + length > len(raw) or raw[at + length - 1 : at + length] != b"\n":
            raise CorruptData(f"{uri}: the pax header at offset {body} does not parse")
        if key.startswith(b"GNU.sparse."):
            raise _sparse(uri, body - BLOCK)
        if key in (b"path", b"size"):
            records[key.decode()] = value
        at += length
    return records


def _sparse(uri: str, at: int) -> InvalidInput:
    return InvalidInput(
        f"{uri}: the member at offset {at} is sparse; write the archive without tar's --sparse"
    )
