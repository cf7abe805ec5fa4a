"""One transaction over the index: LMDB's own, with the arena's totals and its free extents.

All records are in LMDB's unnamed database, told apart by the first byte of the key. Each page that
a transaction changes costs it most of a microsecond, and each named database one page more.

    e digest           -> entry, see index.py
    f offset           -> length of the free extent there
    h holder digest    -> pins of that holder, 0 for a reservation
    n holder label     -> a number that this holder tells the others
    u order            -> digest of the entry that may be evicted, first one first
    s length offset    -> nothing; the free extents again, to find the best fit
    totals             -> see Totals
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Self

import lmdb

from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

ENTRY, FREE, HELD, NOTE, SIZE, ORDER = b"e", b"f", b"h", b"n", b"s", b"u"
U64 = struct.Struct(">Q")

_TOTALS_KEY = b"totals"
_TOTALS = struct.Struct(">6Q")
_NO_TOTALS = _TOTALS.pack(0, 0, 0, 0, 0, 0)
_PAIR = struct.Struct(">cQQ")


class Transaction:
    """A context: what was changed is there for all processes when it ends, or, after an error, not.

    A class, since a generator costs a microsecond more.

    Args:
        env: The index.
        write: Whether it may change anything; writers wait for each other, readers for nobody.

    Attributes:
        get: LMDB's, as are ``put``, ``delete`` and ``cursor``.
        capacity: Size of the arena, bytes. This and the next five are the totals: they are
            stored at the end if they changed.
        watermark: Bytes of the arena that have blocks.
        free: Bytes of them in free extents.
        pinned: Bytes of them in entries that are being written or leased.
        entries: A count.
        clock: Logical time.

    Raises:
        BackendError: At the start or the end, when LMDB failed anywhere in between.
    """

    __slots__ = (
        "_env", "_stored", "_txn", "_write", "capacity", "clock", "cursor", "delete", "entries",
        "free", "get", "pinned", "put", "watermark",
    )  # fmt: skip

    def __init__(self, env: lmdb.Environment, *, write: bool) -> None:
        self._env = env
        self._write = write

    def __enter__(self) -> Self:
        try:
            self._txn = txn = self._env.begin(write=self._write)
            self.get, self.put, self.delete, self.cursor = txn.get, txn.put, txn.delete, txn.cursor
            self._stored = txn.get(_TOTALS_KEY, _NO_TOTALS)
        except lmdb.Error as error:
            raise BackendError(f"memory index: {error}") from error
        try:
            (
                self.capacity, self.watermark, self.free, self.pinned, self.entries, self.clock,
            ) = _TOTALS.unpack(self._stored)  # fmt: skip
        except struct.error as error:
            txn.abort()
            raise BackendError(f"memory index: totals of {len(self._stored)} bytes") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with self._txn:
                if error is not None:
                    raise error
                totals = _TOTALS.pack(
                    self.capacity, self.watermark, self.free, self.pinned, self.entries, self.clock
                )
                if totals != self._stored:
                    self.put(_TOTALS_KEY, totals)
        except lmdb.Error as failure:
            raise BackendError(f"memory index: {failure}") from failure

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys, without ``prefix``, and values of all records under it, in order."""
        cursor = self.cursor()
        more = cursor.set_range(prefix)
        while more and cursor.key().startswith(prefix):
            yield cursor.key()[len(prefix) :], cursor.value()
            more = cursor.next()

    # ------------------------------------------------------------------ free extents
    # Never adjacent; each stands under FREE and under SIZE.

    def best_fit(self, length: int) -> tuple[int, int] | None:
        """Offset and length of the smallest free extent of at least ``length`` bytes."""
        cursor = self.cursor()
        if cursor.set_range(_PAIR.pack(SIZE, length, 0)) and (key := cursor.key())[:1] == SIZE:
            _, found, offset = _PAIR.unpack(key)
            return offset, found
        return None

    def tail(self) -> int:
        """Length of the free extent that ends at the watermark, or 0."""
        found = self._free_before(self.cursor(), self.watermark)
        return found[1] if found and sum(found) == self.watermark else 0

    def give_free(self, offset: int, length: int) -> None:
        """Free an extent and merge it with its neighbours."""
        cursor = self.cursor()
        before = self._free_before(cursor, offset)
        if (after := self.get(FREE + U64.pack(offset + length))) is not None:
            after_length = U64.unpack(after)[0]
            self.take_free(offset + length, after_length)
            length += after_length
        if before and sum(before) == offset:
            self.take_free(*before)
            offset, length = before[0], before[1] + length
        self.put_free(offset, length)

    def take_free(self, offset: int, length: int) -> None:
        """Remove the free extent that is exactly there."""
        self.delete(FREE + U64.pack(offset))
        self.delete(_PAIR.pack(SIZE, length, offset))
        self.free -= length

    def put_free(self, offset: int, length: int) -> None:
        """Record a free extent that has no free neighbour."""
        self.put(FREE + U64.pack(offset), U64.pack(length))
        self.put(_PAIR.pack(SIZE, length, offset), b"")
        self.free += length

    @staticmethod
    def _free_before(cursor: Any, offset: int) -> tuple[int, int] | None:  # noqa: ANN401 - no stubs
        """Offset and length of the last free extent that starts before ``offset``."""
        found = cursor.prev() if cursor.set_range(FREE + U64.pack(offset)) else cursor.last()
        if found and (key := cursor.key())[:1] == FREE:
            return U64.unpack(key[1:])[0], U64.unpack(cursor.value())[0]
        return None
