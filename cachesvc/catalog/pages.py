"""Where the values of an LMDB file lie, found without trusting a byte of it.

LMDB itself maps a file and follows its page numbers: a truncated file kills the reader with SIGBUS, a crafted
one worse. So catalogs are written by LMDB but read by this walk of the B+tree, which checks every number
before it uses it. Only what a catalog needs: one database, no duplicates, data version 1 (LMDB 0.9.x).
Layout: `MDB_page`, `MDB_meta`, `MDB_node` in LMDB's mdb.c.
"""

from __future__ import annotations

import struct

from cachesvc.core.errors import CorruptData

_PAGE = struct.Struct("<QHHHH")
_OVERFLOW_COUNT = struct.Struct("<I")
_META = struct.Struct("<IIQQ")
_DB = struct.Struct("<IHHQQQQQ")
_TAIL = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_PGNO = struct.Struct("<Q")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_BIG_DATA = 0x01
_EMPTY = 2**64 - 1
_MAX_DEPTH = 8
_MAX_PAGE_BYTES = 1 << 16
_MAX_VALUES = 1 << 14
"""And as many pages on the way to them: a catalog has some 200 columns, and a value more for each GiB."""


def values(data: memoryview) -> dict[bytes, tuple[int, int]]:
    """Key -> (offset, length) in `data` of every value of the main database.

    Raises CorruptData when any page, node or value does not lie wholly inside `data`, or there are more than a
    catalog has.
    """
    try:
        return _Walk(data).values()
    except (struct.error, IndexError) as error:
        raise CorruptData(f"not an LMDB file that can be read: {error}") from error


class _Walk:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._found: dict[bytes, tuple[int, int]] = {}
        self._seen: set[int] = set()
        self._page_bytes = 0

    def values(self) -> dict[bytes, tuple[int, int]]:
        root = self._root()
        if root != _EMPTY:
            self._visit(root, 0)
        return self._found

    def _root(self) -> int:
        """The main database's root page in the newer of the two meta pages."""
        first = _DB.unpack_from(self._data, _PAGE.size + _META.size)[0]
        if not 512 <= first <= _MAX_PAGE_BYTES or first & (first - 1):
            raise CorruptData(f"LMDB page size {first} makes no sense")
        self._page_bytes = first
        return max(self._meta(0), self._meta(first))[1]

    def _meta(self, at: int) -> tuple[int, int]:
        flags = _PAGE.unpack_from(self._data, at)[2]
        magic, version, _, _ = _META.unpack_from(self._data, at + _PAGE.size)
        if magic != _MAGIC or version != _VERSION or not flags & _META_PAGE:
            raise CorruptData("no LMDB meta page of data version 1")
        main = at + _PAGE.size + _META.size + _DB.size
        last, transaction = _TAIL.unpack_from(self._data, main + _DB.size)
        if (last + 1) * self._page_bytes > len(self._data):
            raise CorruptData(f"LMDB file of {len(self._data)} bytes should have {last + 1} pages: truncated")
        return transaction, _DB.unpack_from(self._data, main)[7]

    def _visit(self, page: int, depth: int) -> None:
        at = page * self._page_bytes
        if page in self._seen or depth > _MAX_DEPTH or at + self._page_bytes > len(self._data):
            raise CorruptData(f"LMDB page {page} is outside the file or in a cycle")
        if len(self._seen) >= _MAX_VALUES:
            raise CorruptData(f"LMDB file of more than {_MAX_VALUES} pages of keys")
        self._seen.add(page)
        number, _, flags, lower, upper = _PAGE.unpack_from(self._data, at)
        if number != page or not _PAGE.size <= lower <= upper <= self._page_bytes:
            raise CorruptData(f"LMDB page {page} has a broken header")
        for node in memoryview(self._data[at + _PAGE.size : at + (lower & ~1)]).cast("H"):
            if node < lower or node + _NODE.size > self._page_bytes:
                raise CorruptData(f"LMDB page {page} has a node outside itself")
            if flags & _BRANCH:
                low, high, top, _ = _NODE.unpack_from(self._data, at + node)
                self._visit(low | high << 16 | top << 32, depth + 1)
            elif flags & _LEAF:
                self._leaf(at + node, at + self._page_bytes)
            else:
                raise CorruptData(f"LMDB page {page} is neither branch nor leaf")

    def _leaf(self, at: int, page_end: int) -> None:
        low, high, flags, key_bytes = _NODE.unpack_from(self._data, at)
        length, begin = low | high << 16, at + _NODE.size + key_bytes
        key = bytes(self._data[at + _NODE.size : begin])
        if key in self._found or len(self._found) >= _MAX_VALUES:
            raise CorruptData(f"LMDB file with a key twice, or with more than {_MAX_VALUES}")
        if flags & ~_BIG_DATA:
            raise CorruptData("LMDB file holds sub-databases or duplicates")
        if not flags:
            end = page_end
        else:
            page = _PGNO.unpack_from(self._data, begin)[0]
            begin, end = self._overflow(page)
        if begin + length > min(end, len(self._data)):
            raise CorruptData("LMDB value runs past the end of its page")
        self._found[key] = (begin, length)

    def _overflow(self, page: int) -> tuple[int, int]:
        at = page * self._page_bytes
        if page in self._seen or at + self._page_bytes > len(self._data):
            raise CorruptData(f"LMDB overflow page {page} is outside the file or used twice")
        self._seen.add(page)
        number, _, flags, _, _ = _PAGE.unpack_from(self._data, at)
        if number != page or not flags & _OVERFLOW:
            raise CorruptData(f"LMDB page {page} is no overflow page")
        return at + _PAGE.size, at + _OVERFLOW_COUNT.unpack_from(self._data, at + 12)[0] * self._page_bytes
