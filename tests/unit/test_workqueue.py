"""Background work: bounded in bytes, in order, and ended by close."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest

from lmcache_ec.workqueue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 20


class Gate:
    """Work that tells when it runs, and runs until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_runs_in_order_off_the_callers_thread() -> None:
    queue = WorkQueue("test", 1, 1000)
    done: list[tuple[int, threading.Thread]] = []

    def note(number: int) -> None:
        done.append((number, threading.current_thread()))

    for number in range(10):
        assert queue.submit(partial(note, number), 1)
    assert queue.flush(TIMEOUT_S)
    assert [number for number, _ in done] == list(range(10))
    assert threading.current_thread() not in {thread for _, thread in done}
    queue.close(TIMEOUT_S)


def test_bytes_are_bounded_and_come_back(gate: Gate) -> None:
    queue = WorkQueue("test", 1, 100)
    assert queue.submit(gate, 60)
    assert gate.entered.wait(TIMEOUT_S)
    ran: list[int] = []
    assert not queue.submit(lambda: ran.append(1), 41)  # running work counts, too
    assert queue.submit(lambda: ran.append(2), 40)
    assert queue.pending_bytes == 100
    assert not queue.submit(lambda: ran.append(3), 1)
    gate.opened.set()
    assert queue.flush(TIMEOUT_S)
    assert (ran, queue.pending_bytes) == ([2], 0)
    assert queue.submit(lambda: ran.append(4), 100)
    queue.close(TIMEOUT_S)
    assert ran == [2, 4]


def test_an_empty_queue_takes_any_size(gate: Gate) -> None:
    queue = WorkQueue("test", 1, 100)
    assert queue.submit(gate, 101)
    assert not queue.submit(gate, 1)
    gate.opened.set()
    queue.close(TIMEOUT_S)


def test_shared_memory_counts_once(gate: Gate) -> None:
    queue = WorkQueue("test", 1, 100)
    batch = object()
    assert queue.submit(gate, 90, memory=batch)
    assert queue.submit(lambda: None, 90, memory=batch)
    assert queue.pending_bytes == 90
    assert not queue.submit(lambda: None, 11)
    gate.opened.set()
    assert queue.flush(TIMEOUT_S)
    assert queue.pending_bytes == 0
    queue.close(TIMEOUT_S)


def test_memory_is_free_before_it_is_counted_free() -> None:
    class Batch:
        def touch(self) -> None:
            pass

    queue = WorkQueue("test", 1, 100)
    batch = Batch()
    alive = weakref.ref(batch)
    assert queue.submit(batch.touch, 100)
    del batch
    assert queue.flush(TIMEOUT_S)
    gc.collect()
    assert alive() is None
    queue.close(TIMEOUT_S)


def test_failed_work_is_logged_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    queue = WorkQueue("saver", 1, 100)
    ran = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    assert queue.submit(fail, 100)
    assert queue.flush(TIMEOUT_S)
    assert queue.submit(ran.set, 100)
    queue.close(TIMEOUT_S)
    assert ran.is_set()
    assert [record.message for record in caplog.records] == ["saver: work failed"]


def test_threads_run_at_the_same_time() -> None:
    queue = WorkQueue("test", 3, 100)
    barrier = threading.Barrier(3, timeout=TIMEOUT_S)
    met: list[int] = []
    for _ in range(3):
        assert queue.submit(lambda: met.append(barrier.wait()), 1)
    assert queue.flush(TIMEOUT_S)
    assert sorted(met) == [0, 1, 2]
    queue.close(TIMEOUT_S)


def test_flush_gives_up_in_time(gate: Gate) -> None:
    queue = WorkQueue("test", 1, 100)
    queue.submit(gate, 1)
    assert not queue.flush(0.01)
    gate.opened.set()
    assert queue.flush(TIMEOUT_S)
    queue.close(TIMEOUT_S)


def test_close_forgets_what_is_late(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    queue = WorkQueue("saver", 1, 100)
    ran: list[int] = []
    queue.submit(gate, 1)
    queue.submit(lambda: ran.append(1), 1)
    assert gate.entered.wait(TIMEOUT_S)
    queue.close(0.01)
    assert caplog.record_tuples == [
        ("lmcache_ec.workqueue", logging.WARNING, "saver: 1 pieces of work were not done in time")
    ]
    assert not queue.submit(lambda: ran.append(2), 1)
    assert queue.pending_bytes == 1  # only what still runs
    gate.opened.set()
    queue.close(TIMEOUT_S)
    assert (ran, queue.pending_bytes) == ([], 0)
