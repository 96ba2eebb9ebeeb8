"""Decompresses objects of gzip, bzip2 and zstd from a stream of their stored bytes, in steps of bounded size.

Members, streams and frames that follow each other in one object are one text, as for `zcat`, `bzcat` and `zstdcat`.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import zstandard

from cachesvc.core.errors import CorruptData, InvalidInput

ENDINGS = {
    **dict.fromkeys(("gz", "gzip", "tgz"), "gzip"),
    **dict.fromkeys(("bz2", "tbz2"), "bz2"),
    **dict.fromkeys(("zst", "zstd", "tzst"), "zstd"),
}
"""The codec by the last extension of a name, in lower case."""
UNREAD_ENDINGS = frozenset({"xz", "txz", "lz4", "br"})
WINDOW_BYTES = 128 << 20
"""The most memory that a zstd frame may ask for, as in `zstd --memory`."""


def codec_of(uri: str) -> str:
    """Return the codec of an object by its name, "" for none. Raises InvalidInput for one that is not read."""
    ending = uri.lower().rpartition(".")[2]
    if ending in UNREAD_ENDINGS:
        raise InvalidInput(
            f"{uri} is compressed as {ending}, which is not read: recompress it as .zst, .gz or .bz2; format='files' "
            "reads it as it is"
        )
    return ENDINGS.get(ending, "")


class _Decoder(Protocol):
    """Decodes one member, stream or frame. `eof`: it has ended, and `unused_data` follows it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: memoryview, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Codec:
    """`step_bytes`: stored bytes that are decoded at a time. They decode to 64 MiB at most, however well they compress."""

    new: Callable[[], _Decoder]
    step_bytes: int


_CODECS = {
    "gzip": _Codec(lambda: zlib.decompressobj(wbits=31), 64 << 10),
    "bz2": _Codec(bz2.BZ2Decompressor, 2 << 10),
    "zstd": _Codec(lambda: zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj(), 2 << 10),
}
CODECS = tuple(_CODECS)


def decompressed(uri: str, codec: str, stored: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the decoded bytes of an object. Raises CorruptData, naming it, where it is damaged or ends early."""
    chosen, decoder = _CODECS[codec], None
    for part in stored:
        view, at = memoryview(part), 0
        while at < len(view):
            if decoder is None and not view[at] and codec == "gzip":  # zeros behind a member, as on a tape
                at = len(view) - len(bytes(view[at:]).lstrip(b"\0"))
                continue
            decoder = decoder or chosen.new()
            step = view[at : at + chosen.step_bytes]
            try:
                found = decoder.decompress(step)
            except (zlib.error, OSError, EOFError, ValueError, zstandard.ZstdError) as error:
                raise CorruptData(f"{uri} is not valid {codec}: {error}; write it anew") from error
            at += len(step)
            if decoder.eof:
                at, decoder = at - len(decoder.unused_data), None
            if found:
                yield found
    if decoder is not None:
        raise CorruptData(f"{uri} is truncated: its {codec} stream does not end; write it anew")
