"""Who holds the arena, who takes it over, and what happens when its place is no good."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_ec.backends.arena import LAYOUT, Arena, arena_directory
from lmcache_ec.backends.index import PAGE, CachePolicy, Index
from lmcache_ec.backends.local_cpu import LocalCPUBackend, Reservation
from lmcache_ec.errors import BackendError, ConfigError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

MIB = 1 << 20
NAMESPACE = Namespace(ECMetadata("m"), "float32")


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey(NAMESPACE, str(number))


def content(number: int, nbytes: int = 64 << 10) -> torch.Tensor:
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(number))


def make(shm: Path, capacity_bytes: int = MIB) -> LocalCPUBackend:
    return LocalCPUBackend(shm, capacity_bytes, CachePolicy.LRU, Events())


def put(backend: LocalCPUBackend, number: int, nbytes: int = 64 << 10) -> bool:
    reservation = backend.reserve(key(number), nbytes)
    if not isinstance(reservation, Reservation):
        return False
    tensor = content(number, nbytes)
    reservation.tensor(0, tuple(tensor.shape)).copy_(tensor)
    reservation.commit(0, tuple(tensor.shape)).release()
    return True


def found(backend: LocalCPUBackend, number: int, nbytes: int = 64 << 10) -> bool:
    """Whether the entry is there; its bytes must be right."""
    lease = backend.lease(key(number))
    if lease is None:
        return False
    assert torch.equal(lease.tensor, content(number, nbytes))
    lease.release()
    return True


def serve(connection: Connection, shm: Path, capacity_bytes: int = MIB) -> None:
    """A process with a backend: runs the functions of this module that it is asked for."""
    backend = make(shm, capacity_bytes)
    kept = []
    connection.send(backend.arena.bytes.nbytes)
    while (question := connection.recv()) is not None:
        verb, *arguments = question
        if verb in ("lease", "reserve"):
            kept.append(getattr(backend, verb)(key(arguments[0]), *arguments[1:]))
            connection.send(type(kept[-1]).__name__)
        elif verb == "exit":  # without closing
            return
        else:
            connection.send(globals()[verb](backend, *arguments))
    backend.close()


def test_the_directory_is_private_and_named_for_its_scope(shm: Path) -> None:
    backend = make(shm)
    directory = arena_directory(shm)
    assert directory.stat().st_mode & 0o777 == 0o700
    pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
    assert directory.name == f"lmcache-ec-{os.geteuid()}-{pid_namespace}-v{LAYOUT}"
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.rglob("*"))
    backend.close()
    assert list(shm.iterdir()) == []


def test_last_one_to_close_removes_everything(shm: Path, start: Callable[..., Any]) -> None:
    first, second = start(serve, shm), start(serve, shm)
    first.answer()
    second.answer()
    assert first.ask(("put", 1))
    assert second.ask(("found", 1))
    assert first.end() == 0
    assert second.ask(("found", 1))
    assert second.end() == 0
    assert list(shm.iterdir()) == []


def test_the_index_is_never_taken_for_unused(shm: Path, start: Callable[..., Any]) -> None:
    # By this POSIX lock LMDB tells whether it may start over with the mutexes.
    child = start(serve, shm)
    child.answer()
    with (
        (arena_directory(shm) / "index" / "lock.mdb").open("rb+") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    assert child.end() == 0


def test_a_process_that_forgets_to_close(shm: Path, start: Callable[..., Any]) -> None:
    child = start(serve, shm)
    child.answer()
    child.ask(("put", 1))
    child.ask(("lease", 1))
    assert child.end(("exit",)) == 0
    assert list(shm.iterdir()) == []


def test_a_script_that_forgets_to_close(shm: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from lmcache_ec.backends.local_cpu import *\n"
        "from lmcache_ec.events import Events\n"
        "backend = LocalCPUBackend(pathlib.Path(sys.argv[1]), 1 << 20, CachePolicy.LRU, Events())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, shm], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize("capacity", [MIB, MIB // 2, 2 * MIB])
def test_entries_outlive_the_death_of_everybody(
    shm: Path, start: Callable[..., Any], capacity: int
) -> None:
    children = [start(serve, shm) for _ in range(2)]
    for number, child in enumerate(children):
        child.answer()
        for entry in range(number, 12, 2):
            assert child.ask(("put", entry))
    for number, child in enumerate(children):
        # Held when they die: a lease on what a smaller arena drops, and a reservation.
        assert child.ask(("lease", 11)) == "Lease"
        assert child.ask(("reserve", 20 + number, 100)) == "Reservation"
    for child in children:
        child.kill()
    backend = make(shm, capacity)
    usage = backend.usage()
    assert (usage.capacity, usage.pinned) == (capacity, 0)
    in_place = [*range(0, 12, 2), *range(1, 12, 2)][: capacity // (64 << 10)]
    assert [n for n in range(12) if found(backend, n)] == sorted(in_place)
    assert usage.entries == len(in_place)
    assert all(put(backend, n) for n in range(20, 60))
    backend.arena.index.check()
    backend.close()
    assert list(shm.iterdir()) == []


def truncate_arena(directory: Path) -> None:
    os.truncate(directory / "arena", 3 * PAGE)


def remove_arena(directory: Path) -> None:
    (directory / "arena").unlink()


def remove_index(directory: Path) -> None:
    shutil.rmtree(directory / "index")


def overwrite_index(directory: Path) -> None:
    (directory / "index" / "data.mdb").write_bytes(b"garbage " * 5000)


def truncate_index(directory: Path) -> None:
    os.truncate(directory / "index" / "data.mdb", 2 * PAGE)


def empty_index(directory: Path) -> None:
    (directory / "index" / "data.mdb").write_bytes(b"")


def zero_index(directory: Path) -> None:
    data = directory / "index" / "data.mdb"
    size = data.stat().st_size
    os.truncate(data, 2 * PAGE)
    os.truncate(data, size)


def overlap(directory: Path) -> None:
    index = Index(directory / "index", b"x" * 16, CachePolicy.LRU)
    with index._write() as txn:
        txn.put_free(0, 64 << 10)  # where an entry lies
    index.close()


@pytest.mark.parametrize(
    "damage",
    [truncate_arena, remove_arena, remove_index, overwrite_index, truncate_index, zero_index,
     overlap],
)  # fmt: skip
def test_a_damaged_arena_is_started_anew(
    shm: Path,
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    child = start(serve, shm)
    child.answer()
    for number in range(10):
        child.ask(("put", number))
    child.kill()
    damage(arena_directory(shm))
    backend = make(shm)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "starting anew" in caplog.text
    assert not any(found(backend, number) for number in range(10))
    assert put(backend, 1)
    assert found(backend, 1)
    backend.close()
    assert list(shm.iterdir()) == []


def test_an_emptied_index_gives_an_empty_arena(shm: Path, start: Callable[..., Any]) -> None:
    child = start(serve, shm)
    child.answer()
    child.ask(("put", 1))
    child.kill()
    empty_index(arena_directory(shm))
    backend = make(shm)
    assert not found(backend, 1)
    assert put(backend, 1)
    backend.close()


def test_killed_before_it_was_registered(shm: Path) -> None:
    directory = arena_directory(shm)
    directory.mkdir(mode=0o700)
    (directory / f"{'0' * 32}.new").touch()
    backend = make(shm)
    assert put(backend, 1)
    backend.close()
    assert list(shm.iterdir()) == []


def test_a_smaller_wish_joins_the_arena_that_is_there(
    shm: Path, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = make(shm)
    child = start(serve, shm, MIB // 4)
    assert child.answer() == MIB
    with caplog.at_level(logging.INFO):
        other = start(serve, shm, 4 * MIB)
        assert other.answer() == MIB
    child.end()
    other.end()
    backend.close()


@pytest.mark.parametrize("plant", ["file", "link", "mode", "owner"])
def test_a_planted_directory_is_refused(shm: Path, plant: str) -> None:
    directory = arena_directory(shm)
    target = shm / "elsewhere"
    target.mkdir(mode=0o700)
    if plant == "file":
        directory.touch()
    elif plant == "link":
        directory.symlink_to(target)
    else:
        directory.mkdir(mode=0o755 if plant == "mode" else 0o700)
        directory.chmod(0o755 if plant == "mode" else 0o700)
    if plant == "owner":
        if os.geteuid():
            pytest.skip("only root can give a directory away")
        os.chown(directory, 12345, -1)
    with pytest.raises(ConfigError, match="emove it, or set shm_path elsewhere") as caught:
        make(shm)
    assert str(directory) in str(caught.value)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("where", ["missing", "file", "/proc"])
def test_a_place_that_cannot_be_used(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, BackendError), match="shm_path"):
        make(Path(where) if where == "/proc" else tmp_path / where)


def test_tensors_outlive_close(shm: Path) -> None:
    backend = make(shm)
    put(backend, 1)
    lease = backend.lease(key(1))
    assert lease is not None
    backend.close()
    assert list(shm.iterdir()) == []
    assert torch.equal(lease.tensor, content(1))
    lease.release()
    backend.close()


def test_two_backends_of_one_process_share_one_arena(shm: Path) -> None:
    first, second = make(shm), make(shm, 2 * MIB)
    assert first.arena is second.arena
    put(first, 1)
    first.close()
    assert found(second, 1)
    second.close()
    assert list(shm.iterdir()) == []
    third = make(shm)
    assert third.arena is not first.arena
    assert not found(third, 1)
    third.close()


def fork(child: Callable[[], bool]) -> int:
    """Fork; the child exits with 0 if ``child`` is true. Its pid."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if child() else 1
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_and_wait(connection: Connection, shm: Path) -> None:
    """Holds the arena, and has a forked child that lives until it is told to end."""
    backend = make(shm)
    put(backend, 1)
    backend.lease(key(1))
    ours, theirs = os.pipe()

    def outlive() -> bool:
        os.close(theirs)
        return os.read(ours, 1) == b""

    fork(outlive)
    connection.send(None)
    connection.recv()


