"""Counters: exact under threads, closed to unknown names."""

from __future__ import annotations

import threading

import pytest

from lmcache_ec.events import Count, Events


def test_counts_by_name_and_label() -> None:
    events = Events()
    assert events.value("hits", "disk") == 0
    assert events.snapshot() == []
    events.count("hits", "memory")
    events.count("hits", "disk", 2)
    events.count("read_seconds", "disk", 0.25)
    assert events.value("hits", "disk") == 2
    assert events.snapshot() == [
        Count("hits", "disk", 2),
        Count("hits", "memory", 1),
        Count("read_seconds", "disk", 0.25),
    ]


def test_reading_a_counter_does_not_create_it() -> None:
    events = Events()
    events.value("drops", "memory_full")
    assert events.snapshot() == []


def test_increments_since_the_last_report() -> None:
    events = Events()
    reported: dict[tuple[str, str], float] = {}
    events.count("hits", "memory", 2)
    assert events.since(reported) == {("hits", "memory"): 2}
    assert events.since(reported) == {}
    events.count("hits", "memory")
    events.count("drops", "memory_full")
    assert events.since(reported) == {("hits", "memory"): 1, ("drops", "memory_full"): 1}


def test_unknown_counter_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="hitz"):
        Events().count("hitz", "memory")


def test_no_count_is_lost_between_threads() -> None:
    events = Events()

    def work() -> None:
        for _ in range(5000):
            events.count("hits", "memory")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.value("hits", "memory") == 20000
