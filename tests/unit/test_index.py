"""The index of the arena: states, orders of eviction, free extents, dead holders."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_ec.backends.index import PAGE, CachePolicy, Index, Refusal, Slot, State
from lmcache_ec.backends.transaction import ENTRY, FREE, Transaction
from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ME, OTHER = b"m" * 16, b"o" * 16


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def make(path: Path, pages: int, policy: CachePolicy = CachePolicy.LRU) -> Index:
    index = Index(path / "index", ME, policy)
    index.resize(pages * PAGE)
    index.grow(0, pages * PAGE)
    return index


@pytest.fixture
def index(shm: Path) -> Iterator[Index]:
    """Ten pages, all of them with blocks."""
    index = make(shm, 10)
    yield index
    index.check()
    index.close()


def put(index: Index, number: int, pages: int = 1) -> Slot:
    """An entry that nobody has leased."""
    slot, _ = index.reserve(digest(number), pages * PAGE)
    assert isinstance(slot, Slot), slot
    index.commit(digest(number), 0, pages * PAGE, (pages, PAGE))
    index.release(digest(number))
    return slot


def free_extents(index: Index) -> list[tuple[int, int]]:
    with index._read() as txn:
        return [
            (int.from_bytes(offset, "big") // PAGE, int.from_bytes(length, "big") // PAGE)
            for offset, length in txn.scan(FREE)
        ]


def test_entry_is_seen_from_commit_on(index: Index) -> None:
    slot, evicted = index.reserve(digest(1), 2 * PAGE)
    assert isinstance(slot, Slot)
    assert (slot.state, slot.length, slot.owner, evicted) == (State.WRITING, 2 * PAGE, ME, 0)
    assert not index.contains(digest(1))
    assert index.lease(digest(1)) is None
    assert index.reserve(digest(1), PAGE) == (Refusal.BUSY, 0)
    ready = index.commit(digest(1), 4096, 100, (5, 10))
    assert (ready.state, ready.payload_offset, ready.payload_bytes) == (State.READY, 4096, 100)
    assert (ready.shape, ready.pins) == ((5, 10), 1)
    assert index.contains(digest(1))
    assert index.reserve(digest(1), PAGE) == (Refusal.EXISTS, 0)
    leased = index.lease(digest(1))
    assert leased is not None
    assert (leased.offset, leased.pins, leased.hits) == (slot.offset, 2, 1)


def test_entry_without_a_pin_is_the_last_to_go(index: Index) -> None:
    for number in range(10):
        put(index, number)
    index.lease(digest(0))
    index.lease(digest(1))
    index.release(digest(0))
    assert isinstance(index.reserve(digest(10), PAGE)[0], Slot)  # evicts 2
    ready = index.commit(digest(10), 0, PAGE, (1, PAGE), pins=0)
    assert (ready.state, ready.pins, ready.owner) == (State.READY, 0, b"")
    assert index.contains(digest(10))
    assert index.usage().pinned == PAGE  # entry 1
    gone = []
    for number in range(20, 29):
        assert index.reserve(digest(number), PAGE)[1] == 1
        gone += [n for n in range(11) if not index.contains(digest(n)) and n not in gone]
    assert gone == [2, 3, 4, 5, 6, 7, 8, 9, 0, 10]
    assert index.reserve(digest(30), PAGE) == (Refusal.FULL, 0)
    index.reclaim(ME)
    assert index.holders() == set()
    assert index.usage().pinned == 0


def break_lmdb(txn: Transaction) -> None:
    txn.take_free(PAGE, 9 * PAGE)
    txn.put(b"", b"LMDB has no empty keys")


def break_python(txn: Transaction) -> None:
    txn.take_free(PAGE, 9 * PAGE)
    txn.pinned //= 0


@pytest.mark.parametrize(
    ("damage", "error"), [(break_lmdb, BackendError), (break_python, ZeroDivisionError)]
)
def test_what_fails_changes_nothing_and_locks_nobody_out(
    index: Index, damage: Callable[[Transaction], None], error: type[Exception]
) -> None:
    put(index, 1)
    before = index.usage()
    with pytest.raises(error), index._write() as txn:
        damage(txn)
    assert index.usage() == before
    put(index, 2)


def test_damaged_totals_are_an_error_of_the_backend(shm: Path) -> None:
    index = make(shm, 10)
    with index._write() as txn:
        txn.put(ENTRY + digest(1), b"x")
    with pytest.raises(BackendError, match="record of 1 bytes"):
        index.check()
    with index._env.begin(write=True) as raw:
        raw.put(b"totals", b"x" * 7)
    for verb in (index.usage, index.check, lambda: index.reserve(digest(1), PAGE)):
        with pytest.raises(BackendError, match="totals of 7 bytes"):
            verb()
    index.close()


def test_abort_gives_everything_back(index: Index) -> None:
    before = index.usage()
    index.reserve(digest(1), 3 * PAGE)
    assert index.usage().pinned == 3 * PAGE
    index.abort(digest(1))
    assert index.usage() == before
    assert index.holders() == set()


def test_only_the_owner_ends_a_reservation(index: Index) -> None:
    with pytest.raises(BackendError, match="not reserved"):
        index.commit(digest(1), 0, 1, (1,))
    index.reserve(digest(1), PAGE)
    index._holder = OTHER
    with pytest.raises(BackendError, match="not reserved"):
        index.commit(digest(1), 0, 1, (1,))
    with pytest.raises(BackendError, match="not reserved"):
        index.abort(digest(1))
    index._holder = ME
    index.commit(digest(1), 0, 1, (1,))
    with pytest.raises(BackendError, match="not reserved"):
        index.abort(digest(1))


def test_release_without_a_lease_is_a_bug(index: Index) -> None:
    put(index, 1)
    with pytest.raises(AssertionError, match=digest(1).hex()):
        index.release(digest(1))


# Four entries in an arena of four; then 2 is leased twice and 0 once: who goes first?
@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (CachePolicy.LRU, [1, 3, 2, 0]),
        (CachePolicy.LFU, [1, 3, 0, 2]),
        (CachePolicy.FIFO, [0, 1, 2, 3]),
        (CachePolicy.MRU, [0, 2, 3, 1]),
    ],
)
def test_orders_of_eviction(shm: Path, policy: CachePolicy, order: list[int]) -> None:
    index = make(shm, 4, policy)
    for number in range(4):
        put(index, number)
    for number in (2, 2, 0):
        index.lease(digest(number))
        index.release(digest(number))
    gone = []
    for number in range(10, 14):
        assert index.reserve(digest(number), PAGE)[1] == 1
        gone += [n for n in range(4) if not index.contains(digest(n)) and n not in gone]
    assert gone == order
    index.close()


def test_leased_entries_are_passed_over(index: Index) -> None:
    for number in range(10):
        put(index, number)
    for number in range(8):
        index.lease(digest(number))
    assert isinstance(index.reserve(digest(10), 2 * PAGE)[0], Slot)
    assert [n for n in range(10) if index.contains(digest(n))] == list(range(8))
    assert index.reserve(digest(11), PAGE) == (Refusal.FULL, 0)
    index.release(digest(5))
    assert isinstance(index.reserve(digest(11), PAGE)[0], Slot)
    assert not index.contains(digest(5))


def test_what_can_never_fit_evicts_nothing(index: Index) -> None:
    for number in range(10):
        put(index, number)
    assert index.reserve(digest(10), 11 * PAGE) == (Refusal.FULL, 0)
    assert index.usage().entries == 10


def test_smallest_hole_that_fits_is_taken(index: Index) -> None:
    for number, pages in enumerate((3, 1, 2, 1, 3)):
        put(index, number, pages)
    for number in (0, 2, 4):  # holes of 3, 2 and 3 pages
        index._holder = OTHER
        with index._write() as txn:
            index._remove(txn, digest(number), index._slot(txn, digest(number)))
    index._holder = ME
    assert free_extents(index) == [(0, 3), (4, 2), (7, 3)]
    assert put(index, 10, 2).offset == 4 * PAGE
    assert put(index, 11, 1).offset == 0
    assert put(index, 12, 3).offset == 7 * PAGE
    assert free_extents(index) == [(1, 2)]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_neighbours_merge_in_any_order(index: Index, order: tuple[int, ...]) -> None:
    for number in range(3):
        index.reserve(digest(number), 2 * PAGE)
    for number in order:
        index.abort(digest(number))
    assert free_extents(index) == [(0, 10)]


def test_one_transaction_evicts_a_bounded_number(shm: Path) -> None:
    index = make(shm, 150)
    for number in range(150):
        put(index, number)
    answers = [index.reserve(digest(1000), 150 * PAGE) for _ in range(3)]
    assert answers[:2] == [(Refusal.AGAIN, 64), (Refusal.AGAIN, 64)]
    assert isinstance(answers[2][0], Slot)
    assert answers[2][1] == 150 - 2 * 64
    index.close()


def test_room_beyond_the_watermark_is_asked_for_before_eviction(shm: Path) -> None:
    index = Index(shm / "index", ME, CachePolicy.LRU)
    index.resize(10 * PAGE)
    assert index.reserve(digest(1), 3 * PAGE) == (Refusal.GROW, 0)
    assert index.needed_for(3 * PAGE) == (0, 3 * PAGE)
    index.grow(0, 4 * PAGE)
    index.grow(0, 8 * PAGE)  # another process was faster: its growth stands
    assert (index.usage().watermark, index.usage().free) == (4 * PAGE, 4 * PAGE)
    put(index, 1, 3)
    assert index.needed_for(3 * PAGE) == (4 * PAGE, 6 * PAGE)  # the free page at the end counts
    assert index.reserve(digest(2), 7 * PAGE) == (Refusal.GROW, 0)
    assert index.contains(digest(1))
    assert index.reserve(digest(2), 5 * PAGE, may_grow=False) == (Refusal.FULL, 0)
    assert index.contains(digest(1))
    assert index.reserve(digest(2), 4 * PAGE, may_grow=False)[1] == 1
    index.check()
    index.close()


def test_a_dead_holders_traces_vanish(index: Index) -> None:
    put(index, 1)
    put(index, 2)
    index._holder = OTHER
    index.reserve(digest(3), PAGE)
    index.lease(digest(1))
    index.lease(digest(1))
    index._holder = ME
    index.lease(digest(1))
    index.lease(digest(2))
    assert index.holders() == {ME, OTHER}
    assert index.reclaim(OTHER) == 2
    assert index.holders() == {ME}
    assert index.reserve(digest(3), PAGE)[0] is not Refusal.BUSY
    assert index.usage().pinned == 3 * PAGE  # what this holder has
    index.release(digest(1))
    index.release(digest(2))
    index.abort(digest(3))
    assert index.usage().pinned == 0
    assert index.reclaim(OTHER) == 0


@pytest.mark.parametrize("pages", [1, 4, 5, 9])
def test_a_smaller_arena_drops_what_lies_beyond(index: Index, pages: int) -> None:
    slots = {number: put(index, number, 2) for number in range(4)}
    with index._write() as txn:
        index._remove(txn, digest(1), index._slot(txn, digest(1)))
    index.resize(pages * PAGE)
    usage = index.usage()
    assert (usage.capacity, usage.watermark) == (pages * PAGE, pages * PAGE)
    kept = [n for n in (0, 2, 3) if slots[n].offset + 2 * PAGE <= pages * PAGE]
    assert [n for n in range(4) if index.contains(digest(n))] == kept
    assert usage.used == 2 * PAGE * len(kept)
    index.check()
    index.resize(20 * PAGE)
    assert (index.usage().capacity, index.usage().watermark) == (20 * PAGE, pages * PAGE)


@pytest.mark.parametrize("data", [b"", b"x" * 7, b"\0" * 200])
def test_a_damaged_record_is_an_error_of_the_backend(index: Index, data: bytes) -> None:
    with pytest.raises(BackendError, match="record"):
        Slot.unpack(data)


def test_a_damaged_tiling_is_noticed(shm: Path) -> None:
    index = make(shm, 10)
    put(index, 1)
    with index._write() as txn:
        txn.put_free(0, PAGE)
    with pytest.raises(BackendError, match="extent at 0"):
        index.check()
    index.close()


class Tiling(RuleBasedStateMachine):
    """Random reservations, leases, deaths and sizes against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory(prefix="lmcache-ec-test-", dir="/dev/shm")
        self.index = Index(Path(self.directory.name) / "index", ME, CachePolicy.LRU)
        self.index.resize(40 * PAGE)
        self.writing: dict[int, bytes] = {}  # entry -> owner
        self.pins: dict[tuple[bytes, int], int] = {}
        self.extents: dict[int, tuple[int, int]] = {}  # of what is written or pinned: it must stay

    def teardown(self) -> None:
        self.index.close()
        self.directory.cleanup()

    def held(self, number: int) -> bool:
        return any(n == number for _, n in self.pins) or number in self.writing

    @rule(number=st.integers(0, 12), pages=st.integers(1, 12), holder=st.sampled_from([ME, OTHER]))
    def reserve(self, number: int, pages: int, holder: bytes) -> None:
        self.index._holder = holder
        present = self.index.contains(digest(number))
        answer, _ = self.index.reserve(digest(number), pages * PAGE)
        if number in self.writing:
            assert answer is Refusal.BUSY
        elif present:
            assert answer is Refusal.EXISTS
        elif isinstance(answer, Slot):
            self.writing[number] = holder
            self.extents[number] = (answer.offset, answer.length)
        elif answer is Refusal.GROW:
            start, need = self.index.needed_for(pages * PAGE)
            self.index.grow(start, need)
        else:
            assert answer is Refusal.FULL

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), end=st.sampled_from(["commit", "publish", "abort"]))
    def end_of_writing(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        self.index._holder = holder = self.writing.pop(number)
        if end == "commit":
            self.index.commit(digest(number), 0, 1, (1,))
            self.pins[holder, number] = 1
        elif end == "publish":
            self.index.commit(digest(number), 0, 1, (1,), pins=0)
            assert self.index.contains(digest(number))
            del self.extents[number]
        else:
            self.index.abort(digest(number))
            del self.extents[number]

    @rule(number=st.integers(0, 12), holder=st.sampled_from([ME, OTHER]))
    def lease(self, number: int, holder: bytes) -> None:
        self.index._holder = holder
        slot = self.index.lease(digest(number))
        if slot is not None:
            self.pins[holder, number] = self.pins.get((holder, number), 0) + 1
            assert self.extents.setdefault(number, (slot.offset, slot.length)) == (
                slot.offset,
                slot.length,
            )

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder, number = data.draw(st.sampled_from(sorted(self.pins)))
        self.index._holder = holder
        self.index.release(digest(number))
        self.pins[holder, number] -= 1
        if not self.pins[holder, number]:
            del self.pins[holder, number]
        self.forget_free()

    @rule()
    def death(self) -> None:
        self.index.reclaim(OTHER)
        self.pins = {key: pins for key, pins in self.pins.items() if key[0] != OTHER}
        self.writing = {n: owner for n, owner in self.writing.items() if owner != OTHER}
        self.forget_free()
        assert OTHER not in self.index.holders()

    @precondition(lambda self: not self.pins and not self.writing)
    @rule(pages=st.integers(10, 40))
    def resize(self, pages: int) -> None:
        self.index.resize(pages * PAGE)

    def forget_free(self) -> None:
        self.extents = {n: extent for n, extent in self.extents.items() if self.held(n)}

    @invariant()
    def no_byte_is_lost(self) -> None:
        self.index.check()
        free = free_extents(self.index)
        assert all(a + b < c for (a, b), (c, _) in pairwise(free))
        usage = self.index.usage()
        assert usage.free == sum(length for _, length in free) * PAGE
        assert usage.watermark <= usage.capacity
        with self.index._read() as txn:
            assert usage.entries == len(list(txn.scan(ENTRY)))

    @invariant()
    def what_is_held_stays(self) -> None:
        assert self.index.usage().pinned == sum(length for _, length in self.extents.values())
        for number in {n for _, n in self.pins}:
            assert self.index.contains(digest(number))
        ends = sorted(self.extents.values())
        assert all(a + b <= c for (a, b), (c, _) in pairwise(ends))


TestTiling = Tiling.TestCase
TestTiling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
