"""One read of one entry into memory, shared by all who want it at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_ec.backends.local_cpu import Lease
    from lmcache_ec.key import CacheEngineKey

ABSENT, MEMORY_FULL = "absent", "memory_full"  # reasons of misses


class Fetch:
    """A read under way, and then its lease, until everybody who wanted it has dropped it.

    Thread-safe. Whoever got it from :meth:`StorageManager.prefetch` calls :meth:`drop` once.

    Attributes:
        key: Key of the entry.
        reason: Why there is no lease, as the counter of misses calls it; once it is done.
    """

    def __init__(self, key: CacheEngineKey) -> None:
        self.key = key
        self.reason = ABSENT
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._wanted = 0
        self._lease: Lease | None = None

    def want(self) -> None:
        """One more wants it."""
        with self._lock:
            self._wanted += 1

    def done(self) -> bool:
        """Whether the read has ended, found or not. Never blocks."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until :meth:`done`; False on time-out."""
        return self._finished.wait(timeout_s)

    def take(self) -> Lease | None:
        """After :meth:`done`: a lease of the caller's own, or None, and :attr:`reason` says why."""
        assert self.done()
        return None if self._lease is None else self._lease.share()

    def drop(self) -> None:
        """Say that the caller wants it no more. A read under way goes on, and fills memory."""
        with self._lock:
            self._wanted -= 1
            self._release_unwanted()

    def finish(self, lease: Lease | None, reason: str) -> None:
        """End the read; the lease belongs to this object from now on."""
        with self._lock:
            self._lease = lease
            self.reason = reason
            self._finished.set()
            self._release_unwanted()

    def _release_unwanted(self) -> None:
        if self._wanted == 0 and self._lease is not None:
            self._lease.release()
            self._lease = None
