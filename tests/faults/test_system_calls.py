"""Every system call of the disk tier goes wrong in turn, below an engine that must not notice.

A get may miss and a put may not reach the disk, and both are counted. Nothing may raise, give a
wrong tensor, stay pinned or open, or break the budget; and all works again once the fault ends.
"""

from __future__ import annotations

import ast
import errno
import logging
import os
import resource
import shutil
import subprocess
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_ec import ECCacheEngine, ECEngineConfig, ECMetadata, storage_manager
from lmcache_ec.backends import local_disk
from lmcache_ec.config import GIB
from lmcache_ec.key import CacheEngineKey
from lmcache_ec.testing.faults import (
    CALLS,
    SHORT,
    CallFault,
    CallScript,
    SystemCallFaults,
    always,
    nth,
    sometimes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES, errno.EINTR]
FAULTS = [CallFault(number) for number in NUMBERS]
MOVE_BYTES = ["writev", "preadv", "pread", "pwrite"]
ARENA_BYTES = 64 * 4096
FILE_BYTES = 3 * 4096  # one page of header and SHAPE in float32
SHAPE = (4, 512)


class Clock:
    """The clock of a module, which jumps when it is told to."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        return time.time() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The disk tier's clock, to end an outage."""
    clock = Clock()
    monkeypatch.setattr(local_disk, "time", clock)
    return clock


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture(autouse=True)
def _no_work_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What escapes on a background thread is logged as an error."""
    caplog.set_level(logging.WARNING)
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def content(name: str) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(sum(name.encode())))


class Cache:
    """An engine over a directory, restarted at will. Memory does not outlive it, the disk does."""

    def __init__(self, shm: Path, disk: Path, capacity: int = 100) -> None:
        self.disk = disk
        self.faults = SystemCallFaults(disk)
        self.capacity_bytes = capacity * FILE_BYTES
        self._config = ECEngineConfig(
            shm_path=str(shm),
            max_local_cpu_size=ARENA_BYTES / GIB,
            local_disk=str(disk),
            max_local_disk_size=self.capacity_bytes / GIB,
        )
        self.start()

    def start(self) -> None:
        self.engine = ECCacheEngine(self._config, ECMetadata("m"), torch.float32)

    def stop(self) -> None:
        self.engine.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def counted(self, name: str, label: str = "disk") -> float:
        return self.engine.events.value(name, label)

    def put(self, *names: str) -> None:
        """Put, and check that each either got to the disk or was counted as dropped."""
        before = self.counted("drops", "disk_failed"), self.counted("bytes_written")
        for name in names:
            assert self.engine.put(name, content(name))
        assert self.engine.flush()
        drops = self.counted("drops", "disk_failed") - before[0]
        kept = (self.counted("bytes_written") - before[1]) / content("").nbytes
        assert drops + kept == len(names)
        if kept == len(names):
            assert self.on_disk(names[-1]) or not self.disk.exists()
        assert self.engine.memory.usage().pinned == 0

    def get(self, name: str) -> bool:
        """Whether it is found; then it is right."""
        self.engine.contains(name)
        tensor = self.engine.get(name, "cpu")
        assert self.engine.flush()
        assert self.engine.memory.usage().pinned == 0
        assert tensor is None or torch.equal(tensor, content(name))
        return tensor is not None

    def file(self, name: str) -> Path:
        digest = CacheEngineKey(self.engine.namespace, name).name
        return self.disk / "ec" / digest[:2] / f"{digest}.safetensors"

    def on_disk(self, *names: str) -> bool:
        with self.faults.paused():
            return all(self.file(name).exists() for name in names)

    def check(self) -> None:
        """The budget holds, and the counter is not too small."""
        with self.faults.paused():
            total = sum(path.stat().st_size for path in self.disk.glob("ec/??/*"))
            usage = self.disk / "ec" / "usage"
            text = usage.read_text() if usage.exists() else ""
        assert total <= self.capacity_bytes
        assert not text or total <= int(text)

    def check_healed(self, clock: Clock) -> None:
        """Once the faults have ended, this engine works again, and so does the next."""
        assert self.faults.open_files == set(), "left open"
        self.check()
        clock.ahead_s += local_disk.RETRY_INTERVAL_S
        self.put("healed")
        assert self.on_disk("healed")
        self.check()
        self.restart()
        assert self.get("healed")
        self.put("after")  # counts anew
        assert self.on_disk("healed", "after")
        assert not list(self.disk.glob("ec/??/.*")), "a temporary file is left"
        total = sum(path.stat().st_size for path in self.disk.glob("ec/??/*"))
        assert int((self.disk / "ec" / "usage").read_text()) == total
        self.stop()


def leave_debris(cache: Cache) -> None:
    """A damaged entry, and a temporary file of a writer that died."""
    cache.put("bad")
    cache.file("bad").write_bytes(bytes(FILE_BYTES))
    name = "ab" * 32
    orphan = cache.disk / "ec" / "ab" / f".{name}.{'0' * 16}.tmp"
    orphan.parent.mkdir(mode=0o700, exist_ok=True)
    orphan.touch()


def use(cache: Cache) -> None:
    """A life of an engine: hits, misses, a corrupt entry and puts. Ends with another engine."""
    for name in ("old", "bad", "absent"):
        errors = cache.counted("errors")
        found = cache.get(name)
        if name != "old":
            assert not found
        elif not found:
            assert cache.counted("errors") > errors, "a miss without a counted error"
    cache.put("new")
    cache.put("new 2")
    assert cache.get("new"), "memory has it"
    cache.restart()
    for name in ("old", "new", "absent"):
        cache.get(name)
    cache.put("old", "newer")


def prepared(shm: Path, disk: Path, *, debris: bool = True) -> Cache:
    cache = Cache(shm, disk)
    cache.put("old")
    if debris:
        leave_debris(cache)
    cache.restart()
    return cache


def test_every_system_call_of_the_tier_can_go_wrong() -> None:
    tree = ast.parse(Path(local_disk.__file__).read_text())
    used = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("os", "fcntl")
    }
    assert "preadv" in used
    assert used - {"geteuid"} <= set(CALLS)


def test_all_calls_are_met_and_nothing_goes_wrong_without_a_script(
    shm: Path, disk: Path, clock: Clock
) -> None:
    cache = prepared(shm, disk)
    with cache.faults as faults:
        use(cache)
    assert set(faults.calls) == set(CALLS)
    assert cache.counted("errors") == cache.counted("drops", "disk_failed") == 0
    cache.check_healed(clock)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("call", CALLS)
def test_call_that_always_fails(
    shm: Path, disk: Path, clock: Clock, call: str, number: int
) -> None:
    cache = prepared(shm, disk)
    with cache.faults as faults:
        faults.script = always(call, CallFault(number))
        use(cache)
        cache.check()
    assert call in faults.calls
    assert faults.open_files == set()
    cache.check_healed(clock)


@pytest.mark.parametrize("pair", list(combinations(CALLS, 2)), ids="-".join)
def test_two_calls_that_always_fail(
    shm: Path, disk: Path, clock: Clock, pair: tuple[str, str]
) -> None:
    """What one failure leaves to be tidied up, a second one gets in the way of."""
    # A scan that cannot remove debris would be the end of every put.
    cache = prepared(shm, disk, debris="unlink" not in pair)
    with cache.faults as faults:
        faults.script = lambda call: CallFault(errno.EROFS) if call in pair else None
        use(cache)
        cache.check()
    cache.check_healed(clock)


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("call", ["open", "mkdir", "unlink", "rename", "ftruncate", "flock"])
def test_call_that_is_done_but_fails(
    shm: Path, disk: Path, clock: Clock, call: str, stuck: bool
) -> None:
    """Also when nothing that it has done can be removed again."""
    script = always(call, CallFault(errno.EIO, done=True))
    fixed = always("unlink", CallFault(errno.EROFS))
    cache = prepared(shm, disk, debris=not stuck)
    with cache.faults as faults:
        faults.script = lambda call: script(call) or (fixed(call) if stuck else None)
        use(cache)
        cache.check()
    assert call in faults.calls or (call == "unlink" and stuck)
    cache.check_healed(clock)


@pytest.mark.parametrize("call", MOVE_BYTES)
def test_short_reads_and_writes(shm: Path, disk: Path, clock: Clock, call: str) -> None:
    cache = prepared(shm, disk)
    with cache.faults as faults:
        faults.script = always(call, SHORT)
        use(cache)
        cache.check()
        if call in ("writev", "preadv"):
            assert cache.counted("errors") == 0, "the rest follows"
            assert cache.on_disk("old", "new", "newer")
    assert call in faults.calls
    cache.check_healed(clock)


def only(calls: set[str], script: CallScript) -> CallScript:
    return lambda call: script(call) if call in calls else None


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        (set(CALLS), CallFault(errno.EIO)),
        (set(CALLS), CallFault(errno.EIO, done=True)),
        (set(MOVE_BYTES), SHORT),
    ],
    ids=["fails", "done", "short"],
)
def test_each_single_call_goes_wrong(
    shm: Path, tmp_path: Path, clock: Clock, calls: set[str], fault: CallFault
) -> None:
    count = 0
    while True:
        disk = tmp_path / str(count)
        cache = Cache(shm, disk)
        cache.put("old")
        cache.restart()
        with cache.faults as faults:
            faults.script = only(calls, nth(count, fault))
            cache.get("old")
            cache.put("new")
        met = [call for call in faults.calls if call in calls]
        cache.check_healed(clock)
        if count >= len(met):
            break
        count += 1
    assert set(met) == calls - {"unlink"}, "nothing is removed when all goes well"


@pytest.mark.parametrize("call", ["unlink", "listdir", "stat", "pwrite", "flock"])
def test_eviction_that_fails_keeps_the_budget(
    shm: Path, disk: Path, clock: Clock, call: str
) -> None:
    cache = Cache(shm, disk, capacity=4)
    cache.put("a", "b", "c")
    with cache.faults as faults:
        faults.script = always(call, CallFault(errno.EIO))
        for name in "defgh":
            cache.put(name)
            cache.check()
            clock.ahead_s += local_disk.RETRY_INTERVAL_S
    assert cache.counted("drops", "disk_failed") >= 4
    cache.check_healed(clock)


@pytest.mark.parametrize("seed", range(8))
def test_faults_at_random(shm: Path, disk: Path, clock: Clock, seed: int) -> None:
    cache = Cache(shm, disk, capacity=5)
    with cache.faults as faults:
        for step in range(4):
            faults.script = sometimes(seed * 4 + step, 0.05, FAULTS)
            for name in "abcdefgh":
                cache.put(name)
                cache.get(name)
                clock.ahead_s += local_disk.RETRY_INTERVAL_S
            cache.restart()
            faults.script = None
            cache.check()
    cache.check_healed(clock)


def test_counter_that_could_not_be_mended(shm: Path, disk: Path, clock: Clock) -> None:
    """A scan whose result cannot be written has to be repeated."""
    cache = Cache(shm, disk, capacity=6)
    cache.put("a", "b", "c")
    cache.stop()
    (disk / "ec" / "usage").write_bytes(b"%020d\n" % FILE_BYTES)  # files came in by hand
    cache.start()
    with cache.faults as faults:
        faults.script = always("pwrite", CallFault(errno.EIO))
        cache.put("d")
    clock.ahead_s += local_disk.RETRY_INTERVAL_S
    cache.put("e")
    cache.check()
    cache.check_healed(clock)


def test_counter_written_in_part(shm: Path, disk: Path, clock: Clock) -> None:
    """Half of the digits of a new number and half of an old one must not pass for a number."""
    cache = Cache(shm, disk, capacity=10**6)
    cache.put("big", "bad")
    os.truncate(cache.file("big"), 10**10 - FILE_BYTES - 1)
    cache.file("bad").write_bytes(b"damaged")
    cache.restart()
    cache.put("new")  # all files have 10**10 + 6 bytes now
    with cache.faults as faults:
        faults.script = always("pwrite", SHORT)
        assert not cache.get("bad")  # which removes 7
        cache.check()
    cache.check_healed(clock)


def test_outage_is_short_and_costs_no_system_call(shm: Path, disk: Path, clock: Clock) -> None:
    cache = Cache(shm, disk)
    with cache.faults as faults:
        faults.script = always("open", CallFault(errno.ENOSPC))
        cache.put("a")
        met = len(faults.calls)
        cache.put("b", "c")
        assert len(faults.calls) == met
        assert cache.counted("drops", "disk_failed") == 3
        clock.ahead_s += local_disk.RETRY_INTERVAL_S
        cache.put("d")
        assert len(faults.calls) > met
    cache.check_healed(clock)


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, 3600.0, 1e9])
def test_clock_that_jumps(
    shm: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, jump_s: float
) -> None:
    """The time of day jumps, for headers and for the times of files."""
    wall = Clock()
    monkeypatch.setattr(storage_manager, "time", wall)
    cache = Cache(shm, disk, capacity=4)
    for name in "abcdefgh":
        cache.put(name)
        cache.check()
        assert cache.on_disk(name)
        when = wall.time()
        os.utime(cache.file(name), (when, when))
        wall.ahead_s += jump_s if name in "bdf" else 0
    kept = [name for name in "abcdefgh" if cache.on_disk(name)]
    assert len(kept) >= 2
    cache.restart()
    assert all(cache.get(name) for name in kept)
    cache.check_healed(clock)


def test_directory_removed_at_every_call(shm: Path, tmp_path: Path, clock: Clock) -> None:
    count = 0
    while True:
        disk = tmp_path / str(count)
        cache = Cache(shm, disk)
        cache.put("old")
        cache.restart()
        with cache.faults as faults:
            faults.script = nth(count, lambda: shutil.rmtree(disk))  # noqa: B023 - called at once
            cache.get("old")
            cache.put("new")
        met = len(faults.calls)
        cache.check_healed(clock)
        if count >= met:
            break
        count += 1
    assert count > 30


def test_process_really_out_of_descriptors(shm: Path, disk: Path, clock: Clock) -> None:
    cache = Cache(shm, disk)
    cache.put("old")
    cache.restart()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert not cache.get("old")
        cache.put("new")
        assert cache.get("new")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert cache.counted("errors") >= 2
    assert cache.counted("drops", "disk_failed") == 1
    assert cache.get("old")
    cache.check_healed(clock)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    path = tmp_path / "mounted"
    path.mkdir(mode=0o700)
    options = ["-t", "tmpfs", "-o", "size=1m,mode=0700", "lmcache-ec-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("may not mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_remounted_read_only_and_back(shm: Path, mounted: Path, clock: Clock) -> None:
    cache = prepared(shm, mounted)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    use(cache)
    assert cache.get("old"), "reads go on, after a restart too"
    assert not cache.on_disk("new")
    assert cache.counted("drops", "disk_failed") >= 1
    subprocess.run(["mount", "-o", "remount,rw", str(mounted)], check=True)
    cache.check_healed(clock)
