"""The disk tier, on real directories, file systems and processes."""

from __future__ import annotations

import fcntl
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_ec.backends import local_disk
from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.errors import BackendError, ConfigError, CorruptEntryError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMESPACE = Namespace(ECMetadata("m"), "bfloat16")
SPAWN = multiprocessing.get_context("spawn")
KIB = 1024


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey(NAMESPACE, f"input {number}")


def content(number: int, size: int = KIB) -> bytes:
    return (f"{number} ".encode() * size)[:size]


def make(path: Path, capacity_bytes: int = 1024 * KIB) -> LocalDiskBackend:
    return LocalDiskBackend(path, capacity_bytes, Events())


def put(backend: LocalDiskBackend, number: int, size: int = KIB) -> None:
    data = memoryview(content(number, size))
    backend.put(key(number), [data[:0], data[: size // 3], data[size // 3 :], data[:0]])


def get(
    backend: LocalDiskBackend, number: int, meanwhile: Callable[[], object] = bool
) -> bytes | None:
    """Read an entry, and call ``meanwhile`` between its opening and its reading."""

    def allocate(size: int) -> memoryview:
        meanwhile()
        return memoryview(bytearray(size))

    view = backend.get(key(number), allocate)
    return None if view is None else bytes(view)


def file_of(path: Path, number: int) -> Path:
    name = key(number).name
    return path / "ec" / name[:2] / f"{name}.safetensors"


def files(path: Path) -> list[Path]:
    """Entries and temporary files."""
    return [file for file in (path / "ec").glob("??/*") if file.is_file()]


def used(path: Path) -> int:
    """Bytes that the usage file claims."""
    return int((path / "ec" / "usage").read_text().split()[0])


@contextmanager
def frozen(path: Path) -> Iterator[int]:
    """Hold the directory's lock; gives the bytes that its files then have."""
    with (path / "ec" / "usage").open("r+") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        yield sum(file.stat().st_size for file in files(path))


def run(target: Any, *args: object) -> Any:
    process = SPAWN.Process(target=target, args=args)
    process.start()
    return process


def test_what_was_put_is_read(tmp_path: Path) -> None:
    backend = make(tmp_path / "a" / "b")
    assert not backend.contains(key(1))
    assert get(backend, 1) is None
    backend.delete(key(1))
    assert not (tmp_path / "a").exists(), "only a put creates anything"
    put(backend, 1)
    assert backend.contains(key(1))
    assert get(backend, 1) == content(1)
    assert get(backend, 2) is None
    backend.delete(key(1))
    assert not backend.contains(key(1))
    assert used(tmp_path / "a" / "b") == 0
    backend.close()
    backend.close()


def test_only_the_user_may_look(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        put(make(tmp_path / "c"), 1)
    finally:
        os.umask(mask)
    made = [tmp_path / "c", *(tmp_path / "c").rglob("*")]
    assert len(made) == 5
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_caller_may_have_no_room(tmp_path: Path) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    asked: list[int] = []
    assert backend.get(key(1), asked.append) is None
    assert asked == [KIB]
    assert backend.contains(key(1))


def test_entry_that_is_there_is_kept(tmp_path: Path) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    os.utime(file_of(tmp_path, 1), (1, 1))
    backend.put(key(1), [memoryview(b"other")])
    assert get(backend, 1) == content(1)
    backend._write(file_of(tmp_path, 1), [memoryview(b"other")], 5)  # a writer that saw none yet
    assert get(backend, 1) == content(1)
    assert files(tmp_path) == [file_of(tmp_path, 1)]
    assert file_of(tmp_path, 1).stat().st_mtime > 1
    assert used(tmp_path) == KIB


def test_open_file_survives_eviction(tmp_path: Path) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    assert get(backend, 1, lambda: backend.delete(key(1))) == content(1)
    assert not backend.contains(key(1))


@pytest.mark.parametrize("size", [0, 1, KIB - 1])
def test_file_that_shrinks_is_corrupt(tmp_path: Path, size: int) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    with pytest.raises(CorruptEntryError, match=f"ended at byte {size} of {KIB}"):
        get(backend, 1, lambda: os.truncate(file_of(tmp_path, 1), size))
    os.truncate(file_of(tmp_path, 1), 0)
    with pytest.raises(CorruptEntryError, match="empty"):
        get(backend, 1)


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    backend = make(tmp_path, 10 * KIB)
    for number in range(10):
        put(backend, number)
        os.utime(file_of(tmp_path, number), (1000 + number, 1000 + number))
    get(backend, 0)
    put(backend, 1)
    put(backend, 10)
    # 95 % of ten entries leave room for nine: one new one and the eight used last.
    assert [n for n in range(11) if backend.contains(key(n))] == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert used(tmp_path) == 9 * KIB
    assert backend._events.value("evictions", "disk") == 2


def test_entry_larger_than_the_budget_changes_nothing(tmp_path: Path) -> None:
    backend = make(tmp_path, 10 * KIB)
    put(backend, 1)
    with pytest.raises(BackendError, match="too large"):
        put(backend, 2, 10 * KIB + 1)
    assert backend.contains(key(1))
    put(backend, 3, 10 * KIB)
    assert get(backend, 3) == content(3, 10 * KIB)
    assert used(tmp_path) == 10 * KIB


def test_restart_finds_and_counts_everything(tmp_path: Path) -> None:
    for number in range(20):
        put(make(tmp_path, 10 * KIB), number)
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 10 * KIB
    assert get(make(tmp_path), 19) == content(19)
    put(make(tmp_path, 5 * KIB), 20)
    assert len(files(tmp_path)) <= 5


@pytest.mark.parametrize("text", ["", "garbage", "-0000000000000000001\n", "9" * 400])
def test_damaged_counter_is_counted_anew(tmp_path: Path, text: str) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    (tmp_path / "ec" / "usage").write_text(text)
    put(backend, 2)
    assert used(tmp_path) == 2 * KIB


def test_files_moved_by_hand_are_counted_at_the_next_start(tmp_path: Path) -> None:
    put(make(tmp_path), 1)
    put(make(tmp_path / "other"), 2)
    file_of(tmp_path, 2).parent.mkdir(exist_ok=True)
    shutil.copy(file_of(tmp_path / "other", 2), file_of(tmp_path, 2))
    file_of(tmp_path, 1).unlink()
    backend = make(tmp_path)
    put(backend, 3)
    assert used(tmp_path) == 2 * KIB
    assert get(backend, 2) == content(2)


def test_things_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    backend = make(tmp_path, 4 * KIB)
    put(backend, 1)
    shard = file_of(tmp_path, 1).parent
    (shard / "notes.txt").write_bytes(bytes(9 * KIB))
    (shard / ("0" * 64 + ".safetensors")).symlink_to(shard / "notes.txt")
    for number in range(2, 12):
        put(backend, number)
    assert (shard / "notes.txt").stat().st_size == 9 * KIB
    assert (shard / ("0" * 64 + ".safetensors")).is_symlink()
    assert used(tmp_path) == 3 * KIB


def test_threads_share_one_backend(tmp_path: Path) -> None:
    backend = make(tmp_path, 20 * KIB)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: _use(backend, seed, 60), range(4)))
    with frozen(tmp_path) as total:
        assert used(tmp_path) == total <= 20 * KIB


def _use(backend: LocalDiskBackend, seed: int, rounds: int) -> None:
    """Put, read and delete a few entries that others use too."""
    for step in range(rounds):
        number = (step * (seed + 1)) % 13
        put(backend, number, KIB + number * 300)
        found = get(backend, (number + 5) % 13)
        assert found in (None, content((number + 5) % 13, KIB + (number + 5) % 13 * 300))
        if step % 7 == seed:
            backend.delete(key((number + 3) % 13))


def _use_path(path: Path, seed: int, rounds: int) -> None:
    _use(make(path, 20 * KIB), seed, rounds)


def test_processes_share_one_budget_and_survive_kills(tmp_path: Path) -> None:
    put(make(tmp_path, 20 * KIB), 0, KIB)
    workers = [run(_use_path, tmp_path, seed, 80) for seed in range(2)]
    victims = [run(_use_path, tmp_path, 2, 1_000_000)]
    for watched in itertools.count(1):
        with frozen(tmp_path) as total:
            assert total <= 20 * KIB
            assert total <= used(tmp_path)
        time.sleep(0.01)  # the others want the lock too
        if len(victims) == 4 and not any(worker.is_alive() for worker in workers):
            break
        if watched % 10 == 0 and len(victims) < 4:
            victims[-1].kill()
            victims.append(run(_use_path, tmp_path, 2, 1_000_000))
    for victim in victims:
        victim.kill()
        victim.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    put(make(tmp_path, 20 * KIB), 99)
    assert not [file for file in files(tmp_path) if file.suffix == ".tmp"]
    with frozen(tmp_path) as total:
        assert used(tmp_path) == total <= 20 * KIB


def test_killed_at_every_line(tmp_path: Path) -> None:
    process = run(_kill_at_every_line, tmp_path)
    process.join()
    assert process.exitcode == 0


def _kill_at_every_line(parent: Path) -> None:
    """Fork, kill the child at its n-th line of put, evict and delete, and check."""
    capacity = 3 * KIB
    for killed in itertools.count():
        path = parent / str(killed)
        before = make(path, capacity)
        for filler in range(-3, 0):
            put(before, filler)
        child = os.fork()
        if child == 0:
            before = make(path, capacity)  # a new process counts anew
            _trap(killed)
            put(before, 0)
            before.delete(key(0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        total = sum(file.stat().st_size for file in files(path))
        assert total <= capacity
        assert total <= used(path), f"the counter is too small after line {killed}"
        after = make(path, capacity)
        assert get(after, 0) in (None, content(0))
        put(after, 0)
        assert get(after, 0) == content(0)
        assert used(path) == sum(file.stat().st_size for file in files(path))
        assert not [file for file in files(path) if file.suffix == ".tmp"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert killed > 100


def _trap(lines: int) -> None:
    """Kill this process when it has run ``lines`` lines of the backend."""
    left = lines

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != local_disk.__file__:
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    sys.settrace(trace)


def test_writer_at_work_is_not_taken_for_dead(tmp_path: Path) -> None:
    first = make(tmp_path, 10 * KIB)
    second = make(tmp_path, 10 * KIB)
    temporary = file_of(tmp_path, 1).with_name(f".{key(1).name}.{'0' * 16}.tmp")
    first._prepare(temporary.parent)
    file = first._reserve(temporary, 8 * KIB)
    for number in range(2, 7):
        put(second, number)
        assert temporary.exists()
        assert sum(entry.stat().st_size for entry in files(tmp_path)) <= 10 * KIB
    with pytest.raises(BackendError, match="no room"):
        put(second, 7, 3 * KIB)
    os.close(file)  # as when its process dies
    put(second, 8, 3 * KIB)
    assert not temporary.exists()


def test_lock_held_for_ever_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    monkeypatch.setattr(local_disk, "LOCK_TIMEOUT_S", 0.01)
    with frozen(tmp_path):
        with pytest.raises(BackendError, match="locked"):
            put(backend, 2)
        with pytest.raises(BackendError, match="locked"):
            backend.delete(key(1))
        assert get(backend, 1) == content(1)


@pytest.mark.parametrize("inner", ["", "ec"])
@pytest.mark.parametrize("problem", ["mode 0770", "mode 0702", "user 12345"])
def test_directory_that_others_may_write(tmp_path: Path, inner: str, problem: str) -> None:
    path = tmp_path / "c"
    (path / "ec").mkdir(parents=True)
    backend = make(path)
    if problem.startswith("mode"):
        (path / inner).chmod(int(problem[-3:], 8))
    elif os.geteuid() == 0:
        os.chown(path / inner, 12345, -1)
    else:
        pytest.skip("needs root to change owners")
    with pytest.raises(ConfigError, match=rf"{problem}.*(chmod go-w|chown)"):
        make(path)
    with pytest.raises(BackendError, match=problem):
        put(backend, 1)
    assert not files(path)


def test_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        make(tmp_path / "file")
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "target").mkdir(mode=0o700)
    backend = make(tmp_path / "c")
    (tmp_path / "c" / "ec").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="link"):
        make(tmp_path / "c")
    with pytest.raises(BackendError, match="link"):
        put(backend, 1)
    assert not list((tmp_path / "target").iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "target")
    put(make(tmp_path / "link"), 1)  # the path itself may be one
    assert get(make(tmp_path / "target"), 1) == content(1)


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "foreign"])
def test_foreign_thing_under_an_entrys_name(tmp_path: Path, kind: str) -> None:
    backend = make(tmp_path)
    put(backend, 1)
    (tmp_path / "real").write_bytes(content(1))
    path = file_of(tmp_path, 1)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "directory":
        path.mkdir()
    elif os.geteuid() == 0:
        path.write_bytes(content(1))
        os.chown(path, 12345, -1)
    else:
        pytest.skip("needs root to change owners")
    before = path.lstat()
    assert not backend.contains(key(1))
    assert get(backend, 1) is None
    with pytest.raises(BackendError, match="move it away"):
        put(backend, 1)
    backend.delete(key(1))
    assert path.lstat().st_ino == before.st_ino
    put(backend, 2)  # the rest of the tier goes on
    assert get(backend, 2) == content(2)


def test_directory_that_vanishes(tmp_path: Path) -> None:
    backend = make(tmp_path / "c")
    put(backend, 1)
    shutil.rmtree(tmp_path / "c")
    assert not backend.contains(key(1))
    assert get(backend, 1) is None
    put(backend, 2)
    assert get(backend, 2) == content(2)
    assert used(tmp_path / "c") == KIB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    path = tmp_path / "small"
    path.mkdir(mode=0o700)
    options = ["-t", "tmpfs", "-o", "size=256k,mode=0700", "lmcache-ec-test", str(path)]
    if subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("may not mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = make(small, 1024 * KIB)
    put(backend, 1, 100 * KIB)
    with pytest.raises(BackendError, match="ENOSPC"):
        put(backend, 2, 200 * KIB)
    assert files(small) == [file_of(small, 1)]
    assert used(small) == 100 * KIB
    assert get(backend, 1) == content(1, 100 * KIB)
    backend.delete(key(1))
    with pytest.raises(BackendError, match="next try"):
        put(backend, 2, 200 * KIB)
    assert not files(small)
    (warning,) = caplog.messages
    assert f"{small}: No space left on device (ENOSPC). Remedy: free space" in warning
    backend._retry_at = 0  # the interval is over
    put(backend, 2, 200 * KIB)
    assert get(backend, 2) == content(2, 200 * KIB)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_read_only_file_system(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = make(small)
    put(backend, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    restarted = make(small)
    for reader in (backend, restarted):
        assert reader.contains(key(1))
        assert get(reader, 1) == content(1)
        with pytest.raises(BackendError, match="EROFS"):
            put(reader, 2)
        reader._retry_at = 0  # the interval is over
        put(reader, 1)  # it is there, so nothing is written and the outage goes on
        with pytest.raises(BackendError):
            reader.delete(key(1))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "another directory" in caplog.messages[0]


def test_parent_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    backend = make(tmp_path / "file" / "below" / "c")
    assert get(backend, 1) is None
    for _ in range(2):
        with pytest.raises(BackendError):
            put(backend, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
