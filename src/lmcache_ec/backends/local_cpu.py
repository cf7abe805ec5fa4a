"""The memory tier: reservations and leases on the arena that all processes of the user share.

    reserve (evict as needed)  ->  write bytes  ->  commit (READY, leased)   or abort
    lease (READY, pinned)      ->  read bytes   ->  release

What is leased is neither evicted nor overwritten, by any process, until the last lease on it is
released or its holder dies.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from lmcache_ec.backends.arena import Arena, arena_directory
from lmcache_ec.backends.index import PAGE, CachePolicy, Refusal, Slot, Usage
from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_ec.events import Events
    from lmcache_ec.key import CacheEngineKey


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the tensor of a lease lies in the arena; what one process tells another.

    Attributes:
        offset: Start of the tensor's bytes in the arena.
        shape: Shape of the tensor.
    """

    offset: int
    shape: tuple[int, ...]


class Reservation:
    """An extent that only its owner may write, until it is committed or aborted.

    Attributes:
        key: Key of the entry to be.
    """

    def __init__(self, backend: LocalCPUBackend, key: CacheEngineKey, slot: Slot) -> None:
        self.key = key
        self._backend = backend
        self._slot = slot
        self._open = True

    @property
    def buffer(self) -> torch.Tensor:
        """The whole extent, uint8, on CPU, at least as long as was asked for."""
        return self._backend.arena.bytes[self._slot.offset :][: self._slot.length]

    def tensor(self, payload_offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """View of the payload to be, of the key's dtype."""
        extent = Extent(self._slot.offset + payload_offset, shape)
        tensor = self._backend.view(extent, _dtype(self.key))
        assert payload_offset + tensor.nbytes <= self._slot.length, "beyond the extent"
        return tensor

    def commit(self, payload_offset: int, shape: tuple[int, ...]) -> Lease:
        """Publish the entry to every process; the caller owns the lease on it.

        Args:
            payload_offset: Start of the tensor's bytes within :attr:`buffer`.
            shape: Shape of the tensor.

        Raises:
            BackendError: The index failed, or the backend is closed; the reservation is over.
        """
        self._open = False
        return self._backend.commit(self, payload_offset, shape)

    def publish(self, payload_offset: int, shape: tuple[int, ...]) -> None:
        """:meth:`commit` without a lease, and a transaction less: it may be evicted at once."""
        self._open = False
        self._backend.publish(self, payload_offset, shape)

    def abort(self) -> None:
        """Give the extent back. Does nothing after :meth:`commit` or another abort."""
        if self._open:
            self._open = False
            self._backend.abort(self)


class Lease:
    """A pin on a READY entry: its bytes stay as they are until :meth:`release`.

    Attributes:
        key: Key of the entry.
        payload_offset: Start of the payload within :attr:`buffer`.
        nbytes: Length of the payload, bytes.
        tier: Where the entry was found, as counters call it.
    """

    def __init__(self, backend: LocalCPUBackend, key: CacheEngineKey, slot: Slot) -> None:
        self.key = key
        self.tier = backend.name
        self.payload_offset = slot.payload_offset
        self.nbytes = slot.payload_bytes
        self._backend = backend
        self._slot = slot
        self._mapping = backend.arena.bytes  # stays mapped as long as this, whoever closes
        self._held = True

    @property
    def extent(self) -> Extent:
        """Where the tensor is in the arena."""
        return Extent(self._slot.offset + self.payload_offset, self._slot.shape)

    # Views cost microseconds each, and the scheduler needs none.

    @property
    def tensor(self) -> torch.Tensor:
        """View of the arena, of the entry's shape and dtype, on CPU.

        Read only by contract, and only while the lease is held.
        """
        return _view(self._mapping, self.extent, _dtype(self.key))

    @property
    def buffer(self) -> torch.Tensor:
        """The extent from its start to the payload's end, uint8."""
        return self._mapping[self._slot.offset :][: self.payload_offset + self.nbytes]

    def share(self) -> Lease:
        """Another lease on the same entry, with a life of its own. A dict look-up."""
        lease = self._backend.lease(self.key)
        assert lease is not None, "this lease is held"
        lease.tier = self.tier
        return lease

    def release(self) -> None:
        """Let the entry be evicted again. Idempotent for one thread."""
        if self._held:
            self._held = False
            self._backend.release(self.key)


class LocalCPUBackend:
    """Reservations and leases for one process. Thread-safe.

    Args:
        shm_path: Directory on a tmpfs.
        capacity_bytes: Size of the arena if this process is the first in it.
        policy: Order of eviction.
        events: Where evictions and failures are counted.

    Raises:
        ConfigError: The place of the arena cannot be used.
        BackendError: The tmpfs has no room for an arena at all.
    """

    name = "memory"

    def __init__(
        self, shm_path: Path, capacity_bytes: int, policy: CachePolicy, events: Events
    ) -> None:
        self.arena = _join(shm_path, max(PAGE, capacity_bytes // PAGE * PAGE), policy)
        self._events = events
        self._lock = threading.Lock()
        self._leases: dict[bytes, tuple[int, Slot]] = {}  # digest -> leases here, slot
        self._closed = False

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether a READY entry is there now. Microseconds.

        Raises:
            BackendError: The index failed.
        """
        self.arena.begin()
        try:
            return self.arena.index.contains(key.digest)
        finally:
            self.arena.end()

    def lease(self, key: CacheEngineKey) -> Lease | None:
        """Pin the entry if it is READY. Tens of microseconds; one dict look-up if leased here.

        Raises:
            BackendError: The index failed, or this backend is closed.
        """
        digest = key.digest
        self.arena.begin()
        try:
            with self._lock:
                self._check_open()
                count, slot = self._leases.get(digest, (0, None))
                if slot is None:
                    slot = self.arena.index.lease(digest)
                    if slot is None:
                        return None
                self._leases[digest] = (count + 1, slot)
            return Lease(self, key, slot)
        finally:
            self.arena.end()

    def release(self, key: CacheEngineKey) -> None:
        """Drop one lease of this process; called by :meth:`Lease.release`."""
        digest = key.digest
        with self._lock:
            if self._closed:  # closing dropped every pin of this process
                return
            count, slot = self._leases[digest]
            if count > 1:
                self._leases[digest] = (count - 1, slot)
                return
            del self._leases[digest]
            try:
                with self.arena.use():
                    self.arena.index.release(digest)
            except BackendError:  # the pin stays until this process ends
                self._events.count("errors", "memory")

    def reserve(self, key: CacheEngineKey, nbytes: int) -> Reservation | Refusal:
        """Room for a new entry of ``nbytes``; may evict, and may take milliseconds to grow.

        Returns EXISTS, BUSY or FULL in place of a reservation.

        Raises:
            BackendError: The index failed, or this backend is closed.
        """
        self.arena.begin()  # until the reservation ends: a closed arena's extents go to others
        reservation = None
        try:
            self._check_open()
            answer = self._reserve(key, nbytes)
            if isinstance(answer, Slot):
                reservation = Reservation(self, key, answer)
                return reservation
            return answer
        finally:
            if reservation is None:
                self.arena.end()

    def _reserve(self, key: CacheEngineKey, nbytes: int) -> Slot | Refusal:
        length = -(-nbytes // PAGE) * PAGE
        index = self.arena.index
        reclaimed, may_grow = False, True
        while True:
            answer, evicted = index.reserve(key.digest, length, may_grow=may_grow)
            if evicted:
                self._events.count("evictions", "memory", evicted)
            if isinstance(answer, Slot) or answer is Refusal.EXISTS:
                return answer
            if answer is Refusal.GROW:
                may_grow = self.arena.grow(length)
            elif answer is not Refusal.AGAIN:
                if reclaimed:
                    return answer
                self.arena.reclaim()  # what stands in the way may be a dead process's
                reclaimed = True

    def commit(
        self, reservation: Reservation, payload_offset: int, shape: tuple[int, ...]
    ) -> Lease:
        """Make a reservation READY; called by :meth:`Reservation.commit`."""
        try:
            slot = self._commit(reservation.key, payload_offset, shape, leases=1)
            return Lease(self, reservation.key, slot)
        finally:
            self.arena.end()

    def publish(
        self, reservation: Reservation, payload_offset: int, shape: tuple[int, ...]
    ) -> None:
        """Make a reservation READY without a lease; called by :meth:`Reservation.publish`."""
        try:
            self._commit(reservation.key, payload_offset, shape, leases=0)
        finally:
            self.arena.end()

    def _commit(
        self, key: CacheEngineKey, payload_offset: int, shape: tuple[int, ...], leases: int
    ) -> Slot:
        nbytes = prod(shape) * _dtype(key).itemsize
        try:
            with self._lock:
                self._check_open()
                slot = self.arena.index.commit(
                    key.digest, payload_offset, nbytes, shape, pins=leases
                )
                if leases:
                    self._leases[key.digest] = (leases, slot)
        except BackendError:
            with contextlib.suppress(BackendError):
                self.arena.index.abort(key.digest)
            raise
        return slot

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation back; called by :meth:`Reservation.abort`."""
        try:
            self.arena.index.abort(reservation.key.digest)
        except BackendError:  # the extent comes back when this process ends
            self._events.count("errors", "memory")
        finally:
            self.arena.end()

    def view(self, extent: Extent, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of a lease that another process, or another part of this one, holds."""
        return _view(self.arena.bytes, extent, dtype)

    def note(self, label: bytes, number: int) -> None:
        """Tell every process of the arena a number, as long as this process lives.

        Raises:
            BackendError: The index failed.
        """
        with self.arena.use():
            self.arena.index.note(label, number)

    def noted(self) -> dict[bytes, int]:
        """What the processes of the arena tell, by label.

        Raises:
            BackendError: The index failed.
        """
        with self.arena.use():
            return self.arena.index.noted()

    def usage(self) -> Usage:
        """Totals of the arena.

        Raises:
            BackendError: The index failed.
        """
        with self.arena.use():
            return self.arena.index.usage()

    def close(self) -> None:
        """Leave the arena, if no other backend of this process is in it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(BackendError), self.arena.use():
                for digest in self._leases:
                    self.arena.index.release(digest)
        _leave(self.arena)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the memory tier is closed")


def _dtype(key: CacheEngineKey) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, key.dtype)
    return dtype


def _view(mapping: torch.Tensor, extent: Extent, dtype: torch.dtype) -> torch.Tensor:
    nbytes = prod(extent.shape) * dtype.itemsize
    return mapping[extent.offset : extent.offset + nbytes].view(dtype).view(extent.shape)


# LMDB allows one environment for each path and process, so backends of one process share it.
_arenas: dict[Path, tuple[int, Arena]] = {}
_arenas_lock = threading.Lock()


def _join(shm_path: Path, capacity_bytes: int, policy: CachePolicy) -> Arena:
    with _arenas_lock:
        users, arena = _arenas.get(arena_directory(shm_path), (0, None))
        if arena is None or arena.closed:
            users, arena = 0, Arena(shm_path, capacity_bytes, policy)
        _arenas[arena.directory] = (users + 1, arena)
        return arena


def _leave(arena: Arena) -> None:
    with _arenas_lock:
        users, current = _arenas.get(arena.directory, (0, None))
        if current is not arena:
            return
        if users > 1:
            _arenas[arena.directory] = (users - 1, arena)
        else:
            del _arenas[arena.directory]
            arena.close()
