"""The arena: one file on tmpfs that every process of one user on a host maps, and who lives in it.

    <shm_path>/lmcache-ec-<uid>-<pid namespace>-v<layout>/   0700
        arena          the bytes, sparse up to the watermark of the index
        index/         LMDB (index.py)
        holders/<id>   one file for each live process, locked by it; its lines say what it serves

A process lives as long as its holder file is locked (holders.py). Whoever opens the arena, or finds
no room in it, reclaims what dead holders left. The last one to close removes everything; after a
crash the next one to open finds the entries of before.

All transitions of the directory happen under a ``flock`` on it. It is never held during I/O on
tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import threading
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcache_ec.backends import holders
from lmcache_ec.backends.index import HOLDER_BYTES, CachePolicy, Index
from lmcache_ec.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

LAYOUT = 2  # of everything below the directory; another number is another arena
GROWTH_BYTES = 64 << 20  # blocks are allocated in steps of this much
HEADROOM_BYTES = 8 << 20  # left on the tmpfs for the index and for others
LOCK_FILE_BYTES = 1024 * 64 + 4096  # 1024 readers of a cache line each, and LMDB's header
CLOSE_TIMEOUT_S = 5.0  # how long close() waits for those who still write into an extent

_MADV_POPULATE_WRITE = 23  # Linux 5.14, madvise(2); older kernels refuse it and fault page by page
_libc = ctypes.CDLL(None, use_errno=True)


def arena_directory(shm_path: Path) -> Path:
    """Where this user's arena is: LMDB may not be shared across pid namespaces, so each has one."""
    pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
    return shm_path / f"lmcache-ec-{os.geteuid()}-{pid_namespace}-v{LAYOUT}"


