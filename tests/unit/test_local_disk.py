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
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_ec.backends import local_disk
from lmcache_ec.backends.local_disk import LocalDiskBackend
from lmcache_ec.errors import BackendError, ConfigError, CorruptEntryError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def get(backend: LocalDiskBackend, number: int) -> bytes | None:
    view = backend.get(key(number), lambda size: memoryview(bytearray(size)))
    return None if view is None else bytes(view)


def file_of(path: Path, number: int) -> Path:
    name = key(number).name
    return path / "ec" / name[:2] / f"{name}.safetensors"


def files(path: Path) -> list[Path]:
    """Entries and temporary files."""
    return [file for file in (path / "ec").glob("??/*") if file.is_file()]


def used(path: Path) -> int:
    """Bytes that the usage file claims."""
    return int((path / "ec" / "usage").read_text())


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
    assert not (tmp_path / "a").exists(), "lookups create nothing"
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
    for directory in (tmp_path / "c", tmp_path / "c" / "ec", file_of(tmp_path / "c", 1).parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    for file in (file_of(tmp_path / "c", 1), tmp_path / "c" / "ec" / "usage"):
        assert file.stat().st_mode & 0o777 == 0o600


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
    assert file_of(tmp_path, 1).stat().st_mtime > 1
    assert used(tmp_path) == KIB


def test_open_file_survives_eviction(tmp_path: Path) -> None:
    backend = make(tmp_path)
    put(backend, 1)

    def allocate(size: int) -> memoryview:
        backend.delete(key(1))
        return memoryview(bytearray(size))

    view = backend.get(key(1), allocate)
    assert view is not None
    assert bytes(view) == content(1)
    assert not backend.contains(key(1))


def test_file_that_shrinks_is_corrupt(tmp_path: Path) -> None:
    backend = make(tmp_path)
    put(backend, 1)

    def allocate(size: int) -> memoryview:
        os.truncate(file_of(tmp_path, 1), 100)
        return memoryview(bytearray(size))

    with pytest.raises(CorruptEntryError, match="ended at byte 100"):
        backend.get(key(1), allocate)
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
    backend.delete(key(2))
    put(backend, 2)
    os.truncate(tmp_path / "ec" / "usage", 21)
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
    (tmp_path / "ec" / "0x").mkdir()
    for number in range(2, 12):
        put(backend, number)
    assert (shard / "notes.txt").stat().st_size == 9 * KIB
    assert (shard / ("0" * 64 + ".safetensors")).is_symlink()
    assert used(tmp_path) == 3 * KIB


def test_threads_share_one_backend(tmp_path: Path) -> None:
    backend = make(tmp_path, 20 * KIB)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            _use(backend, seed, 60)
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
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
    workers = [run(_use_path, tmp_path, seed, 150) for seed in range(2)]
    victims = [run(_use_path, tmp_path, 2, 1_000_000)]
    watched = 0
    while any(worker.is_alive() for worker in workers):
        with frozen(tmp_path) as total:
            assert total <= 20 * KIB
            assert total <= used(tmp_path)
        watched += 1
        if watched % 20 == 0 and len(victims) < 4:
            victims[-1].kill()
            victims.append(run(_use_path, tmp_path, 2, 1_000_000))
    for victim in victims:
        victim.kill()
        victim.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(victims) == 4
    put(make(tmp_path, 20 * KIB), 99)
    assert not [file for file in files(tmp_path) if file.suffix == ".tmp"]
    with frozen(tmp_path) as total:
        assert used(tmp_path) == total <= 20 * KIB


def test_killed_at_every_line(tmp_path: Path) -> None:
    process = run(_kill_at_every_line, tmp_path)
    process.join()
    assert process.exitcode == 0


def _kill_at_every_line(parent: Path) -> None:
    """Fork, kill the child at its n-th line of a put that evicts, check, for every n."""
    capacity = 3 * KIB
    number = 0
    for killed in itertools.count():
        path = parent / str(killed)
        before = make(path, capacity)
        for filler in range(-3, 0):
            put(before, filler)
        child = os.fork()
        if child == 0:
            _trap(killed)
            put(make(path, capacity), number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        total = sum(file.stat().st_size for file in files(path))
        assert total <= capacity
        assert total <= used(path), f"the counter is too small after line {killed}"
        after = make(path, capacity)
        assert get(after, number) in (None, content(number))
        put(after, number)
        assert get(after, number) == content(number)
        assert used(path) == sum(file.stat().st_size for file in files(path))
        assert not [file for file in files(path) if file.suffix == ".tmp"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert killed > 100, "the lines of reserve, evict, write and rename"


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
    put(backend, 2)


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


def test_path_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "c").symlink_to(tmp_path / "target")
    put(make(tmp_path / "c"), 1)
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
    backend.delete(key(1))
    assert not (tmp_path / "c").exists()
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
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk(
    small: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert str(small) in warning
    assert "max_local_disk_size" in warning

    monkeypatch.setattr(local_disk, "RETRY_INTERVAL_S", 0)
    backend._begin_outage(OSError())  # the interval that is running ends now
    put(backend, 2, 200 * KIB)
    assert get(backend, 2) == content(2, 200 * KIB)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    put(backend, 3, KIB)
    assert len(caplog.records) == 2


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
        with pytest.raises(BackendError):
            reader.delete(key(1))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "another directory" in caplog.messages[0]


@pytest.mark.parametrize("parent", ["file", "/proc/self"])
def test_parent_that_cannot_be_made(
    tmp_path: Path, parent: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    backend = make(tmp_path / parent / "below" / "c")
    assert not backend.contains(key(1))
    assert get(backend, 1) is None
    for _ in range(2):
        with pytest.raises(BackendError):
            put(backend, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
