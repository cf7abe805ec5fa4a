"""The memory tier between real processes: what one puts all get, and death lets go."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_ec.backends.index import PAGE, CachePolicy, Refusal
from lmcache_ec.backends.local_cpu import LocalCPUBackend, Reservation
from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

NAMESPACE = Namespace(ECMetadata("m"), "float32")
ENTRY = 16 * PAGE  # bytes of one entry
CAPACITY = 8 * ENTRY
SHAPE = (16, 1024)


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey(NAMESPACE, str(number))


def content(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def reserve(backend: LocalCPUBackend, number: int, nbytes: int = ENTRY) -> Reservation | Refusal:
    return backend.reserve(key(number), nbytes)


def put(backend: LocalCPUBackend, number: int) -> Refusal | None:
    """Put and release; None if it was put."""
    reservation = reserve(backend, number)
    if isinstance(reservation, Refusal):
        return reservation
    reservation.tensor(0, SHAPE).copy_(content(number))
    reservation.commit(0, SHAPE).release()
    return None


def found(backend: LocalCPUBackend, number: int) -> bool:
    """Whether the entry is there; its bytes must be right."""
    lease = backend.lease(key(number))
    if lease is None:
        return False
    assert torch.equal(lease.tensor, content(number))
    lease.release()
    return True


def make(shm: Path, events: Events | None = None) -> LocalCPUBackend:
    return LocalCPUBackend(shm, CAPACITY, CachePolicy.LRU, events or Events())


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def backend(shm: Path, events: Events) -> Iterator[LocalCPUBackend]:
    backend = make(shm, events)
    yield backend
    assert backend.usage().pinned == 0, "every test gives back what it holds"
    backend.arena.index.check()
    backend.close()
    assert list(shm.iterdir()) == []


def other_process(connection: Connection, shm: Path) -> None:
    """Runs the functions of this module, keeps leases and reservations, never closes."""
    backend = make(shm)
    kept: list[object] = []
    connection.send(None)
    while (question := connection.recv()) is not None:
        verb, number = question
        if verb == "lease":
            kept.append(backend.lease(key(number)))
            connection.send(kept[-1] is not None)
        elif verb == "reserve":
            kept.append(reserve(backend, number))
            connection.send(isinstance(kept[-1], Reservation))
        elif verb == "release":
            kept.pop().release()  # type: ignore[attr-defined]
            connection.send(None)
        else:
            connection.send(globals()[verb](backend, number))
    backend.close()


def racing(connection: Connection, shm: Path, seed: int) -> None:
    """Puts and gets at random, with every byte checked, until told to stop."""
    backend = make(shm)
    random = torch.Generator().manual_seed(seed)
    hits = 0
    connection.send(None)
    while not connection.poll():
        number = int(torch.randint(12, (1,), generator=random))
        if found(backend, number):
            hits += 1
        else:
            put(backend, number)
    connection.recv()
    connection.send(hits)
    connection.recv()
    backend.close()


def test_a_put_is_there_for_the_other_process_at_once(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any]
) -> None:
    child = start(other_process, shm)
    child.answer()
    for number in range(0, 6, 2):
        assert put(backend, number) is None
        assert child.ask(("found", number))
        assert child.ask(("put", number + 1)) is None
        assert found(backend, number + 1)
        assert put(backend, number + 1) is Refusal.EXISTS
    assert child.end() == 0


def test_what_is_being_written_is_seen_by_nobody(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any]
) -> None:
    child = start(other_process, shm)
    child.answer()
    reservation = reserve(backend, 1)
    assert isinstance(reservation, Reservation)
    assert not child.ask(("found", 1))
    assert child.ask(("put", 1)) is Refusal.BUSY
    assert not backend.contains(key(1))
    reservation.tensor(0, SHAPE).copy_(content(1))
    lease = reservation.commit(0, SHAPE)
    assert child.ask(("found", 1))
    lease.release()
    assert child.end() == 0


def test_another_process_cannot_evict_what_is_leased(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any], events: Events
) -> None:
    child = start(other_process, shm)
    child.answer()
    for number in range(8):
        assert put(backend, number) is None
    leases = [backend.lease(key(number)) for number in range(8)]
    assert child.ask(("put", 8)) is Refusal.FULL
    for number, lease in enumerate(leases):
        assert lease is not None
        assert torch.equal(lease.tensor, content(number))
    assert leases[3] is not None
    leases[3].release()
    assert child.ask(("put", 8)) is None
    assert [n for n in range(9) if backend.contains(key(n))] == [0, 1, 2, 4, 5, 6, 7, 8]
    for lease in leases:
        assert lease is not None
        lease.release()
    assert put(backend, 9) is None
    assert events.value("evictions", "memory") == 1
    assert child.end() == 0


def test_a_killed_process_lets_go_while_others_live(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any]
) -> None:
    child = start(other_process, shm)
    child.answer()
    for number in range(4):
        assert child.ask(("put", number)) is None
        assert child.ask(("lease", number))
    for number in range(4, 8):
        assert child.ask(("reserve", number))
    assert put(backend, 8) is Refusal.FULL
    assert put(backend, 4) is Refusal.BUSY
    child.kill()
    assert put(backend, 4) is None
    assert backend.usage().pinned == 0
    assert all(found(backend, number) for number in range(5))
    for number in range(8, 20):
        assert put(backend, number) is None


def test_the_next_process_to_join_reclaims(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any]
) -> None:
    child = start(other_process, shm)
    child.answer()
    put(backend, 1)
    assert child.ask(("lease", 1))
    assert child.ask(("reserve", 2))
    child.kill()
    assert backend.usage().pinned == 2 * ENTRY
    joined = start(other_process, shm)
    joined.answer()
    assert backend.usage().pinned == 0
    assert joined.end() == 0


def test_many_processes_and_deaths_give_no_wrong_byte(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any]
) -> None:
    children = [start(racing, shm, seed) for seed in range(3)]
    for child in children:
        child.answer()
    deadline = time.monotonic() + 1.5
    seed = 3
    while time.monotonic() < deadline:
        children.pop(0).kill()
        children.append(start(racing, shm, seed))
        children[-1].answer()
        seed += 1
    assert all(child.ask() >= 0 for child in children)
    assert all(child.end() == 0 for child in children)
    backend.arena.reclaim()
    assert backend.usage().pinned == 0
    for number in range(12):
        found(backend, number)


def test_leases_count_within_one_process(backend: LocalCPUBackend) -> None:
    put(backend, 1)
    first, second = backend.lease(key(1)), backend.lease(key(1))
    assert first is not None
    assert second is not None
    third = second.share()
    first.release()
    first.release()  # does nothing
    second.release()
    assert backend.usage().pinned == ENTRY
    assert torch.equal(third.tensor, content(1))
    third.release()
    assert backend.usage().pinned == 0


def test_an_extent_names_the_tensor_to_others(backend: LocalCPUBackend) -> None:
    put(backend, 1)
    lease = backend.lease(key(1))
    assert lease is not None
    seen = backend.view(lease.extent, torch.float32)
    assert seen.data_ptr() == lease.tensor.data_ptr()
    assert torch.equal(seen, content(1))
    lease.release()


def test_a_payload_may_follow_a_header(backend: LocalCPUBackend) -> None:
    reservation = reserve(backend, 1, PAGE + 40)
    assert isinstance(reservation, Reservation)
    reservation.tensor(PAGE, (2, 5)).copy_(torch.arange(10.0).view(2, 5))
    lease = reservation.commit(PAGE, (2, 5))
    assert (lease.payload_offset, len(lease.buffer)) == (PAGE, PAGE + 40)
    lease.release()
    again = backend.lease(key(1))
    assert again is not None
    assert torch.equal(again.tensor, torch.arange(10.0).view(2, 5))
    assert (again.payload_offset, len(again.buffer)) == (PAGE, PAGE + 40)
    again.release()


def test_what_is_published_is_there_and_may_go(
    backend: LocalCPUBackend, shm: Path, start: Callable[..., Any], events: Events
) -> None:
    child = start(other_process, shm)
    child.answer()
    for number in range(9):
        reservation = reserve(backend, number)
        assert isinstance(reservation, Reservation)
        reservation.tensor(0, SHAPE).copy_(content(number))
        reservation.publish(0, SHAPE)
        reservation.abort()  # does nothing
        assert child.ask(("found", number))
    assert backend.usage().pinned == 0
    assert events.value("evictions", "memory") == 1
    assert found(backend, 1)
    assert not found(backend, 0)
    assert child.end() == 0


def test_a_reservation_ends_where_its_neighbour_starts(backend: LocalCPUBackend) -> None:
    reservation = reserve(backend, 1, PAGE)
    assert isinstance(reservation, Reservation)
    with pytest.raises(AssertionError, match="beyond"):
        reservation.tensor(4, (PAGE // 4,))
    assert reservation.tensor(0, (PAGE // 4,)).nbytes == PAGE
    reservation.abort()


def test_abort_ends_a_reservation_once(backend: LocalCPUBackend) -> None:
    reservation = reserve(backend, 1)
    assert isinstance(reservation, Reservation)
    reservation.abort()
    other = reserve(backend, 1)
    assert isinstance(other, Reservation)
    reservation.abort()  # must not end the other one
    other.tensor(0, SHAPE).copy_(content(1))
    other.commit(0, SHAPE).release()
    other.abort()
    assert found(backend, 1)


def test_more_than_the_arena_holds(backend: LocalCPUBackend) -> None:
    for number in range(8):
        put(backend, number)
    assert reserve(backend, 10, CAPACITY + 1) is Refusal.FULL
    assert all(backend.contains(key(number)) for number in range(8))
    whole = reserve(backend, 10, CAPACITY)
    assert isinstance(whole, Reservation)
    whole.abort()


def test_after_close_every_verb_is_an_error_of_the_backend(shm: Path) -> None:
    backend, sibling = make(shm), make(shm)
    put(backend, 1)
    lease = backend.lease(key(1))
    reservation = reserve(backend, 2)
    assert lease is not None
    assert isinstance(reservation, Reservation)
    backend.close()
    assert sibling.usage().pinned == ENTRY  # the reservation
    lease.release()
    with pytest.raises(BackendError, match="closed"):
        backend.lease(key(1))
    with pytest.raises(BackendError, match="closed"):
        reserve(backend, 3)
    with pytest.raises(BackendError, match="closed"):
        reservation.commit(0, SHAPE)
    assert sibling.usage().pinned == 0
    assert found(sibling, 1)
    sibling.close()
    with pytest.raises(BackendError, match="left"):
        sibling.contains(key(1))
    with pytest.raises(BackendError, match="left"):
        sibling.usage()
    assert list(shm.iterdir()) == []


def test_an_index_that_fails_is_counted(shm: Path, events: Events) -> None:
    backend = make(shm, events)
    put(backend, 1)
    lease = backend.lease(key(1))
    reservation = reserve(backend, 2)
    assert lease is not None
    assert isinstance(reservation, Reservation)
    backend.arena.index.close()
    lease.release()
    reservation.abort()
    assert events.value("errors", "memory") == 2
    with pytest.raises(BackendError, match="index"):
        backend.contains(key(1))
    backend.close()
    assert list(shm.iterdir()) == []


def test_threads_share_leases_without_a_wrong_byte(backend: LocalCPUBackend) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        try:
            for _ in range(150):
                number = int(torch.randint(12, (1,), generator=random))
                if not found(backend, number):
                    put(backend, number)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
