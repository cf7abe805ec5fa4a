"""``kill -9`` of engines that share one arena and one disk directory, at any instant.

The tensor of a hash is a function of the hash, so any process can check any byte. Some processes
are killed by the test at random times. Others kill themselves at a numbered point: the n-th line
that they run of one function of the tiers. After the kills a new process takes over, and looks at
all that is left.

``LMCACHE_EC_KILLS`` sets the number of kills; ``make soak`` runs 10,000.
"""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from lmcache_ec import ECCacheEngine, ECEngineConfig, ECMetadata, entry
from lmcache_ec.backends import arena, holders, index, local_cpu, local_disk, transaction
from lmcache_ec.backends.index import Refusal, Slot, State
from lmcache_ec.backends.transaction import ENTRY, HELD, ORDER
from lmcache_ec.config import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from types import FrameType

    from lmcache_ec.backends.local_disk import LocalDiskBackend

KILLS = int(os.environ.get("LMCACHE_EC_KILLS", "320"))
pytestmark = pytest.mark.timeout(180 + KILLS)

CONTEXT = multiprocessing.get_context("forkserver")
ANSWER_TIMEOUT_S = 60
NAMES = 40
WIDTH = 512
MAX_ROWS = 16
PROTECTED = (0, 1, 2)  # what the keeper leases
SCRATCH = NAMES  # written by the oracle alone
TRACED = {m.__file__ for m in (arena, holders, index, local_cpu, local_disk, transaction)}
STEPS = {  # each of these has to be hit
    "Index.reserve", "Index.commit", "Index.abort", "Index.lease", "Index.release",
    "Index._remove", "Index.reclaim", "LocalCPUBackend._reserve", "LocalCPUBackend.commit",
    "LocalDiskBackend._reserve", "LocalDiskBackend._write", "LocalDiskBackend._make_room",
    "_create", "_write_all", "Transaction.__exit__", "register", "living",
    "Arena.__init__", "Arena._open_index", "Arena._leave",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What all processes of one test share.

    Attributes:
        shm: Where the arena is.
        disk: Where the disk tier is.
        board: File of counters and marks.
        memory_bytes: Budget of the arena.
        disk_bytes: Budget of the disk tier.
        roomy: Whether all entries fit at once, so that nothing may ever be evicted.
    """

    shm: Path
    disk: Path
    board: Path
    memory_bytes: int
    disk_bytes: int
    roomy: bool

    def engine(self) -> ECCacheEngine:
        config = ECEngineConfig(
            shm_path=str(self.shm),
            max_local_cpu_size=self.memory_bytes / GIB,
            local_disk=str(self.disk),
            max_local_disk_size=self.disk_bytes / GIB,
        )
        return ECCacheEngine(config, ECMetadata("m"), torch.float32)

    def files(self) -> dict[str, int]:
        """Names and sizes of what is in the shards of the disk tier, at one instant."""
        usage = self.disk / "ec" / "usage"
        if not usage.exists():
            return {}
        with usage.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return {path.name: path.stat().st_size for path in self.disk.glob("ec/??/*")}


class Board:
    """Counters and marks that survive whoever made them."""

    def __init__(self, place: Place) -> None:
        self._rows = np.memmap(place.board, np.uint64, "r+", shape=(NAMES + 1, 4))
        self.in_memory, self.on_disk = self._rows[:, 0], self._rows[:, 1]
        self.counts = self._rows[0, 2:4]  # entries read, wrong ones; lost updates do no harm

    def expect(self, number: int, found: torch.Tensor) -> None:
        """Check every byte."""
        self.counts[0] += np.uint64(1)
        if not torch.equal(found, content(number)):
            self.counts[1] += np.uint64(1)
            raise AssertionError(f"wrong bytes under {number}")


def content(number: int) -> torch.Tensor:
    rows = 1 + number * 7 % MAX_ROWS
    values = torch.arange(rows * WIDTH) * 7919 + number * 104729
    return (values % 16777213).to(torch.float32).view(rows, WIDTH)


# ---------------------------------------------------------------------- what the processes do


def prepare(place: Place) -> Board:
    faulthandler.dump_traceback_later(ANSWER_TIMEOUT_S, exit=True)
    torch.set_num_threads(1)
    return Board(place)


def work(connection: Connection, place: Place, seed: int) -> None:
    """Put, get, lease, flush and restart until killed."""
    board, rng = prepare(place), random.Random(seed)
    engine = place.engine()
    connection.send("ready")
    held: list[tuple[int, Any]] = []
    while True:
        number = rng.randrange(NAMES)
        name = str(number)
        verb = rng.choice(["put", "put", "put", "get", "get", "lease", "lease", "flush", "restart"])
        if verb == "put":
            submitted = engine.put(name, content(number))
            if place.roomy:
                assert submitted
                lease = engine.lease(name)
                if lease is not None:  # else another process is writing it, and may be killed
                    board.in_memory[number] = 1
                    held.append((number, lease))
        elif verb == "get":
            found = engine.get(name, "cpu")
            if found is not None:
                board.expect(number, found)
        elif verb == "lease":
            lease = engine.lease(name)
            if lease is not None:
                board.expect(number, lease.tensor)
                held.append((number, lease))
        elif verb == "flush":
            leased = [number for number, _ in held]
            for number in leased:
                assert engine.put(str(number), content(number))
            assert engine.flush()
            if place.roomy:
                board.on_disk[leased] = 1
        elif rng.random() < 0.1 and not place.roomy:
            for _, lease in held:
                lease.release()
            held.clear()
            engine.close()
            engine = place.engine()
        if len(held) > 2:
            number, lease = held.pop(0)
            board.expect(number, lease.tensor)
            lease.release()
        bad = [count for count in engine.events.snapshot() if is_bad(count.name, place)]
        assert not bad, bad


def is_bad(counter: str, place: Place) -> bool:
    return counter == "corruptions" or (place.roomy and counter in {"errors", "drops", "evictions"})


def keep(connection: Connection, place: Place) -> None:
    """Lease some entries, and say on request whether they are as they should be."""
    board = prepare(place)
    faulthandler.cancel_dump_traceback_later()  # it may wait for long
    engine = place.engine()
    leases = {}
    for number in PROTECTED:
        assert engine.put(str(number), content(number))
        leases[number] = engine.lease(str(number))
    assert engine.flush()
    connection.send("ready")
    while True:
        connection.recv()
        for number, lease in leases.items():
            assert lease is not None
            assert engine.contains(str(number))
            board.expect(number, lease.tensor)
        connection.send("right")


class Points:
    """Counts the lines of each function of the tiers that a process runs."""

    def __init__(self, target: tuple[str, int] | None, reached: Callable[[], None]) -> None:
        self._target = target
        self._reached = reached
        self.lines: Counter[str] = Counter()
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            name = frame.f_code.co_qualname
            self.lines[name] += 1
            if (name, self.lines[name]) == self._target:
                self._reached()
        return self._trace


def die_at(connection: Connection, place: Place, target: tuple[str, int] | None, seed: int) -> None:
    """Run through every verb; die at the target, or report all points and end."""
    board, rng = prepare(place), random.Random(seed)
    closing = False

    def reached() -> None:
        connection.send(closing)
        os.kill(os.getpid(), signal.SIGKILL)

    points = Points(target, reached)
    engine = place.engine()
    for number in rng.sample(range(NAMES), 16):
        engine.put(str(number), content(number))
    for number in rng.sample(range(NAMES), 4):
        lease = engine.lease(str(number))
        if lease is not None:
            board.expect(number, lease.tensor)
            lease.release()
    engine.flush()
    for number in rng.sample(range(NAMES), 4):
        found = engine.get(str(number), "cpu")
        if found is not None:
            board.expect(number, found)
    reservation = engine.memory.reserve(engine._key(str(SCRATCH)), 4096)
    if not isinstance(reservation, Refusal):
        reservation.abort()
    engine.memory.arena.reclaim()
    assert not [count for count in engine.events.snapshot() if is_bad(count.name, place)]
    closing = True
    engine.close()
    sys.settrace(None)
    connection.send(dict(points.lines))


class Process:
    """A process that runs ``target(connection, place, *args)``."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        """What it sends."""
        assert self.connection.poll(ANSWER_TIMEOUT_S), "no answer"
        return self.connection.recv()

    def kill(self) -> None:
        """SIGKILL, of a process that has not ended by itself."""
        self._process.kill()
        self.join(-signal.SIGKILL)

    def join(self, *codes: int) -> int:
        """Wait for its end, which has to be one of these exit codes."""
        assert wait([self._process.sentinel], ANSWER_TIMEOUT_S), "it does not end"
        self._process.join()
        self.connection.close()
        code = self._process.exitcode
        assert code in codes, f"a process ended with {code}; its stack is on stderr"
        return code


# ---------------------------------------------------------------------- the oracle


class Oracle:
    """Starts, kills and counts; then looks at everything that is left."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.board = Board(place)
        self.kills = self.checks = 0
        self.running: list[Process] = []

    def start(self, target: Callable[..., None], *args: object) -> Process:
        self.running.append(Process(target, self.place, *args))
        return self.running[-1]

    def kill(self, process: Process) -> None:
        process.kill()
        self.running.remove(process)
        self.kills += 1
        assert sum(self.place.files().values()) <= self.place.disk_bytes

    def check(self, engine: ECCacheEngine, pinned: tuple[int, ...], alive: int) -> None:
        """Nobody but this process, and keepers of what is pinned, may be in the arena."""
        self.checks += 1
        self._check_memory(engine, pinned, alive)
        for number in range(NAMES):
            lease = engine.lease(str(number))
            if lease is None:
                assert number not in pinned
                assert not self.board.in_memory[number], f"{number} is lost"
                continue
            self.board.expect(number, lease.tensor)
            lease.release()
            self.board.in_memory[number] = self.place.roomy
        self._check_disk(engine)
        assert not [c for c in engine.events.snapshot() if is_bad(c.name, self.place)]

    def _check_memory(self, engine: ECCacheEngine, pinned: tuple[int, ...], alive: int) -> None:
        arena = engine.memory.arena
        assert [path.name for path in self.place.shm.iterdir()] == [arena.directory.name]
        assert {path.name for path in arena.directory.iterdir()} == {"arena", "index", "holders"}
        assert len(list((arena.directory / "holders").iterdir())) == alive
        arena.index.check()
        usage = arena.index.usage()
        assert usage.used <= usage.capacity == self.place.memory_bytes
        assert (arena.directory / "arena").stat().st_blocks * 512 <= usage.capacity
        with arena.index._read() as txn:
            slots = {digest: Slot.unpack(data) for digest, data in txn.scan(ENTRY)}
            ordered = {digest for _, digest in txn.scan(ORDER)}
            held = {key[-32:] for key, _ in txn.scan(HELD)}
        expected = {engine._key(str(number)).digest for number in pinned}
        assert all(slot.state is State.READY for slot in slots.values())
        assert {digest for digest, slot in slots.items() if slot.pins} == held == expected
        assert ordered == set(slots) - expected
        assert usage.entries == len(slots)
        assert usage.pinned == sum(slots[digest].length for digest in expected)

    def _check_disk(self, engine: ECCacheEngine) -> None:
        disk: LocalDiskBackend = engine._storage._tiers[0]  # type: ignore[assignment]
        assert sum(self.place.files().values()) <= self.place.disk_bytes
        # The first write of a process finds what dead ones left.
        assert engine.put(str(SCRATCH), content(SCRATCH))
        assert engine.flush()
        assert disk.contains(engine._key(str(SCRATCH)))
        files = self.place.files()
        assert all(re.fullmatch(r"[0-9a-f]{64}\.safetensors", name) for name in files)
        assert sum(files.values()) == int((self.place.disk / "ec" / "usage").read_text())
        assert sum(files.values()) <= self.place.disk_bytes
        for number in range(NAMES):
            key = engine._key(str(number))
            if f"{key.name}.safetensors" in files:
                data = bytearray(disk._entry_path(key).read_bytes())
                info = entry.parse(memoryview(data), key)
                payload = torch.frombuffer(data, dtype=torch.float32, offset=info.payload_offset)
                self.board.expect(number, payload.view(info.shape))
                self.board.on_disk[number] = self.place.roomy
            else:
                assert not self.board.on_disk[number], f"{number} is lost from disk"
        disk.delete(engine._key(str(SCRATCH)))

    def report(self, what: str) -> None:
        reads, wrong = (int(count) for count in self.board.counts)
        print(
            f"\n{what}: {self.kills} kills, {self.checks} checks, {reads} entries read, "
            f"{wrong} wrong",
            end=" ",
        )
        assert wrong == 0
        assert reads > self.kills


@pytest.fixture
def make_oracle(tmp_path: Path) -> Iterator[Callable[[bool], Oracle]]:
    """Makes one oracle, with a place that is roomy or not."""
    CONTEXT.set_forkserver_preload(["lmcache_ec.engine", "pytest"])
    shm = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    oracles = []

    def make(roomy: bool) -> Oracle:
        sizes = (8 << 20, 8 << 20) if roomy else (256 << 10, 384 << 10)
        board = tmp_path / "board"
        board.write_bytes(bytes((NAMES + 1) * 4 * 8))
        oracles.append(Oracle(Place(shm, tmp_path / "disk", board, *sizes, roomy)))
        return oracles[-1]

    yield make
    for oracle in oracles:
        for process in oracle.running:
            process._process.kill()
    shutil.rmtree(shm)


@pytest.mark.parametrize("roomy", [False, True], ids=["tight", "roomy"])
def test_killed_at_random_times(
    make_oracle: Callable[[bool], Oracle], capsys: pytest.CaptureFixture[str], roomy: bool
) -> None:
    oracle, rng = make_oracle(roomy), random.Random(KILLS)
    seeds = iter(range(1 << 60))
    workers = [oracle.start(work, next(seeds)) for _ in range(3)]
    while oracle.kills < KILLS // 5:
        for _ in range(9):
            time.sleep(rng.uniform(0, 0.06))
            oracle.kill(workers.pop(rng.randrange(len(workers))))
            workers.append(oracle.start(work, next(seeds)))
        workers[-1].answer()  # the newest one is at work, too
        time.sleep(rng.uniform(0, 0.1))
        while workers:
            oracle.kill(workers.pop())
        with oracle.place.engine() as engine:
            oracle.check(engine, pinned=(), alive=1)
            workers = [oracle.start(work, next(seeds)) for _ in range(3)]
            workers[0].answer()  # so that the arena stays
    if roomy:
        assert oracle.board.in_memory.all(where=np.arange(NAMES + 1) < NAMES)
        assert oracle.board.on_disk.any()
    with capsys.disabled():
        oracle.report(f"at random times, {'roomy' if roomy else 'tight'}")


def numbers_of_points(last: int, rng: random.Random) -> Iterator[int]:
    """Numbers from 1 to ``last``; loops make most of them, so the first 20 come more often."""
    first = range(1, min(last, 20) + 1)
    while True:
        for number in rng.sample(first, len(first)):
            yield number
            if last > len(first):
                yield rng.randint(1, last)


@pytest.mark.parametrize("roomy", [False, True], ids=["tight", "roomy"])
def test_killed_at_numbered_points(
    make_oracle: Callable[[bool], Oracle], capsys: pytest.CaptureFixture[str], roomy: bool
) -> None:
    oracle, rng = make_oracle(roomy), random.Random(KILLS)
    place = oracle.place
    keeper: Process | None = None
    lines: Counter[str] = Counter()
    for seed in range(2):  # in a new arena, then with another process in it
        scout = oracle.start(die_at, None, seed)
        lines |= Counter(scout.answer())
        scout.join(0)
        oracle.running.remove(scout)
        if keeper is None:
            keeper = oracle.start(keep)
            keeper.answer()
    numbers = {name: numbers_of_points(last, rng) for name, last in lines.items()}
    hit: Counter[str] = Counter()
    tries: Counter[str] = Counter()
    while oracle.kills < (KILLS // 5 if roomy else KILLS * 2 // 5):
        wanted = set() if roomy else STEPS - set(hit)
        name = min(
            sorted(wanted or lines),
            key=lambda name: tries[name] / (4 if name in STEPS else 1) + rng.random(),
        )
        tries[name] += 1
        assert name not in wanted or tries[name] < 50, f"{name} is never hit"
        if keeper is not None and rng.random() < 0.5:  # the next process takes the arena over
            oracle.kill(keeper)
            keeper = None
        warm = {path: path.stat().st_ino for path in place.shm.glob("*/arena")}
        point = (name, next(numbers[name]))
        victim = oracle.start(die_at, point, rng.random())
        closing = victim.answer()
        if victim.join(0, -signal.SIGKILL):
            oracle.kills += 1
            hit[name] += 1
        oracle.running.remove(victim)
        if keeper is not None:
            keeper.connection.send("?")
            assert keeper.answer() == "right"
        with place.engine() as engine:
            if keeper is not None or not closing:
                assert all(path.stat().st_ino == number for path, number in warm.items())
            else:  # it may have been the last to leave
                oracle.board.in_memory[:] = 0
            oracle.check(engine, PROTECTED if keeper else (), 2 if keeper else 1)
            if keeper is None and rng.random() < 0.8:
                keeper = oracle.start(keep)
                keeper.answer()
        if keeper is None:  # the last one to leave gives all memory back
            assert not list(place.shm.iterdir())
            oracle.board.in_memory[:] = 0
    with capsys.disabled():
        oracle.report(f"at points of {len(hit)} functions, {'roomy' if roomy else 'tight'}")
    assert roomy or set(hit) >= STEPS
