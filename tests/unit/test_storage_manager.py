"""Memory over a real disk tier, seen and disturbed by a scripted wrapper between the two."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_ec.backends.index import PAGE, CachePolicy
from lmcache_ec.backends.local_cpu import LocalCPUBackend, Reservation
from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace
from lmcache_ec.storage_manager import StorageManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from lmcache_ec.backends.base import Allocate
    from lmcache_ec.backends.local_cpu import Lease

NAMESPACE = Namespace(ECMetadata("m"), "float32")
SHAPE = (15, 1024)  # with a header of one page, 16 pages
ENTRY = 16 * PAGE
CAPACITY = 4 * ENTRY
TIMEOUT_S = 20


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey(NAMESPACE, str(number))


def content(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


class Scripted:
    """A tier that notes every call and runs ``before[verb]`` in front of it."""

    name = "disk"

    def __init__(self, tier: LocalDiskBackend) -> None:
        self._tier = tier
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}

    def _note(self, verb: str) -> None:
        self.calls.append(verb)
        self.before.get(verb, bool)()

    def contains(self, key: CacheEngineKey) -> bool:
        self._note("contains")
        return self._tier.contains(key)

    def get(self, key: CacheEngineKey, allocate: Allocate) -> memoryview | None:
        self._note("get")
        return self._tier.get(key, allocate)

    def put(self, key: CacheEngineKey, parts: Sequence[memoryview]) -> None:
        self._note("put")
        self._tier.put(key, parts)

    def delete(self, key: CacheEngineKey) -> None:
        self._note("delete")
        self._tier.delete(key)

    def close(self) -> None:
        self._note("close")
        self._tier.close()


class Gate:
    """Stops whoever calls it until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


def fail() -> None:
    raise BackendError("scripted")


class Stack:
    """A manager with its parts, and a disk that outlives it."""

    def __init__(self, shm: Path, disk: Path, queue_bytes: int = 100 * ENTRY) -> None:
        self.events = Events()
        self.disk = disk
        self.memory = LocalCPUBackend(shm, CAPACITY, CachePolicy.LRU, self.events)
        self.tier = Scripted(LocalDiskBackend(disk, 1 << 30, self.events))
        self.manager = StorageManager(self.memory, [self.tier], queue_bytes, self.events)

    def put(self, number: int) -> bool:
        return self.manager.put(key(number), content(number))

    def fetch(self, number: int) -> Lease | None:
        fetch = self.manager.prefetch(key(number))
        assert fetch.wait(TIMEOUT_S)
        lease = fetch.take()
        fetch.drop()
        if lease is not None:
            assert torch.equal(lease.tensor, content(number))
        return lease

    def fetched(self, number: int) -> bool:
        lease = self.fetch(number)
        if lease is None:
            return False
        lease.release()
        return True

    def fill(self) -> list[Lease]:
        """Leases on all of memory."""
        leases = []
        for number in range(100, 104):
            assert self.put(number)
            assert self.manager.flush(TIMEOUT_S)
            lease = self.manager.lease(key(number))
            assert lease is not None
            leases.append(lease)
        return leases

    def only_on_disk(self, *numbers: int) -> None:
        """Put entries and push them out of memory."""
        for number in numbers:
            assert self.put(number)
        assert self.manager.flush(TIMEOUT_S)
        for lease in self.fill():
            lease.release()
        assert not any(self.memory.contains(key(number)) for number in numbers)
        self.tier.calls.clear()

    def file(self, number: int) -> Path:
        name = key(number).name
        return self.disk / "ec" / name[:2] / f"{name}.safetensors"