class Arena:
    """This process's membership in the arena of its user.

    Args:
        shm_path: Directory on a tmpfs.
        capacity_bytes: Size to use, a multiple of ``PAGE``; counts only when no other live
            process holds the arena.
        policy: Order of eviction.

    Attributes:
        directory: Where it is.
        index: The index over it.
        bytes: The whole mapping, ``[capacity]``, uint8, on CPU. Only extents that the index has
            given out may be touched: there the blocks are allocated, so no access can SIGBUS.
        short: Whether the tmpfs has less room than the arena could take.
        closed: Whether this process has left it.

    Raises:
        ConfigError: ``shm_path``, or what stands at the arena's place, cannot be used.
        BackendError: The tmpfs has no room, or the index failed.
    """

    def __init__(self, shm_path: Path, capacity_bytes: int, policy: CachePolicy) -> None:
        if not shm_path.is_dir():
            raise ConfigError(f"shm_path: {shm_path} is not a directory; name one on a tmpfs")
        self.directory = arena_directory(shm_path)
        self._holder = os.urandom(HOLDER_BYTES)
        self._grow_lock = threading.Lock()
        self._transition = threading.Lock()  # flock does not exclude threads that share its fd
        self._idle = threading.Condition()
        self._uses = 0
        self.closed = False
        self._files = contextlib.ExitStack()
        self._directory_fd = self._open_locked()
        self._files.callback(os.close, self._directory_fd)
        try:
            alone = not self._reclaim_dead(None)
            room = self._room()
            self._holder_fd = holders.register(self.directory, self._holder)
            self._files.callback(os.close, self._holder_fd)
            self.index = self._open_index(alone, capacity_bytes, policy)
            usage = self.index.usage()
            self.short = usage.watermark + room < usage.capacity
            self.bytes = self._map(usage.capacity, usage.watermark)
            self._reclaim_dead(self.index)
        except OSError as error:
            self._leave()
            raise BackendError(f"memory tier at {self.directory}: {error}") from error
        except BaseException:
            self._leave()
            raise
        fcntl.flock(self._directory_fd, fcntl.LOCK_UN)
        if self.short:
            logger.warning(
                "lmcache-ec: %s has room for %d MiB only, so the memory tier cannot reach its "
                "%d MiB; give the container more shared memory (--shm-size or --ipc=host), or "
                "lower max_local_cpu_size",
                shm_path, usage.watermark + room >> 20, usage.capacity >> 20,
            )  # fmt: skip
        if usage.capacity != capacity_bytes:
            logger.info(
                "lmcache-ec: joined the memory tier at %s of %d MiB, made by another process "
                "(this one asked for %d MiB)",
                self.directory, usage.capacity >> 20, capacity_bytes >> 20,
            )  # fmt: skip
        _open_arenas.add(self)
        # After the work queues. Not atexit: children of multiprocessing do not run it.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        threading.Thread(
            target=self._populate, args=(self.bytes, 0, usage.watermark), daemon=True
        ).start()

    # ------------------------------------------------------------------ use

    def begin(self) -> None:
        """Keep the index open, and every reservation this process's own, until :meth:`end`.

        Raises:
            BackendError: This process has left the arena.
        """
        # Before the lock, too: in a forked child nobody may be left to release it.
        if not self.closed:
            with self._idle:
                if not self.closed:
                    self._uses += 1
                    return
        raise BackendError(f"this process has left the memory tier at {self.directory}")

    def end(self) -> None:
        """Undo one :meth:`begin`."""
        with self._idle:
            self._uses -= 1
            if self._uses == 0:
                self._idle.notify_all()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """:meth:`begin` and :meth:`end` around a block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    # ------------------------------------------------------------------ room

    def grow(self, length: int) -> bool:
        """Allocate blocks beyond the watermark so that an extent of ``length`` bytes fits.

        May take tens of milliseconds, so never on a scheduler or model thread. Returns False when
        the arena or the tmpfs has no room.
        """
        with self._grow_lock:
            capacity = len(self.bytes)
            start, need = self.index.needed_for(length)
            if need > capacity:
                return False
            if need <= start:  # somebody else has just made the room
                return True
            for end in sorted({need, min(capacity, max(need, start + GROWTH_BYTES))}, reverse=True):
                if end - start > self._room():
                    continue
                try:
                    os.posix_fallocate(self._file_fd, start, end - start)
                except OSError as error:
                    logger.debug("no blocks for the memory tier: %s", error)
                    continue
                self._populate(self.bytes, start, end)
                self.index.grow(start, end)
                return True
            if not self.short:
                self.short = True
                logger.warning(
                    "lmcache-ec: %s is full, so the memory tier stays at %d MiB of its %d MiB; "
                    "free some of it, or lower max_local_cpu_size",
                    self.directory.parent, start >> 20, capacity >> 20,
                )  # fmt: skip
            return False

    def reclaim(self) -> None:
        """Drop reservations and pins of processes that died."""
        with self.use(), self._locked():
            self._reclaim_dead(self.index)

    # ------------------------------------------------------------------ who serves from here

    def announce(self, label: str) -> None:
        """Say in this process's holder file that it serves ``label``."""
        os.write(self._holder_fd, f"{label}\n".encode())

    def announced(self) -> set[str]:
        """Labels of all live processes."""
        with self.use(), self._locked():
            self._reclaim_dead(self.index)
            return holders.lines(self.directory)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave the arena; the last live process to do so removes it. Idempotent.

        Tensors that still view the arena stay readable until they are dropped. If somebody in this
        process still writes into an extent after ``CLOSE_TIMEOUT_S``, the extent must not go to
        others: then the membership ends with the process.
        """
        with self._idle:
            if self.closed:
                return
            self.closed = True
            _open_arenas.discard(self)
            self._at_exit.cancel()
            if not self._idle.wait_for(lambda: self._uses == 0, CLOSE_TIMEOUT_S):
                return
        with self._locked():
            with contextlib.suppress(BackendError):
                self.index.reclaim(self._holder)
            self.index.close()
            self._leave()
        del self.bytes

    def forget(self) -> None:
        """In a forked child: drop the inherited lock, so that the parent's death is seen."""
        self.closed = True
        if self._uses == 0:  # else a transaction of the parent may be under way in this copy
            self.index.close()  # so that the child can open it for itself
        self._files.close()

    def _leave(self) -> None:
        """Under the lock: unregister, and remove the directory when no other process lives."""
        with contextlib.suppress(OSError, BackendError):
            holders.unregister(self.directory, self._holder)
            if not self._reclaim_dead(None):
                shutil.rmtree(self.directory, ignore_errors=True)
        self._files.close()

    # ------------------------------------------------------------------ opening, under the lock

    def _open_locked(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                with contextlib.suppress(FileExistsError):
                    self.directory.mkdir(mode=0o700)
            except OSError as error:
                kind = BackendError if error.errno == errno.ENOSPC else ConfigError
                raise kind(
                    f"memory tier: {self.directory} cannot be made ({error.strerror}); make "
                    "shm_path writable for this user, or set it elsewhere"
                ) from error
            try:
                fd = os.open(self.directory, flags)
            except FileNotFoundError:  # its last holder has just removed it
                continue
            except OSError as error:
                raise ConfigError(
                    f"memory tier: {self.directory} is not a directory of this user "
                    f"({error.strerror}); remove it, or set shm_path elsewhere"
                ) from error
            info = os.fstat(fd)
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
                os.close(fd)
                raise ConfigError(
                    f"memory tier: {self.directory} belongs to uid {info.st_uid} with mode "
                    f"{stat.S_IMODE(info.st_mode):o}; it must be this user's own with mode 700. "
                    "Remove it, or set shm_path elsewhere"
                )
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(info, self.directory.lstat()):
                    return fd
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._transition:
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if not self.closed:
                    fcntl.flock(self._directory_fd, fcntl.LOCK_UN)

    def _reclaim_dead(self, index: Index | None) -> int:
        """Forget holders that died; how many others live.

        Raises:
            BackendError: Somebody removed the directory, so nobody knows who lives.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._directory_fd), self.directory.lstat()):
                alive = holders.living(self.directory, self._holder)
                if index is not None:
                    for holder in index.holders() - alive - {self._holder}:
                        index.reclaim(holder)
                return len(alive)
        raise BackendError(
            f"{self.directory} was removed while this process uses it; restart to share memory "
            "with later processes again"
        )

    def _open_index(self, alone: bool, capacity_bytes: int, policy: CachePolicy) -> Index:
        """Open the index and the file; the sole live process sets their size, or starts anew."""
        path, file = self.directory / "index", self.directory / "arena"
        if alone and path.exists() != file.exists():
            logger.warning(
                "lmcache-ec: the memory tier left at %s lacks its %s; starting anew",
                *(self.directory, (file if path.exists() else path).name),
            )
            shutil.rmtree(path, ignore_errors=True)
            file.unlink(missing_ok=True)
        room = self._room()
        # Blocks that an earlier or another process has taken are room that is there to use.
        if room + (file.stat().st_blocks * 512 if file.exists() else 0) < 0:
            raise BackendError(
                f"{self.directory.parent} has no room for a memory tier "
                f"({room + HEADROOM_BYTES >> 20} MiB free); give the container more shared memory "
                "(--shm-size or --ipc=host)"
            )
        for attempt in ("taken over", "new"):
            self._file_fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            index = None
            try:
                _create_lock_file(path)
                index = Index(path, self._holder, policy)
                if alone:
                    index.check()
                    size, watermark = os.fstat(self._file_fd).st_size, index.usage().watermark
                    if size < watermark:
                        raise BackendError(f"arena has {size} bytes of {watermark}")  # noqa: TRY301
                    # Before the size changes: what goes then must be nobody's.
                    self._reclaim_dead(index)
                    index.resize(capacity_bytes)
                    os.ftruncate(self._file_fd, capacity_bytes)
                    if watermark := index.usage().watermark:
                        os.posix_fallocate(self._file_fd, 0, watermark)
            except (BackendError, OSError) as error:
                if index is not None:
                    index.close()
                os.close(self._file_fd)
                if not alone or attempt == "new":
                    raise BackendError(f"memory tier at {self.directory}: {error}") from error
                logger.warning(
                    "lmcache-ec: the memory tier left at %s cannot be used (%s); starting anew",
                    self.directory, error,
                )  # fmt: skip
                shutil.rmtree(path, ignore_errors=True)
                file.unlink(missing_ok=True)
            else:
                self._files.callback(os.close, self._file_fd)
                return index
        raise AssertionError

    def _map(self, capacity: int, watermark: int) -> torch.Tensor:
        size = os.fstat(self._file_fd).st_size
        if size < capacity or watermark > capacity:
            raise BackendError(
                f"{self.directory}/arena has {size} bytes, not {capacity}; stop what uses "
                "it and remove the directory"
            )
        return torch.frombuffer(mmap.mmap(self._file_fd, capacity), dtype=torch.uint8)

    def _room(self) -> int:
        """Bytes of the tmpfs that the arena may still take."""
        info = os.fstatvfs(self._directory_fd)
        return info.f_bavail * info.f_frsize - HEADROOM_BYTES

    @staticmethod
    def _populate(mapping: torch.Tensor, start: int, end: int) -> None:
        """Map allocated pages now, in steps, so that the first copy meets no page fault.

        A kernel that lacks it refuses, and the first copy is slower.
        """
        # The loop is plain Python: if the process ends meanwhile, a thread may not be in torch.
        address = mapping.data_ptr()
        for offset in range(start, end, GROWTH_BYTES):
            length = min(GROWTH_BYTES, end - offset)
            _libc.madvise(
                ctypes.c_void_p(address + offset), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            )


def _create_lock_file(path: Path) -> None:
    """Create LMDB's lock file with all its blocks: touching it on a full tmpfs would be a SIGBUS.

    Never opened here once it exists: closing any descriptor of it would drop this process's POSIX
    lock on it, and the next process to open the index would take it for unused and start over
    with the mutexes that others hold.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, LOCK_FILE_BYTES)
        finally:
            os.close(fd)


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_all() -> None:
    for arena in list(_open_arenas):
        arena.forget()
    _open_arenas.clear()


os.register_at_fork(after_in_child=_forget_all)
