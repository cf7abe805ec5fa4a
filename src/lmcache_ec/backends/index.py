"""The index of the arena: which extent holds which entry, who writes it, who has it pinned.

It is an LMDB environment next to the arena's bytes, so every process of the host sees every
change at once, and a process killed at any instant leaves the last whole transaction. Each public
method is one transaction of some tens of microseconds; nothing slow happens inside one, because
the scheduler's leases wait for the same write lock.

    (absent) --reserve--> WRITING --commit--> READY --evict, drop--> (absent)
                             '----abort, reclaim----> (absent)

Only READY entries without pins stand in the eviction order, so the evictor never skips anything.
The order is by a logical clock kept in the index: wall clocks jump, and differ per process.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import lmdb

from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096  # extents are whole pages, so a payload can be read with direct I/O
HOLDER_BYTES = 16
MAX_DIMS = 4
# Address space in bytes, not memory; the same in every process, as LMDB asks.
_MAP_SIZE = 1 << 30
_EVICT_BATCH = 64  # evictions in one transaction: bounds how long a lease may wait

_U64 = struct.Struct(">Q")
_ENTRY = struct.Struct(f"<BBHIQQQIIQ{MAX_DIMS}Q{HOLDER_BYTES}s16s")


class CachePolicy(Enum):
    """Which unpinned entry goes first; the names are LMCache's."""

    LRU = "LRU"
    LFU = "LFU"
    FIFO = "FIFO"
    MRU = "MRU"


class State(IntEnum):
    """State of an entry in the index."""

    WRITING = 1
    READY = 2


class Refusal(Enum):
    """Why ``reserve`` gave no extent."""

    EXISTS = "a READY entry of this key is there"
    BUSY = "another writer has reserved this key"
    GROW = "room only beyond the watermark: allocate blocks there, then try again"
    AGAIN = "a batch was evicted and more is needed: try again"
    FULL = "what is not pinned has no hole of this length"


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry as the index records it.

    Attributes:
        state: WRITING or READY.
        offset: Start of its extent in the arena, bytes, a multiple of ``PAGE``.
        length: Length of its extent, bytes, a multiple of ``PAGE``.
        payload_offset: Start of the tensor's bytes within the extent; 0 while WRITING.
        payload_bytes: Length of the tensor, bytes; 0 while WRITING.
        shape: Shape of the tensor, at most ``MAX_DIMS`` dimensions.
        pins: Leases held on it, over all processes.
        hits: Times that it was leased.
        inserted: Logical time of its reservation.
        owner: Holder that reserved it.
        order: Its key in the eviction order, empty while it may not be evicted.
    """

    state: State
    offset: int
    length: int
    payload_offset: int = 0
    payload_bytes: int = 0
    shape: tuple[int, ...] = ()
    pins: int = 0
    hits: int = 0
    inserted: int = 0
    owner: bytes = b""
    order: bytes = b""

    def pack(self) -> bytes:
        """Bytes for LMDB."""
        shape = self.shape + (0,) * (MAX_DIMS - len(self.shape))
        return _ENTRY.pack(
            self.state, len(self.shape), len(self.order), self.payload_offset, self.offset,
            self.length, self.payload_bytes, self.pins, self.hits, self.inserted, *shape,
            self.owner, self.order,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Slot:
        """The slot that :meth:`pack` wrote.

        Raises:
            BackendError: ``data`` is not such a record.
        """
        try:
            (state, dims, order_bytes, payload_offset, offset, length, payload_bytes, pins, hits,
             inserted, *rest) = _ENTRY.unpack(data)  # fmt: skip
            return cls(
                State(state), offset, length, payload_offset, payload_bytes, tuple(rest[:dims]),
                pins, hits, inserted, rest[MAX_DIMS], rest[MAX_DIMS + 1][:order_bytes],
            )  # fmt: skip
        except (struct.error, ValueError) as error:
            raise BackendError(f"record of {len(data)} bytes in the index: {error}") from error


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of the arena, bytes unless said otherwise."""

    capacity: int
    watermark: int
    free: int
    pinned: int
    entries: int  # a count

    @property
    def used(self) -> int:
        """Bytes in extents of entries."""
        return self.watermark - self.free