@pytest.fixture
def stack(shm: Path, tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(shm, tmp_path / "disk")
    yield stack
    stack.tier.before.clear()
    assert stack.manager.flush(TIMEOUT_S)
    assert stack.memory.usage().pinned == 0
    assert stack.manager.pending_bytes == 0
    stack.memory.arena.index.check()
    stack.manager.close(TIMEOUT_S)
    assert list(shm.iterdir()) == []


def test_a_put_is_written_down_and_comes_back(stack: Stack) -> None:
    stack.only_on_disk(1)
    assert stack.manager.contains(key(1))
    assert stack.manager.lease(key(1)) is None
    assert stack.fetched(1)
    lease = stack.manager.lease(key(1))  # now in memory
    assert lease is not None
    assert lease.tier == "memory"
    lease.release()
    assert stack.tier.calls.count("get") == 1
    assert not stack.manager.contains(key(2))
    assert not stack.fetched(2)


def test_what_was_fetched_can_be_written_down_again(stack: Stack) -> None:
    stack.only_on_disk(1)
    assert stack.fetched(1)  # in memory, behind its header
    stack.file(1).unlink()
    assert stack.put(1)
    assert stack.manager.flush(TIMEOUT_S)
    assert stack.file(1).exists()
    for lease in stack.fill():
        lease.release()
    assert stack.fetched(1)


def flip_a_bit(stack: Stack) -> None:
    with stack.file(1).open("rb+") as file:
        file.seek(2 * PAGE + 5)
        byte = file.read(1)[0]
        file.seek(2 * PAGE + 5)
        file.write(bytes([byte ^ 1]))


def cut(stack: Stack) -> None:
    with stack.file(1).open("rb+") as file:
        file.truncate(5 * PAGE)


def empty(stack: Stack) -> None:
    stack.file(1).write_bytes(b"")


def swap(stack: Stack) -> None:
    shutil.copyfile(stack.file(2), stack.file(1))


def enlarge(stack: Stack) -> None:
    with stack.file(1).open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("damage", [flip_a_bit, cut, empty, swap, enlarge])
def test_a_corrupt_entry_is_a_miss_and_is_removed(
    stack: Stack, damage: Callable[[Stack], None]
) -> None:
    stack.only_on_disk(1, 2)
    damage(stack)
    assert not stack.fetched(1)
    assert not stack.file(1).exists()
    assert stack.events.value("corruptions", "disk") == 1
    assert not stack.memory.contains(key(1))
    assert not stack.fetched(1)
    assert stack.events.value("corruptions", "disk") == 1
    assert stack.fetched(2)
    assert stack.put(1)
    assert stack.manager.flush(TIMEOUT_S)
    assert stack.file(1).exists()


def test_wants_of_one_entry_share_one_read(stack: Stack) -> None:
    stack.only_on_disk(1)
    stack.tier.before["get"] = gate = Gate()
    fetches = [stack.manager.prefetch(key(1)) for _ in range(8)]
    assert gate.entered.wait(TIMEOUT_S)
    fetches += [stack.manager.prefetch(key(1)) for _ in range(8)]
    assert not any(fetch.done() for fetch in fetches)
    gate.opened.set()
    for fetch in fetches:
        assert fetch.wait(TIMEOUT_S)
        lease = fetch.take()
        fetch.drop()
        assert lease is not None
        assert torch.equal(lease.tensor, content(1))
        lease.release()
    assert stack.tier.calls.count("get") == 1


def test_a_fetch_that_nobody_wants_any_more_leaves_no_pin(stack: Stack) -> None:
    stack.only_on_disk(1)
    stack.tier.before["get"] = gate = Gate()
    stack.manager.prefetch(key(1)).drop()
    fetch = stack.manager.prefetch(key(1))  # joins the one that was dropped
    gate.opened.set()
    assert fetch.wait(TIMEOUT_S)
    assert stack.memory.usage().pinned == ENTRY  # until it is taken or dropped
    fetch.drop()
    assert stack.memory.usage().pinned == 0
    assert stack.memory.contains(key(1))
    assert stack.tier.calls.count("get") == 1


def test_dropped_before_it_is_done(stack: Stack) -> None:
    stack.only_on_disk(1)
    stack.tier.before["get"] = gate = Gate()
    fetch = stack.manager.prefetch(key(1))
    assert gate.entered.wait(TIMEOUT_S)
    fetch.drop()
    gate.opened.set()
    assert stack.manager._reads.flush(TIMEOUT_S)
    assert stack.memory.usage().pinned == 0
    assert stack.memory.contains(key(1))


def test_a_slow_tier_does_not_keep_memory_waiting(stack: Stack) -> None:
    stack.only_on_disk(1)
    assert stack.put(2)
    assert stack.manager.flush(TIMEOUT_S)
    gate = Gate()
    stack.tier.before |= {"get": gate, "put": gate}
    fetch = stack.manager.prefetch(key(1))
    assert stack.put(3)
    assert gate.entered.wait(TIMEOUT_S)
    lease = stack.manager.lease(key(2))
    assert lease is not None
    lease.release()
    assert stack.manager.lease(key(1)) is None
    assert not fetch.done()
    gate.opened.set()
    assert fetch.wait(TIMEOUT_S)
    fetch.drop()


def test_a_full_write_queue_drops_and_leaves_no_pin(shm: Path, tmp_path: Path) -> None:
    stack = Stack(shm, tmp_path / "disk", queue_bytes=2 * 15 * PAGE)
    stack.tier.before["put"] = gate = Gate()
    assert all(stack.put(number) for number in range(3))
    assert stack.manager.pending_bytes == 2 * 15 * PAGE
    assert stack.events.value("drops", "write_queue_full") == 1
    assert stack.memory.usage().pinned == 2 * ENTRY - 2 * PAGE
    gate.opened.set()
    assert stack.manager.flush(TIMEOUT_S)
    assert stack.memory.usage().pinned == 0
    assert [stack.file(number).exists() for number in range(3)] == [True, True, False]
    assert stack.fetched(2)
    stack.manager.close(TIMEOUT_S)


@pytest.mark.parametrize("verb", ["contains", "get", "put", "delete"])
def test_a_failing_tier_is_a_miss(stack: Stack, verb: str) -> None:
    stack.only_on_disk(1)
    stack.tier.before[verb] = fail
    errors = stack.events.value("errors", "disk")
    if verb == "contains":
        assert not stack.manager.contains(key(1))
    elif verb == "get":
        assert not stack.fetched(1)
    elif verb == "put":
        assert stack.put(2)
        assert stack.manager.flush(TIMEOUT_S)
        assert stack.events.value("drops", "disk_failed") == 1
        assert stack.fetched(2)
    else:
        cut(stack)
        assert not stack.fetched(1)
    assert stack.events.value("errors", "disk") == errors + 1
    stack.tier.before.clear()
    assert stack.fetched(1) == (verb != "delete")


def test_a_tier_with_a_bug_leaves_nobody_waiting(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.only_on_disk(1)
    stack.tier.before["get"] = lambda: 1 / 0
    assert not stack.fetched(1)
    assert stack.manager._reads.flush(TIMEOUT_S)
    assert "lmcache-ec-read: work failed" in caplog.text


def test_memory_full_of_leases(stack: Stack) -> None:
    stack.only_on_disk(1)
    leases = stack.fill()
    assert not stack.put(2)
    assert stack.events.value("drops", "memory_full") == 1
    assert not stack.fetched(1)
    assert stack.file(1).exists()
    for number, lease in enumerate(leases, 100):
        assert torch.equal(lease.tensor, content(number))
        lease.release()
    assert stack.fetched(1)
    assert stack.put(2)


def test_more_than_memory_holds(stack: Stack) -> None:
    assert stack.put(1)
    assert not stack.manager.put(key(2), torch.zeros(CAPACITY // 4 + 1))
    assert stack.events.value("drops", "memory_full") == 1
    assert stack.memory.contains(key(1))


def test_an_entry_that_grew_beyond_memory_on_disk(stack: Stack) -> None:
    stack.only_on_disk(1)
    with stack.file(1).open("rb+") as file:
        file.truncate(CAPACITY + 1)
    assert not stack.fetched(1)


def test_a_fetch_waits_for_who_is_bringing_the_same_entry(stack: Stack) -> None:
    stack.only_on_disk(1)
    reservation = stack.memory.reserve(key(1), 15 * PAGE)
    assert isinstance(reservation, Reservation)
    assert stack.put(1)  # will be there
    fetch = stack.manager.prefetch(key(1))
    assert not fetch.wait(0.05)
    reservation.tensor(0, SHAPE).copy_(content(1))
    reservation.commit(0, SHAPE).release()
    assert fetch.wait(TIMEOUT_S)
    lease = fetch.take()
    fetch.drop()
    assert lease is not None
    assert torch.equal(lease.tensor, content(1))
    lease.release()


def test_a_fetch_goes_on_when_the_other_one_gives_up(stack: Stack) -> None:
    stack.only_on_disk(1)
    reservation = stack.memory.reserve(key(1), 15 * PAGE)
    assert isinstance(reservation, Reservation)
    fetch = stack.manager.prefetch(key(1))
    assert not fetch.wait(0.05)
    reservation.abort()
    assert fetch.wait(TIMEOUT_S)
    lease = fetch.take()
    fetch.drop()
    assert lease is not None
    lease.release()


def test_a_tensor_is_kept_as_it_reads_not_as_it_lies_in_memory(stack: Stack) -> None:
    negated = torch.tensor([1 + 2j]).conj().imag  # torch only marks it; its memory holds 2.0
    assert stack.manager.put(key(1), negated)
    lease = stack.manager.lease(key(1))
    assert lease is not None
    assert lease.tensor.tolist() == [-2.0]
    lease.release()
    assert stack.manager.flush(TIMEOUT_S)


def test_a_tensor_that_cannot_be_copied_leaves_no_reservation(stack: Stack) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        stack.manager.put(key(1), torch.empty(SHAPE, device="meta"))
    assert stack.put(1)
    assert stack.fetched(1)


def test_close_does_not_wait_for_a_stuck_tier_for_ever(
    shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stack = Stack(shm, tmp_path / "disk")
    stack.tier.before["put"] = gate = Gate()
    assert stack.put(1)
    assert stack.put(2)
    assert gate.entered.wait(TIMEOUT_S)
    stack.manager.close(0.05)
    assert "not done in time" in caplog.text
    assert list(shm.iterdir()) == []
    assert stack.tier.calls == ["put", "close"]
    assert not stack.put(3)
    assert stack.manager.lease(key(1)) is None
    assert not stack.fetched(1)
    stack.manager.close(0.05)
    gate.opened.set()


def test_what_is_queued_is_written_down_by_close(shm: Path, tmp_path: Path) -> None:
    stack = Stack(shm, tmp_path / "disk")
    assert all(stack.put(number) for number in range(3))
    stack.manager.close(TIMEOUT_S)
    again = Stack(shm, tmp_path / "disk")
    assert all(again.fetched(number) for number in range(3))
    again.manager.close(TIMEOUT_S)