def test_a_forked_child_does_not_keep_the_arena(shm: Path, start: Callable[..., Any]) -> None:
    child = start(fork_and_wait, shm)
    child.answer()
    holders = arena_directory(shm) / "holders"
    assert len(list(holders.iterdir())) == 1
    child.kill()  # its forked child lives a little longer; its lease must not
    backend = make(shm)
    assert len(list(holders.iterdir())) == 1
    assert backend.usage().pinned == 0
    assert found(backend, 1)
    backend.close()
    assert list(shm.iterdir()) == []


def forks(connection: Connection, shm: Path) -> None:
    """What a forked child may do, and what its parent still can."""
    backend = make(shm)
    put(backend, 1)
    lease = backend.lease(key(1))
    assert lease is not None

    def inherited() -> bool:
        with pytest.raises(BackendError):
            backend.lease(key(1))
        with pytest.raises(BackendError):
            backend.reserve(key(2), 100)
        lease.release()
        readable = torch.equal(lease.tensor, content(1))
        backend.close()
        return readable

    def its_own() -> bool:
        own = make(shm)
        good = found(own, 1) and put(own, 3)
        own.close()
        return good

    codes = [exit_code(fork(inherited)), exit_code(fork(its_own))]
    connection.send((codes, backend.usage().pinned, found(backend, 1), found(backend, 3)))
    lease.release()
    connection.send(backend.usage().pinned)
    backend.close()


