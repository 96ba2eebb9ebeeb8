"""Decompresses objects of gzip, bzip2 and zstd from a stream of their stored bytes, in steps of bounded size.

Members, streams and frames that follow each other in one object are one text, as for `zcat`, `bzcat` and `zstdcat`.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import zstandard

from cachesvc.core.errors import CorruptData, InvalidInput

ENDINGS = {
    **dict.fromkeys(("gz", "gzip", "tgz"), "gzip"),
    **dict.fromkeys(("bz2", "tbz2"), "bz2"),
    **dict.fromkeys(("zst", "zstd", "tzst"), "zstd"),
}
"""The codec by the last extension of a name, in lower case."""
UNREAD_ENDINGS = frozenset({"xz", "txz", "lz4", "br", "snappy"})
WINDOW_BYTES = 128 << 20
"""The most memory that a zstd frame may ask for."""


def codec_of(uri: str) -> str:
    """Return the codec of an object by its name, "" for none. Raises InvalidInput for one that is not read."""
    ending = uri.lower().rpartition(".")[2]
    if ending in UNREAD_ENDINGS:
        raise InvalidInput(
            f"{uri} is compressed as {ending}, which is not read: recompress it as .zst, .gz or .bz2; format='files' "
            "reads it as it is"
        )
    return ENDINGS.get(ending, "")


@dataclass(frozen=True, slots=True)
class _Codec:
    """`new` makes a decoder of one member, stream or frame. It gets `step_bytes` of stored bytes at a time, and `limit`,
    the most that it returns of them. Without a limit they decode to 32 MiB at most, however well they compress."""

    new: Callable[[], Any]
    step_bytes: int
    limit: tuple[int, ...] = ()


_CODECS = {
    "gzip": _Codec(lambda: zlib.decompressobj(wbits=31), 16 << 10),
    "bz2": _Codec(bz2.BZ2Decompressor, 64 << 10, (1 << 20,)),  # 40 bytes may decode to 46 MB
    "zstd": _Codec(lambda: zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj(), 1 << 10),
}
CODECS = tuple(_CODECS)


def decompressed(uri: str, codec: str, stored: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the decoded bytes of an object. Raises CorruptData, naming it, where it is damaged or ends early."""
    chosen, decoder, more = _CODECS[codec], None, False
    for part in stored:
        view, at = memoryview(part), 0
        while at < len(view) or more:
            if decoder is None and not view[at] and codec == "gzip":  # zeros behind a member, as on a tape
                at = len(view) - len(bytes(view[at:]).lstrip(b"\0"))
                continue
            decoder = decoder or chosen.new()
            step = view[at : at if more else at + chosen.step_bytes]
            try:
                found = decoder.decompress(step, *chosen.limit)
            except (zlib.error, OSError, EOFError, ValueError, zstandard.ZstdError) as error:
                raise CorruptData(f"{uri} is not valid {codec}: {error}; write it anew") from error
            at += len(step)
            more = bool(chosen.limit) and not decoder.eof and not decoder.needs_input
            if decoder.eof:
                at, decoder = at - len(decoder.unused_data), None
            if found:
                yield found
    if decoder is not None:
        raise CorruptData(f"{uri} is truncated: its {codec} stream does not end; write it anew")
