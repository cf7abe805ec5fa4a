"""The interface of every tier below memory: five verbs over whole entries.

A tier stores and returns bytes (see ``docs/entry-format.md``). It never looks inside them: the
storage manager verifies what comes back, and deletes what is corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmcache_ec.key import CacheEngineKey

Allocate = Callable[[int], memoryview | None]
"""Asks for room for that many bytes; a writable view of exactly that length, or None."""


class Backend(Protocol):
    """A tier of whole entries. Any thread may call any verb at any time.

    Every verb may block for the tier's own I/O, so none is called on a scheduler or model thread.
    Every failure is a ``BackendError``; a missing entry is not a failure.
    """

    name: str
    """What counters and log lines call this tier, for example "disk"."""

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether an entry of this name is there now. Promises nothing about the next moment."""
        ...

    def get(self, key: CacheEngineKey, allocate: Allocate) -> memoryview | None:
        """Read the whole entry into memory of the caller.

        ``allocate`` is called at most once, with the entry's size in bytes, before any byte is
        read. Returns the view that it gave, filled to the last byte; None when the entry is
        absent or when ``allocate`` returned None.
        """
        ...

    def put(self, key: CacheEngineKey, parts: Sequence[memoryview]) -> None:
        """Publish the concatenation of ``parts`` as the entry, whole or not at all.

        An entry that is already there is kept or replaced by the same content. ``parts`` are
        read only during the call.
        """
        ...

    def delete(self, key: CacheEngineKey) -> None:
        """Remove the entry if it is there."""
        ...

    def close(self) -> None:
        """Release what the tier holds. Idempotent; no verb is called afterwards."""
        ...