def test_fork_breaks_neither_parent_nor_child(shm: Path, start: Callable[..., Any]) -> None:
    child = start(forks, shm)
    assert child.answer() == ([0, 0], 64 << 10, True, True)
    assert child.answer() == 0
    assert child.end() == 0
    assert list(shm.iterdir()) == []


def test_labels_are_those_of_the_living(shm: Path, start: Callable[..., Any]) -> None:
    backend = make(shm)
    backend.arena.announce("one")
    backend.arena.announce("two")
    assert backend.arena.announced() == {"one", "two"}
    child = start(announcing, shm)
    child.answer()
    assert backend.arena.announced() == {"one", "two", "child"}
    child.kill()
    assert backend.arena.announced() == {"one", "two"}
    backend.close()


def announcing(connection: Connection, shm: Path) -> None:
    make(shm).arena.announce("child")
    connection.send(None)
    connection.recv()


def test_a_removed_directory_reclaims_nobody(shm: Path, start: Callable[..., Any]) -> None:
    backend = make(shm)
    put(backend, 1)
    child = start(serve, shm)
    child.answer()
    assert child.ask(("lease", 1)) == "Lease"
    shutil.rmtree(arena_directory(shm))
    late = start(serve, shm)  # makes a directory of its own
    late.answer()
    with pytest.raises(BackendError, match="was removed"):
        backend.arena.reclaim()
    assert backend.usage().pinned == 64 << 10  # what the child leases
    assert found(backend, 1)
    backend.close()
    assert late.ask(("put", 2))
    assert child.end() == 0
    assert late.end() == 0
    assert list(shm.iterdir()) == []


def test_close_waits_for_those_who_write(shm: Path) -> None:
    backend = make(shm)
    reservation = backend.reserve(key(1), 100)
    assert isinstance(reservation, Reservation)
    closing = threading.Thread(target=backend.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert arena_directory(shm).exists()
    reservation.buffer.fill_(1)
    with pytest.raises(BackendError, match="closed"):
        reservation.commit(0, (25,))
    closing.join(20)
    assert list(shm.iterdir()) == []


def close_under_load(connection: Connection, shm: Path) -> None:
    for _ in range(10):
        backend = make(shm)

        def work(backend: LocalCPUBackend = backend) -> None:
            number = 0
            try:
                while True:
                    number += 1
                    put(backend, number % 40)
                    found(backend, (number + 7) % 40)
            except BackendError:
                return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        threads[0].join(0.02)
        backend.close()
        for thread in threads:
            thread.join()
    connection.send(list(shm.iterdir()))


def test_close_under_load(shm: Path, start: Callable[..., Any]) -> None:
    child = start(close_under_load, shm)
    assert child.answer() == []
    assert child.end() == 0


def test_room_made_by_somebody_else_is_room(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(shm, MIB, CachePolicy.LRU)
    assert arena.grow(MIB)
    assert arena.grow(MIB // 2)
    assert not arena.grow(MIB + PAGE)
    assert caplog.records == []
    arena.close()


def test_populating_changes_no_byte(shm: Path) -> None:
    arena = Arena(shm, MIB, CachePolicy.LRU)
    assert arena.grow(MIB)
    arena.bytes.fill_(7)
    arena._populate(arena.bytes, 0, MIB)
    assert bool((arena.bytes == 7).all())
    arena.close()