class Index:
    """Transactions over the arena's LMDB environment, for one holder in this process.

    Thread-safe. LMDB allows one open environment for each path and process, so one object is
    shared by all who use the same arena.

    Args:
        path: Directory of the environment; created if missing.
        holder: Identity under which this process writes and pins, ``HOLDER_BYTES`` bytes.
        policy: Order of eviction for what this process inserts and releases.

    Raises:
        BackendError: from every method, when LMDB fails.
    """

    def __init__(self, path: Path, holder: bytes, policy: CachePolicy) -> None:
        assert len(holder) == HOLDER_BYTES
        self._holder = holder
        self._policy = policy
        with _mapped():
            self._env = lmdb.open(
                str(path), map_size=_MAP_SIZE, max_dbs=8, max_readers=1024, mode=0o600,
                sync=False, metasync=False, readahead=False, meminit=False,
            )  # fmt: skip
            # Readers that died keep old pages from being reused.
            self._env.reader_check()
            # LMDB trusts the length of its file: reading past the end would be a SIGBUS.
            end = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            with (path / "data.mdb").open("rb+") as data:
                os.posix_fallocate(data.fileno(), 0, end)
            self._meta = self._env.open_db(b"meta")  # name -> u64
            self._entries = self._env.open_db(b"entries")  # digest -> Slot
            self._order = self._env.open_db(b"order")  # order key -> digest, evictable only
            self._free = self._env.open_db(b"free")  # offset -> length
            self._sizes = self._env.open_db(b"sizes")  # length + offset -> "", best fit
            self._held = self._env.open_db(b"held")  # holder + digest -> u64 pins

    def close(self) -> None:
        """Close the environment; no method may be called afterwards."""
        self._env.close()

    # ------------------------------------------------------------------ shape of the arena

    def resize(self, capacity: int) -> None:
        """Set the arena's capacity in bytes; entries beyond a smaller one are dropped.

        Only for the sole live holder, before anyone reads: pins are not looked at.
        """
        with self._write() as txn:
            txn.put(b"capacity", _U64.pack(capacity), db=self._meta)
            if _get(txn, self._meta, b"watermark") <= capacity:
                return
            doomed = [
                bytes(digest)
                for digest, data in txn.cursor(db=self._entries)
                if (slot := Slot.unpack(bytes(data))).offset + slot.length > capacity
            ]
            for digest in doomed:
                self._remove(txn, digest)
            for offset_key, length_key in list(txn.cursor(db=self._free)):
                offset, length = _U64.unpack(offset_key)[0], _U64.unpack(length_key)[0]
                if offset + length > capacity:
                    self._take_free(txn, offset, length)
                    if offset < capacity:
                        self._put_free(txn, offset, capacity - offset)
            txn.put(b"watermark", _U64.pack(capacity), db=self._meta)

    def grow(self, start: int, end: int) -> None:
        """Record that the arena's blocks are allocated up to ``end``.

        ``start`` is the watermark for which the caller allocated them; when another process has
        grown the arena meanwhile, its growth stands and this call does nothing.
        """
        with self._write() as txn:
            if _get(txn, self._meta, b"watermark") == start:
                txn.put(b"watermark", _U64.pack(end), db=self._meta)
                self._give_free(txn, start, end - start)

    def usage(self) -> Usage:
        """Totals of the arena now."""
        with self._read() as txn:
            return Usage(
                _get(txn, self._meta, b"capacity"),
                _get(txn, self._meta, b"watermark"),
                _get(txn, self._meta, b"free"),
                _get(txn, self._meta, b"pinned"),
                txn.stat(self._entries)["entries"],
            )

    def check(self) -> None:
        """Verify that entries and free extents tile the arena; a BackendError if they do not."""
        with self._read() as txn:
            free = [(_U64.unpack(o)[0], _U64.unpack(n)[0]) for o, n in txn.cursor(db=self._free)]
            slots = [Slot.unpack(bytes(data)) for _, data in txn.cursor(db=self._entries)]
            end = 0
            for offset, length in sorted(free + [(slot.offset, slot.length) for slot in slots]):
                if offset != end:
                    raise BackendError(f"memory index: an extent at {offset}, expected at {end}")
                end += length
            if end != (watermark := _get(txn, self._meta, b"watermark")):
                raise BackendError(f"memory index: extents end at {end}, not at {watermark}")

    # ------------------------------------------------------------------ writing

    def reserve(
        self, digest: bytes, length: int, *, may_grow: bool = True
    ) -> tuple[Slot | Refusal, int]:
        """Take an extent of ``length`` bytes (a multiple of ``PAGE``) for a new entry.

        Returns the WRITING slot or why there is none, and how many entries were evicted. An
        existing entry of the key is never touched. Without ``may_grow`` the watermark is the end.
        """
        with self._write() as txn:
            if (data := txn.get(digest, db=self._entries)) is not None:
                ready = data[0] == State.READY
                return (Refusal.EXISTS if ready else Refusal.BUSY), 0
            evicted = 0
            while (offset := self._best_fit(txn, length)) is None:
                watermark = _get(txn, self._meta, b"watermark")
                limit = _get(txn, self._meta, b"capacity") if may_grow else watermark
                if may_grow and watermark - self._tail(txn, watermark) + length <= limit:
                    return Refusal.GROW, evicted
                if limit - _get(txn, self._meta, b"pinned") < length:
                    return Refusal.FULL, evicted
                if evicted == _EVICT_BATCH:
                    return Refusal.AGAIN, evicted
                cursor = txn.cursor(db=self._order)
                if not cursor.first():
                    return Refusal.FULL, evicted
                self._remove(txn, bytes(cursor.value()))
                evicted += 1
            self._take(txn, offset, length)
            slot = Slot(State.WRITING, offset, length, inserted=self._tick(txn), owner=self._holder)
            txn.put(digest, slot.pack(), db=self._entries)
            txn.put(self._holder + digest, _U64.pack(0), db=self._held)
            self._add(txn, b"pinned", length)
            return slot, evicted

    def needed_for(self, length: int) -> tuple[int, int]:
        """Watermark now, and the one at which ``length`` bytes would fit at the arena's end."""
        with self._read() as txn:
            watermark = _get(txn, self._meta, b"watermark")
            return watermark, watermark - self._tail(txn, watermark) + length

    def commit(
        self, digest: bytes, payload_offset: int, payload_bytes: int, shape: tuple[int, ...]
    ) -> Slot:
        """Make this holder's reservation READY, with one pin of this holder on it."""
        with self._write() as txn:
            slot = self._own(txn, digest)
            slot = replace(
                slot, state=State.READY, payload_offset=payload_offset,
                payload_bytes=payload_bytes, shape=shape, pins=1, owner=b"",
            )  # fmt: skip
            txn.put(digest, slot.pack(), db=self._entries)
            txn.put(self._holder + digest, _U64.pack(1), db=self._held)
            return slot

    def abort(self, digest: bytes) -> None:
        """Give this holder's reservation back."""
        with self._write() as txn:
            self._own(txn, digest)
            self._remove(txn, digest)
            txn.delete(self._holder + digest, db=self._held)

    # ------------------------------------------------------------------ reading

    def contains(self, digest: bytes) -> bool:
        """Whether a READY entry is there. Takes no lock."""
        with self._read() as txn:
            data = txn.get(digest, db=self._entries)
            return data is not None and data[0] == State.READY

    def lease(self, digest: bytes) -> Slot | None:
        """Pin a READY entry for this holder; None when there is none."""
        if not self.contains(digest):  # misses are frequent and need no write lock
            return None
        with self._write() as txn:
            data = txn.get(digest, db=self._entries)
            if data is None or (slot := Slot.unpack(bytes(data))).state is not State.READY:
                return None
            if slot.order:
                txn.delete(slot.order, db=self._order)
                self._add(txn, b"pinned", slot.length)
            slot = replace(slot, pins=slot.pins + 1, hits=min(slot.hits + 1, 2**32 - 1), order=b"")
            txn.put(digest, slot.pack(), db=self._entries)
            key = self._holder + digest
            txn.put(key, _U64.pack(_get(txn, self._held, key) + 1), db=self._held)
            return slot

    def release(self, digest: bytes) -> None:
        """Drop one pin of this holder."""
        with self._write() as txn:
            key = self._holder + digest
            pins = _get(txn, self._held, key)
            assert pins > 0, f"release of an entry that is not leased: {digest.hex()}"
            if pins == 1:
                txn.delete(key, db=self._held)
            else:
                txn.put(key, _U64.pack(pins - 1), db=self._held)
            self._unpin(txn, digest, 1)

    # ------------------------------------------------------------------ dead holders

    def holders(self) -> set[bytes]:
        """Every holder with a reservation or a pin."""
        found = set()
        with self._read() as txn:
            cursor = txn.cursor(db=self._held)
            more = cursor.first()
            while more:
                holder = bytes(cursor.key()[:HOLDER_BYTES])
                found.add(holder)
                more = cursor.set_range(holder + b"\xff" * 33)
        return found

    def reclaim(self, holder: bytes) -> int:
        """Drop every reservation and pin of a dead holder; how many there were."""
        with self._write() as txn:
            held = []
            cursor = txn.cursor(db=self._held)
            more = cursor.set_range(holder)
            while more and cursor.key()[:HOLDER_BYTES] == holder:
                held.append((bytes(cursor.key()[HOLDER_BYTES:]), _U64.unpack(cursor.value())[0]))
                more = cursor.next()
            for digest, pins in held:
                txn.delete(holder + digest, db=self._held)
                if pins:
                    self._unpin(txn, digest, pins)
                else:
                    self._remove(txn, digest)
            return len(held)

    # ------------------------------------------------------------------ within a transaction

    @contextmanager
    def _write(self) -> Iterator[lmdb.Transaction]:
        with _mapped(), self._env.begin(write=True) as txn:
            yield txn

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        with _mapped(), self._env.begin() as txn:
            yield txn

    def _add(self, txn: lmdb.Transaction, name: bytes, amount: int) -> None:
        txn.put(name, _U64.pack(_get(txn, self._meta, name) + amount), db=self._meta)

    def _tick(self, txn: lmdb.Transaction) -> int:
        self._add(txn, b"clock", 1)
        return _get(txn, self._meta, b"clock")

    def _slot(self, txn: lmdb.Transaction, digest: bytes) -> Slot:
        data = txn.get(digest, db=self._entries)
        if data is None:
            raise BackendError(f"entry {digest.hex()} is not in the index")
        return Slot.unpack(bytes(data))

    def _own(self, txn: lmdb.Transaction, digest: bytes) -> Slot:
        data = txn.get(digest, db=self._entries)
        slot = None if data is None else Slot.unpack(bytes(data))
        if slot is None or slot.state is not State.WRITING or slot.owner != self._holder:
            raise BackendError(f"entry {digest.hex()} is not reserved by this process")
        return slot

    def _unpin(self, txn: lmdb.Transaction, digest: bytes, pins: int) -> None:
        slot = self._slot(txn, digest)
        slot = replace(slot, pins=slot.pins - pins)
        if slot.pins == 0:
            clock = self._tick(txn)
            first, second = {
                CachePolicy.LRU: (0, clock),
                CachePolicy.LFU: (slot.hits, clock),
                CachePolicy.FIFO: (0, slot.inserted),
                CachePolicy.MRU: (0, 2**64 - 1 - clock),
            }[self._policy]
            slot = replace(slot, order=_U64.pack(first) + _U64.pack(second))
            txn.put(slot.order, digest, db=self._order)
            self._add(txn, b"pinned", -slot.length)
        txn.put(digest, slot.pack(), db=self._entries)

    def _remove(self, txn: lmdb.Transaction, digest: bytes) -> None:
        slot = self._slot(txn, digest)
        txn.delete(digest, db=self._entries)
        if slot.order:
            txn.delete(slot.order, db=self._order)
        else:
            self._add(txn, b"pinned", -slot.length)
        self._give_free(txn, slot.offset, slot.length)

    # free extents: never adjacent, each once by offset and once by length

    def _best_fit(self, txn: lmdb.Transaction, length: int) -> int | None:
        cursor = txn.cursor(db=self._sizes)
        if not cursor.set_range(_U64.pack(length)):
            return None
        offset: int = _U64.unpack(cursor.key()[8:])[0]
        return offset

    def _tail(self, txn: lmdb.Transaction, watermark: int) -> int:
        """Length of the free extent that ends at the watermark, or 0."""
        cursor = txn.cursor(db=self._free)
        if cursor.last():
            offset, length = _U64.unpack(cursor.key())[0], _U64.unpack(cursor.value())[0]
            if offset + length == watermark:
                return int(length)
        return 0

    def _take(self, txn: lmdb.Transaction, offset: int, length: int) -> None:
        """Allocate from the start of the free extent at ``offset``."""
        found = _get(txn, self._free, _U64.pack(offset))
        self._take_free(txn, offset, found)
        if found > length:
            self._put_free(txn, offset + length, found - length)

    def _give_free(self, txn: lmdb.Transaction, offset: int, length: int) -> None:
        """Free an extent and merge it with its neighbours."""
        cursor = txn.cursor(db=self._free)
        if cursor.set_range(_U64.pack(offset)):
            after = _U64.unpack(cursor.key())[0]
            if after == offset + length:
                after_length = _U64.unpack(cursor.value())[0]
                self._take_free(txn, after, after_length)
                length += after_length
        cursor = txn.cursor(db=self._free)
        found = cursor.prev() if cursor.set_range(_U64.pack(offset)) else cursor.last()
        if found:
            before, before_length = _U64.unpack(cursor.key())[0], _U64.unpack(cursor.value())[0]
            if before + before_length == offset:
                self._take_free(txn, before, before_length)
                offset, length = before, before_length + length
        self._put_free(txn, offset, length)

    def _take_free(self, txn: lmdb.Transaction, offset: int, length: int) -> None:
        txn.delete(_U64.pack(offset), db=self._free)
        txn.delete(_U64.pack(length) + _U64.pack(offset), db=self._sizes)
        self._add(txn, b"free", -length)

    def _put_free(self, txn: lmdb.Transaction, offset: int, length: int) -> None:
        txn.put(_U64.pack(offset), _U64.pack(length), db=self._free)
        txn.put(_U64.pack(length) + _U64.pack(offset), b"", db=self._sizes)
        self._add(txn, b"free", length)


def _get(txn: lmdb.Transaction, db: Any, key: bytes) -> int:  # noqa: ANN401 - lmdb has no stubs
    data = txn.get(key, db=db)
    return 0 if data is None else int(_U64.unpack(data)[0])


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise BackendError(f"memory index: {error}") from error
