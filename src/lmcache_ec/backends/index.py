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
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from lmcache_ec.backends.transaction import ENTRY, FREE, HELD, NOTE, ORDER, U64, Transaction
from lmcache_ec.entry import MAX_NDIM
from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096  # extents are whole pages, so a payload can be read with direct I/O
HOLDER_BYTES = 16
LABEL_BYTES = 16
# Address space in bytes, not memory; the same in every process, as LMDB asks.
_MAP_SIZE = 1 << 30
_EVICT_BATCH = 64  # evictions in one transaction: bounds how long a lease may wait

_ORDER = struct.Struct(">QQ")
_RECORD = struct.Struct(f"<BBHIQQQIIQ{MAX_NDIM}Q{HOLDER_BYTES}s16s")


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


class Slot(NamedTuple):
    """One entry as the index records it.

    Attributes:
        state: WRITING or READY.
        offset: Start of its extent in the arena, bytes, a multiple of ``PAGE``.
        length: Length of its extent, bytes, a multiple of ``PAGE``.
        payload_offset: Start of the tensor's bytes within the extent; 0 while WRITING.
        payload_bytes: Length of the tensor, bytes; 0 while WRITING.
        shape: Shape of the tensor, at most ``MAX_NDIM`` dimensions.
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
        shape = self.shape + (0,) * (MAX_NDIM - len(self.shape))
        return _RECORD.pack(
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
             inserted, *rest) = _RECORD.unpack(data)  # fmt: skip
            return cls(
                State(state), offset, length, payload_offset, payload_bytes, tuple(rest[:dims]),
                pins, hits, inserted, rest[MAX_NDIM], rest[MAX_NDIM + 1][:order_bytes],
            )  # fmt: skip
        except (struct.error, ValueError) as error:
            raise BackendError(f"record of {len(data)} bytes in the index: {error}") from error


class Usage(NamedTuple):
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
        try:
            self._env = lmdb.open(
                str(path), map_size=_MAP_SIZE, max_readers=1024, mode=0o600,
                sync=False, metasync=False, readahead=False, meminit=False,
            )  # fmt: skip
            # Readers that died keep old pages from being reused.
            self._env.reader_check()
            # LMDB trusts the length of its file: reading past the end would be a SIGBUS.
            end = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        except lmdb.Error as error:
            raise BackendError(f"memory index: {error}") from error
        with (path / "data.mdb").open("rb+") as data:
            os.posix_fallocate(data.fileno(), 0, end)

    def close(self) -> None:
        """Close the environment; no method may be called afterwards."""
        self._env.close()

    # ------------------------------------------------------------------ shape of the arena

    def resize(self, capacity: int) -> None:
        """Set the arena's capacity in bytes; entries beyond a smaller one are dropped.

        Only for the sole live holder, before anyone reads: pins are not looked at.
        """
        with self._write() as txn:
            txn.capacity = capacity
            if txn.watermark <= capacity:
                return
            for digest, data in list(txn.scan(ENTRY)):
                slot = Slot.unpack(data)
                if slot.offset + slot.length > capacity:
                    self._remove(txn, digest, slot)
            for offset_key, length_key in list(txn.scan(FREE)):
                offset, length = U64.unpack(offset_key)[0], U64.unpack(length_key)[0]
                if offset + length > capacity:
                    txn.take_free(offset, length)
                    if offset < capacity:
                        txn.put_free(offset, capacity - offset)
            txn.watermark = capacity

    def grow(self, start: int, end: int) -> None:
        """Record that the arena's blocks are allocated up to ``end``.

        ``start`` is the watermark for which the caller allocated them; when another process has
        grown the arena meanwhile, its growth stands and this call does nothing.
        """
        with self._write() as txn:
            if txn.watermark == start:
                txn.watermark = end
                txn.give_free(start, end - start)

    def usage(self) -> Usage:
        """Totals of the arena now."""
        with self._read() as txn:
            return Usage(txn.capacity, txn.watermark, txn.free, txn.pinned, txn.entries)

    def check(self) -> None:
        """Verify that entries and free extents tile the arena; a BackendError if they do not."""
        with self._read() as txn:
            free = [(U64.unpack(o)[0], U64.unpack(n)[0]) for o, n in txn.scan(FREE)]
            slots = [Slot.unpack(data) for _, data in txn.scan(ENTRY)]
            end = 0
            for offset, length in sorted(free + [(slot.offset, slot.length) for slot in slots]):
                if offset != end:
                    raise BackendError(f"memory index: an extent at {offset}, expected at {end}")
                end += length
            if end != txn.watermark:
                raise BackendError(f"memory index: extents end at {end}, not at {txn.watermark}")

    # ------------------------------------------------------------------ writing

    def reserve(
        self, digest: bytes, length: int, *, may_grow: bool = True
    ) -> tuple[Slot | Refusal, int]:
        """Take an extent of ``length`` bytes (a multiple of ``PAGE``) for a new entry.

        Returns the WRITING slot or why there is none, and how many entries were evicted. An
        existing entry of the key is never touched. Without ``may_grow`` the watermark is the end.
        """
        with self._write() as txn:
            if (data := txn.get(ENTRY + digest)) is not None:
                ready = data[0] == State.READY
                return (Refusal.EXISTS if ready else Refusal.BUSY), 0
            evicted = 0
            while (hole := txn.best_fit(length)) is None:
                limit = txn.capacity if may_grow else txn.watermark
                if txn.watermark < limit and txn.watermark - txn.tail() + length <= limit:
                    return Refusal.GROW, evicted
                if limit - txn.pinned < length:
                    return Refusal.FULL, evicted
                if evicted == _EVICT_BATCH:
                    return Refusal.AGAIN, evicted
                first = next(txn.scan(ORDER), None)
                if first is None:
                    return Refusal.FULL, evicted
                self._remove(txn, first[1], self._slot(txn, first[1]))
                evicted += 1
            offset, found = hole
            txn.take_free(offset, found)
            if found > length:
                txn.put_free(offset + length, found - length)
            txn.clock += 1
            slot = Slot(State.WRITING, offset, length, inserted=txn.clock, owner=self._holder)
            txn.put(ENTRY + digest, slot.pack())
            txn.put(HELD + self._holder + digest, U64.pack(0))
            txn.pinned += length
            txn.entries += 1
            return slot, evicted

    def needed_for(self, length: int) -> tuple[int, int]:
        """Watermark now, and the one at which ``length`` bytes would fit at the arena's end."""
        with self._read() as txn:
            return txn.watermark, txn.watermark - txn.tail() + length

    def commit(
        self,
        digest: bytes,
        payload_offset: int,
        payload_bytes: int,
        shape: tuple[int, ...],
        *,
        pins: int = 1,
    ) -> Slot:
        """Make this holder's reservation READY, with that many pins (0 or 1) of this holder."""
        with self._write() as txn:
            slot = self._own(txn, digest)._replace(
                state=State.READY, payload_offset=payload_offset, payload_bytes=payload_bytes,
                shape=shape, pins=1, owner=b"",
            )  # fmt: skip
            if pins:
                txn.put(ENTRY + digest, slot.pack())
                txn.put(HELD + self._holder + digest, U64.pack(1))
                return slot
            txn.delete(HELD + self._holder + digest)
            return self._unpin(txn, digest, slot, 1)

    def abort(self, digest: bytes) -> None:
        """Give this holder's reservation back."""
        with self._write() as txn:
            self._remove(txn, digest, self._own(txn, digest))
            txn.delete(HELD + self._holder + digest)

    # ------------------------------------------------------------------ reading

    def contains(self, digest: bytes) -> bool:
        """Whether a READY entry is there. Takes no lock."""
        try:
            with self._env.begin() as txn:  # without the totals: this is the most frequent call
                data = txn.get(ENTRY + digest)
        except lmdb.Error as error:
            raise BackendError(f"memory index: {error}") from error
        return data is not None and data[0] == State.READY

    def lease(self, digest: bytes) -> Slot | None:
        """Pin a READY entry for this holder; None when there is none."""
        if not self.contains(digest):  # misses are frequent and need no write lock
            return None
        with self._write() as txn:
            data = txn.get(ENTRY + digest)
            if data is None or (slot := Slot.unpack(data)).state is not State.READY:
                return None
            if slot.order:
                txn.delete(ORDER + slot.order)
                txn.pinned += slot.length
            slot = slot._replace(pins=slot.pins + 1, hits=min(slot.hits + 1, 2**32 - 1), order=b"")
            txn.put(ENTRY + digest, slot.pack())
            key = HELD + self._holder + digest
            held = txn.get(key)
            txn.put(key, U64.pack(1 if held is None else U64.unpack(held)[0] + 1))
            return slot

    def release(self, digest: bytes) -> None:
        """Drop one pin of this holder."""
        with self._write() as txn:
            key = HELD + self._holder + digest
            held = txn.get(key)
            pins = 0 if held is None else U64.unpack(held)[0]
            assert pins > 0, f"release of an entry that is not leased: {digest.hex()}"
            if pins == 1:
                txn.delete(key)
            else:
                txn.put(key, U64.pack(pins - 1))
            self._unpin(txn, digest, self._slot(txn, digest), 1)

    # ------------------------------------------------------------------ notes

    def note(self, label: bytes, number: int) -> None:
        """Tell all processes a number under a label of ``LABEL_BYTES``, while this one lives."""
        with self._write() as txn:
            txn.put(NOTE + self._holder + label, U64.pack(number))

    def noted(self) -> dict[bytes, int]:
        """The numbers of all processes, by label. Takes no lock."""
        with self._read() as txn:
            return {key[HOLDER_BYTES:]: U64.unpack(data)[0] for key, data in txn.scan(NOTE)}

    # ------------------------------------------------------------------ dead holders

    def holders(self) -> set[bytes]:
        """Every holder with a reservation, a pin or a note."""
        found = set()
        # A writer killed at the end of its commit leaves a state that readers see only after the
        # next writer: look as a writer, or the dead one's last reservation would be missed.
        with self._write() as txn:
            cursor = txn.cursor()
            for kind in (HELD, NOTE):
                more = cursor.set_range(kind)
                while more and (key := cursor.key()).startswith(kind):
                    end = len(kind) + HOLDER_BYTES
                    found.add(key[len(kind) : end])
                    more = cursor.set_range(key[:end] + b"\xff" * 33)
        return found

    def reclaim(self, holder: bytes) -> int:
        """Drop all of a dead holder; how many reservations and pins there were."""
        with self._write() as txn:
            for label in [label for label, _ in txn.scan(NOTE + holder)]:
                txn.delete(NOTE + holder + label)
            held = list(txn.scan(HELD + holder))
            for digest, pins_key in held:
                txn.delete(HELD + holder + digest)
                slot, pins = self._slot(txn, digest), U64.unpack(pins_key)[0]
                if pins:
                    self._unpin(txn, digest, slot, pins)
                else:
                    self._remove(txn, digest, slot)
            return len(held)

    # ------------------------------------------------------------------ within a transaction

    def _write(self) -> Transaction:
        return Transaction(self._env, write=True)

    def _read(self) -> Transaction:
        return Transaction(self._env, write=False)

    def _slot(self, txn: Transaction, digest: bytes) -> Slot:
        data = txn.get(ENTRY + digest)
        if data is None:
            raise BackendError(f"entry {digest.hex()} is not in the index")
        return Slot.unpack(data)

    def _own(self, txn: Transaction, digest: bytes) -> Slot:
        data = txn.get(ENTRY + digest)
        slot = None if data is None else Slot.unpack(data)
        if slot is None or slot.state is not State.WRITING or slot.owner != self._holder:
            raise BackendError(f"entry {digest.hex()} is not reserved by this process")
        return slot

    def _unpin(self, txn: Transaction, digest: bytes, slot: Slot, pins: int) -> Slot:
        slot = slot._replace(pins=slot.pins - pins)
        if slot.pins == 0:
            txn.clock += 1
            slot = slot._replace(order=self._order_of(slot, txn.clock))
            txn.put(ORDER + slot.order, digest)
            txn.pinned -= slot.length
        txn.put(ENTRY + digest, slot.pack())
        return slot

    def _order_of(self, slot: Slot, clock: int) -> bytes:
        match self._policy:
            case CachePolicy.LRU:
                return _ORDER.pack(0, clock)
            case CachePolicy.LFU:
                return _ORDER.pack(slot.hits, clock)
            case CachePolicy.FIFO:
                return _ORDER.pack(0, slot.inserted)
            case CachePolicy.MRU:
                return _ORDER.pack(0, 2**64 - 1 - clock)

    def _remove(self, txn: Transaction, digest: bytes, slot: Slot) -> None:
        txn.delete(ENTRY + digest)
        txn.entries -= 1
        if slot.order:
            txn.delete(ORDER + slot.order)
        else:
            txn.pinned -= slot.length
        txn.give_free(slot.offset, slot.length)
