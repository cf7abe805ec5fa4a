"""The memory tier on a tmpfs as containers have it: 64 MiB, and shared with others."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from lmcache_ec.backends.arena import HEADROOM_BYTES
from lmcache_ec.backends.index import PAGE, CachePolicy
from lmcache_ec.backends.local_cpu import LocalCPUBackend, Reservation
from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.key import CacheEngineKey, ECMetadata, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

MIB = 1 << 20
NAMESPACE = Namespace(ECMetadata("m"), "float32")


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey(NAMESPACE, str(number))


def put(backend: LocalCPUBackend, number: int, nbytes: int) -> bool:
    reservation = backend.reserve(key(number), nbytes)
    if not isinstance(reservation, Reservation):
        return False
    shape = (nbytes // 4,)
    reservation.tensor(0, shape).fill_(number)
    reservation.commit(0, shape).release()
    return True


def found(backend: LocalCPUBackend, number: int, nbytes: int) -> bool:
    """Whether the entry is there; its bytes must be right."""
    lease = backend.lease(key(number))
    if lease is None:
        return False
    assert torch.equal(lease.tensor, torch.full((nbytes // 4,), float(number)))
    lease.release()
    return True


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    with path.open("wb", buffering=0) as file:
        for step in (MIB, PAGE):
            try:
                while True:
                    file.write(bytes(step))
            except OSError:
                continue


def serve(connection: Connection, shm: Path, capacity_bytes: int) -> None:
    """Says what was logged, then runs the functions of this module that it is asked for."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lmcache_ec").addHandler(handler)
    try:
        backend = LocalCPUBackend(shm, capacity_bytes, CachePolicy.LRU, Events())
    except BackendError as error:
        connection.send(str(error))
        return
    connection.send(records)
    while (question := connection.recv()) is not None:
        verb, number, nbytes = question
        connection.send((globals()[verb](backend, number, nbytes), backend.usage().watermark))
    backend.close()
    connection.send(records)


def test_a_small_tmpfs_is_used_as_far_as_it_goes(
    small_tmpfs: Path, start: Callable[..., Any]
) -> None:
    size = 4 * MIB
    child = start(serve, small_tmpfs, 256 * MIB)
    (warning,) = child.answer()
    assert "--shm-size" in warning
    assert str(small_tmpfs) in warning
    answers = [child.ask(("put", number, size)) for number in range(40)]
    assert all(done for done, _ in answers)
    watermark = answers[-1][1]
    assert 40 * MIB <= watermark <= 64 * MIB
    # The index and others need some room, too.
    assert shutil.disk_usage(small_tmpfs).free > HEADROOM_BYTES - MIB
    assert [child.ask(("found", number, size))[0] for number in (38, 39)] == [True, True]
    # A neighbour takes all the rest; what the arena has stays good, and room comes and goes.
    fill(small_tmpfs / "neighbour")
    assert all(child.ask(("put", number, size))[0] for number in range(40, 60))
    assert child.ask(("found", 59, size))[0]
    joiner = start(serve, small_tmpfs, 256 * MIB)
    assert isinstance(joiner.answer(), list)  # warnings, not an error
    assert joiner.ask(("found", 59, size))[0]
    joiner.kill()
    child.kill()
    # The next start takes over, though the tmpfs is still full.
    child = start(serve, small_tmpfs, 256 * MIB)
    (warning,) = child.answer()
    assert child.ask(("found", 59, size))[0]
    assert child.ask(("put", 60, size))[0]
    (small_tmpfs / "neighbour").unlink()
    assert all(child.ask(("put", number, size))[0] for number in range(61, 80))
    assert child.end() == 0
    assert list(small_tmpfs.iterdir()) == []


def test_a_tmpfs_that_fills_up_meanwhile(small_tmpfs: Path, start: Callable[..., Any]) -> None:
    child = start(serve, small_tmpfs, 50 * MIB)
    assert child.answer() == []
    fill(small_tmpfs / "neighbour")
    assert child.ask(("put", 1, MIB)) == (False, 0)
    assert child.ask(("put", 2, MIB)) == (False, 0)
    os.truncate(small_tmpfs / "neighbour", 20 * MIB)
    assert child.ask(("put", 3, MIB))[0]
    assert child.ask(("found", 3, MIB))[0]
    child._connection.send(None)
    (warning,) = child.answer()
    assert "is full" in warning
    assert child.end() == 0


def test_a_full_tmpfs_is_refused(small_tmpfs: Path, start: Callable[..., Any]) -> None:
    fill(small_tmpfs / "neighbour")
    child = start(serve, small_tmpfs, 16 * MIB)
    assert "--shm-size" in child.answer()
    assert child.end() == 0
    assert [path.name for path in small_tmpfs.iterdir()] == ["neighbour"]
