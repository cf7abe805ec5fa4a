"""Counters of what the cache does, kept in one place and read by whoever exports them."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

COUNTERS = {
    # name: (label, what it counts)
    "hits": ("tier", "Lookups answered by this tier"),
    "misses": ("reason", "Lookups that no tier answered in time"),
    "bytes_read": ("tier", "Payload bytes handed out or promoted from this tier"),
    "bytes_written": ("tier", "Payload bytes accepted by this tier"),
    "read_seconds": ("tier", "Time spent reading from this tier"),
    "write_seconds": ("tier", "Time spent writing to this tier"),
    "drops": ("reason", "Tensors that were not kept"),
    "corruptions": ("tier", "Entries found damaged and removed"),
    "evictions": ("tier", "Entries removed to make room"),
    "errors": ("tier", "Failed operations of this tier"),
}
"""Every counter, with the name of its one label and its help text."""


@dataclass(frozen=True)
class Count:
    """One counter's value at one moment."""

    name: str
    label: str
    value: float


class Events:
    """Thread-safe counters, one value for each name and label. Never blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)

    def count(self, name: str, label: str, amount: float = 1) -> None:
        """Add ``amount`` to a counter of ``COUNTERS``."""
        assert name in COUNTERS, name
        with self._lock:
            self._values[name, label] += amount

    def value(self, name: str, label: str) -> float:
        """Current value of one counter, 0 if it never counted."""
        with self._lock:
            return self._values.get((name, label), 0)

    def since(self, reported: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """Increments over ``reported``, by name and label, which is brought up to date."""
        grown = {}
        for count in self.snapshot():
            key = (count.name, count.label)
            if increment := count.value - reported.get(key, 0):
                grown[key] = increment
                reported[key] = count.value
        return grown

    def snapshot(self) -> list[Count]:
        """All counters that ever counted, sorted."""
        with self._lock:
            return [Count(name, label, v) for (name, label), v in sorted(self._values.items())]
