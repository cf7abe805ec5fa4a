"""The tiers as one: look down, promote up, write down.

A put lands in memory and returns; the tiers below get it in the background. A get looks in
memory, then in each tier below; what it finds there is verified and kept in memory. Every tensor
that leaves here is a lease on memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from lmcache_ec import entry
from lmcache_ec.backends.index import Refusal
from lmcache_ec.backends.local_cpu import Lease, LocalCPUBackend, Reservation
from lmcache_ec.errors import BackendError, CorruptEntryError
from lmcache_ec.fetch import ABSENT, MEMORY_FULL, Fetch
from lmcache_ec.workqueue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from lmcache_ec.backends.base import Backend
    from lmcache_ec.events import Events
    from lmcache_ec.key import CacheEngineKey

logger = logging.getLogger(__name__)

FETCH_THREADS = 4
BUSY_TIMEOUT_S = 5.0  # how long a fetch waits for another process that brings the same entry


class StorageManager:
    """Memory and the tiers below it. Thread-safe.

    Args:
        memory: The memory tier, closed by this object.
        tiers: The tiers below, fastest first, closed by this object.
        max_queue_bytes: Bound on the bytes pinned in memory until they are written down.
        events: Where everything is counted.
    """

    def __init__(
        self,
        memory: LocalCPUBackend,
        tiers: Sequence[Backend],
        max_queue_bytes: int,
        events: Events,
    ) -> None:
        self.memory = memory
        self._tiers = list(tiers)
        self._events = events
        self._writes = WorkQueue("lmcache-ec-write", 1, max_queue_bytes)
        self._reads = WorkQueue("lmcache-ec-read", FETCH_THREADS, 1 << 62)
        self._fetches: dict[bytes, Fetch] = {}
        self._fetches_lock = threading.Lock()
        self._closed = False

    @property
    def has_tiers(self) -> bool:
        """Whether there is any tier below memory."""
        return bool(self._tiers)

    @property
    def pending_bytes(self) -> int:
        """Bytes waiting to be written down."""
        return self._writes.pending_bytes

    # ------------------------------------------------------------------ reading

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether some tier has the entry now. Asks the tiers below, so it may block for I/O."""
        tiers: list[LocalCPUBackend | Backend] = [self.memory, *self._tiers]
        for tier in tiers:
            try:
                if tier.contains(key):
                    return True
            except BackendError as error:
                self._failed(tier.name, error)
        return False

    def lease(self, key: CacheEngineKey) -> Lease | None:
        """Lease the entry if memory has it. Tens of microseconds, no I/O, not counted."""
        try:
            return self.memory.lease(key)
        except BackendError as error:
            self._failed("memory", error)
            return None

    def count_hit(self, lease: Lease) -> None:
        """Count that a leased entry is used."""
        self._events.count("hits", lease.tier)
        self._events.count("bytes_read", lease.tier, lease.nbytes)

    def prefetch(self, key: CacheEngineKey) -> Fetch:
        """Bring the entry into memory in the background. Never blocks."""
        with self._fetches_lock:
            fetch = self._fetches.get(key.digest)
            if fetch is None:
                fetch = Fetch(key)
                if self._reads.submit(lambda: self._run_fetch(fetch), 0):
                    self._fetches[key.digest] = fetch
                else:  # closed
                    fetch.finish(None, ABSENT)
            fetch.want()
            return fetch

    def _run_fetch(self, fetch: Fetch) -> None:
        found: Lease | Refusal | None = None
        try:
            found = self._fetch(fetch.key)
        finally:
            with self._fetches_lock:
                self._fetches.pop(fetch.key.digest, None)
            reason = MEMORY_FULL if found is Refusal.FULL else ABSENT
            fetch.finish(found if isinstance(found, Lease) else None, reason)

    def _fetch(self, key: CacheEngineKey) -> Lease | Refusal | None:
        """The entry from the first tier that has it, or why memory did not take it."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while not self._closed:
            try:
                if lease := self.memory.lease(key):
                    return lease
            except BackendError as error:
                self._failed("memory", error)
                return None
            refusal = None
            for number, tier in enumerate(self._tiers):
                found = self._read(tier, key)
                if isinstance(found, Lease):
                    found.tier = tier.name
                    self._write_down(key, self._tiers[:number])
                    return found
                refusal = refusal or found
            if refusal not in (Refusal.BUSY, Refusal.EXISTS) or time.monotonic() > deadline:
                return refusal
            if refusal is Refusal.BUSY:
                time.sleep(0.001)  # another process is bringing it
        return None

    def _read(self, tier: Backend, key: CacheEngineKey) -> Lease | Refusal | None:
        """Read the entry from one tier into memory and verify it; None when it is not there."""
        reservation: Reservation | None = None
        refusal: Refusal | None = None

        def allocate(nbytes: int) -> memoryview | None:
            nonlocal reservation, refusal
            answer = self.memory.reserve(key, nbytes)
            if isinstance(answer, Refusal):
                refusal = answer
                return None
            reservation = answer
            return _bytes(reservation.buffer).data[:nbytes]

        began = time.monotonic()
        lease = None
        try:
            view = tier.get(key, allocate)
            if view is not None and reservation is not None:
                info = entry.parse(view, key)
                entry.verify(view, info)
                lease = reservation.commit(info.payload_offset, info.shape)
        except CorruptEntryError as error:
            logger.warning("lmcache-ec: removed a corrupt entry from %s: %s", tier.name, error)
            self._events.count("corruptions", tier.name)
            self._delete(tier, key)
        except BackendError as error:
            self._failed(tier.name, error)
        finally:
            if lease is None and reservation is not None:
                reservation.abort()
        if lease is not None:
            self._events.count("read_seconds", tier.name, time.monotonic() - began)
        return lease or refusal

    def _delete(self, tier: Backend, key: CacheEngineKey) -> None:
        try:
            tier.delete(key)
        except BackendError as error:
            self._failed(tier.name, error)

    # ------------------------------------------------------------------ writing

    def put(self, key: CacheEngineKey, tensor: torch.Tensor) -> bool:
        """Copy a tensor into memory and queue it for the tiers below.

        One copy, which casts to the key's dtype and brings it to the host. True when the entry is
        or will be there, whoever wrote it; False when memory has no room for it now.
        """
        began = time.monotonic()
        nbytes = tensor.numel() * getattr(torch, key.dtype).itemsize
        try:
            answer = self.memory.reserve(key, nbytes)
            if isinstance(answer, Refusal):
                if answer is Refusal.FULL:
                    self._events.count("drops", "memory_full")
                    return False
                self._write_down(key, self._tiers)
                return True
            try:
                _copy(answer.tensor(0, tuple(tensor.shape)), tensor)
            except BaseException:
                answer.abort()
                raise
            if self._tiers:
                lease = answer.commit(0, tuple(tensor.shape))
            else:
                lease = None
                answer.publish(0, tuple(tensor.shape))
        except BackendError as error:
            self._failed("memory", error)
            return False
        self._events.count("bytes_written", "memory", nbytes)
        self._events.count("write_seconds", "memory", time.monotonic() - began)
        if lease is not None:
            self._queue_write(lease, self._tiers)
        return True

    def _write_down(self, key: CacheEngineKey, tiers: Sequence[Backend]) -> None:
        """Queue the entry, which memory has, for these tiers."""
        if not tiers:
            return
        try:
            lease = self.memory.lease(key)
        except BackendError as error:
            self._failed("memory", error)
            return
        if lease is None:  # being written by another process, which writes it down
            return
        self._queue_write(lease, tiers)

    def _queue_write(self, lease: Lease, tiers: Sequence[Backend]) -> None:
        """Queue an entry for these tiers; the lease is released here or after the write."""
        if not self._writes.submit(lambda: self._write(lease, tiers), lease.nbytes):
            self._events.count("drops", "write_queue_full")
            lease.release()

    def _write(self, lease: Lease, tiers: Sequence[Backend]) -> None:
        try:
            payload = _bytes(lease.buffer).data[lease.payload_offset :]
            header = entry.build_header(
                lease.key,
                lease.extent.shape,
                lease.key.dtype,
                entry.checksum(payload),
                int(time.time()),
            )
            for tier in tiers:
                began = time.monotonic()
                try:
                    tier.put(lease.key, [memoryview(header), payload])
                except BackendError as error:
                    self._failed(tier.name, error)
                    self._events.count("drops", f"{tier.name}_failed")
                else:
                    self._events.count("bytes_written", tier.name, len(payload))
                    self._events.count("write_seconds", tier.name, time.monotonic() - began)
        finally:
            lease.release()

    def _failed(self, tier: str, error: BackendError) -> None:
        logger.debug("%s tier: %s", tier, error)
        self._events.count("errors", tier)

    # ------------------------------------------------------------------ the end

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is in the tiers below; False on time-out."""
        return self._writes.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write down what is queued, at most for ``timeout_s``, and leave every tier."""
        self._closed = True
        self._writes.close(timeout_s)
        self._reads.close(timeout_s)
        for tier in self._tiers:
            try:
                tier.close()
            except BackendError as error:
                self._failed(tier.name, error)
        self.memory.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and cast; one plain memory copy where that is all.

    ``copy_`` on CPU would start a team of threads for each thread that calls it, and puts come
    from background threads while a model computes.
    """
    if (
        source.device.type == "cpu"
        and source.dtype == target.dtype
        and source.is_contiguous()
        and not source.is_neg()
    ):
        assert target.shape == source.shape
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.view(-1).view(torch.uint8).numpy()
