"""Bodies in the form `aws-chunked`, whose chunks are signed: each is verified, and its signature taken out. Pure.

See "Transferring Payload in Multiple Chunks" in the API reference of Amazon S3.
"""

from __future__ import annotations

import hashlib
import re

from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.signature import ChunkSignatures

MAX_LINE_BYTES = 16 << 10
"""The longest line before a chunk, and the most bytes of all trailers."""
_SIZE = re.compile(rb"([0-9a-fA-F]{1,16});chunk-signature=([0-9a-f]{64})")
_OWN = b"x-amz-trailer-signature"


class SignedChunks:
    """Turns a body into the same one without signatures: chunks with trailers, or the bare bytes. A chunk is passed on
    while it comes, and its signature is verified at its end."""

    def __init__(self, signatures: ChunkSignatures, trailers: bool) -> None:
        """`trailers`: the body ends with trailers, so its chunks are kept."""
        self._signatures, self._trailers = signatures, trailers
        self._held = bytearray()
        self._left = 0
        """Bytes of this chunk that are still to come, its line end among them; 0 between chunks."""
        self._stated = ""
        self._hash = hashlib.sha256()
        self._trailer: list[bytes] | None = None
        """The trailers so far; None before the last chunk."""
        self._verified = False
        self.ended = False
        """All was taken, and verified."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return what is to be sent. Raises S3Error: SignatureDoesNotMatch, IncompleteBody for bytes
        that are no such body."""
        self._held += data
        out = bytearray()
        while self._held and not self.ended:
            before = len(self._held)
            if self._left:
                self._data(out)
            elif (line := self._line()) is not None:
                self._lined(line, out)
            if len(self._held) == before:
                break
        if self.ended and self._held:
            raise S3Error("IncompleteBody", "the body goes on behind its last chunk")
        return bytes(out)

    def _line(self) -> bytes | None:
        end = self._held.find(b"\r\n")
        if end < 0:
            if len(self._held) > MAX_LINE_BYTES:
                raise S3Error("IncompleteBody", "the body is not aws-chunked")
            return None
        line = bytes(self._held[:end])
        del self._held[: end + 2]
        return line

    def _lined(self, line: bytes, out: bytearray) -> None:
        if self._trailer is not None:
            self._trailing(line, out)
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise S3Error("IncompleteBody", "a chunk of the body has no size and signature")
        self._stated, size_bytes = found[2].decode(), int(found[1], 16)
        self._hash = hashlib.sha256()
        if self._trailers:
            out += found[1] + b"\r\n"
        if size_bytes:
            self._left = size_bytes + 2
        else:
            self._signatures.check_chunk(self._hash.hexdigest(), self._stated)
            self._trailer = []

    def _data(self, out: bytearray) -> None:
        if self._left > 2:
            taken = bytes(self._held[: self._left - 2])
            self._hash.update(taken)
            out += taken
            del self._held[: len(taken)]
            self._left -= len(taken)
        elif len(self._held) >= 2:
            if self._line() != b"":
                raise S3Error("IncompleteBody", "a chunk of the body has another size than it states")
            self._signatures.check_chunk(self._hash.hexdigest(), self._stated)
            out += b"\r\n" if self._trailers else b""
            self._left = 0

    def _trailing(self, line: bytes, out: bytearray) -> None:
        assert self._trailer is not None, "behind the last chunk"
        name, _, value = (part.strip() for part in line.partition(b":"))
        if name.lower() == _OWN:
            self._signatures.check_trailers(b"".join(self._trailer), value.decode("latin-1"))
            self._verified = True
        elif line:
            self._trailer.append(name.lower() + b":" + value + b"\n")
            if not self._trailers or self._verified or sum(map(len, self._trailer)) > MAX_LINE_BYTES:
                raise S3Error("IncompleteBody", "the body has trailers that its header does not name")
        else:
            if self._trailer and not self._verified:
                raise S3Error("SignatureDoesNotMatch", "the trailers of the body are not signed")
            if self._trailers:
                out += b"".join(each.replace(b"\n", b"\r\n") for each in self._trailer) + b"\r\n"
            self.ended = True
