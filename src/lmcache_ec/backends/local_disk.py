"""The disk tier: one immutable file an entry, and the file system is the index.

Looking up is one ``stat``, publishing is one ``rename``. The only shared state is the file
``usage``: whoever holds its ``flock`` may change which files exist, and it says how many bytes
they have. Every step first makes that number larger than the truth and then true again, so a
killed process can only leave it too large; the next scan of the directory corrects it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from typing import TYPE_CHECKING

from lmcache_ec.errors import BackendError, ConfigError, CorruptEntryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lmcache_ec.backends.base import Allocate
    from lmcache_ec.events import Events
    from lmcache_ec.key import CacheEngineKey

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
"""After a failed write, how long writes are refused without touching the disk."""
LOCK_TIMEOUT_S = 10.0
"""How long to wait for the directory's lock, which a stopped process might hold for ever."""
EVICT_TO_PERCENT = 95
"""Eviction goes on down to this share of the budget, so that it does not come with every put."""

_LOCK_POLL_S = 0.002
# Never follow a link, never wait for a FIFO's other end.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_USAGE = re.compile(rb"[0-9]{20}\n")
_REMEDIES = {
    errno.ENOSPC: "free space there or lower max_local_disk_size",
    errno.EDQUOT: "raise the quota or lower max_local_disk_size",
    errno.EROFS: "mount it writable or set local_disk to another directory",
    errno.EACCES: "make it writable for this user or set local_disk to another directory",
    errno.EPERM: "make it writable for this user or set local_disk to another directory",
}


class LocalDiskBackend:
    """Entries as files below ``<path>/ec``, shared by every process that is given that path.

    The budget holds over all of them together, and over restarts. Every verb may block for disk
    I/O; ``put`` and ``delete`` also for the directory's lock, up to ``LOCK_TIMEOUT_S``. Failures
    to write make the tier read-only for ``RETRY_INTERVAL_S``, with one warning for each outage.

    Args:
        path: Directory of the user's own; created by the first put if it is missing.
        capacity_bytes: Bytes that all entries together may take.
        events: Counts evictions.

    Raises:
        ConfigError: ``path`` or ``<path>/ec`` is not a directory, or others may write there.
    """

    name = "disk"

    def __init__(self, path: Path, capacity_bytes: int, events: Events) -> None:
        self._path = path
        self._root = path / "ec"
        self._usage_path = self._root / "usage"
        self._capacity_bytes = capacity_bytes
        self._events = events
        self._scanned = False  # read and set under the directory's lock
        self._outage = threading.Lock()  # guards the one below
        self._retry_at: float | None = None  # monotonic seconds; None while writes work
        reason = self._unsafe()
        if reason is not None:
            raise ConfigError(reason)

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether the entry's file is there; one ``stat``."""
        try:
            return _own_file(self._entry_path(key)) is not None
        except OSError as error:
            raise self._failed("look up", key, error) from error

    def get(self, key: CacheEngineKey, allocate: Allocate) -> memoryview | None:
        """Read the whole entry into memory of the caller; see ``Backend.get``.

        Raises:
            CorruptEntryError: The file is empty, or ended while it was read.
            BackendError: It cannot be read.
        """
        path = self._entry_path(key)
        try:
            file = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            # A link, a socket or another user's file is nothing of ours, like a missing one.
            if not self.contains(key):
                return None
            raise self._failed("open", key, error) from error
        try:
            with contextlib.ExitStack() as opened:
                opened.callback(os.close, file)
                found = os.fstat(file)
                if not _is_own(found):
                    return None
                if found.st_size == 0:
                    raise CorruptEntryError(f"{path} is empty; delete the entry")
                view = allocate(found.st_size)
                if view is None:
                    return None
                _read_exactly(file, view, path)
                with contextlib.suppress(OSError):  # recency is a hint, and reads outlive writes
                    os.utime(file)
        except OSError as error:
            raise self._failed("read", key, error) from error
        return view

    def put(self, key: CacheEngineKey, parts: Sequence[memoryview]) -> None:
        """Publish the concatenation of ``parts``, views of bytes; an entry that is there is kept.

        There is no fsync: a file torn by a power cut fails its checksum when it is read.

        Raises:
            BackendError: The entry is larger than the budget, or it cannot be written now.
        """
        size = sum(part.nbytes for part in parts)
        if size > self._capacity_bytes:
            raise BackendError(
                f"entry {key.name} of {size} bytes is too large for {self._path}, whose budget is "
                f"{self._capacity_bytes}; raise max_local_disk_size"
            )
        self._refuse_during_outage()
        path = self._entry_path(key)
        try:
            self._prepare(path.parent)
            if _is_kept(path):
                return
            self._write(path, parts, size)
        except OSError as error:
            self._begin_outage(error)
            raise self._failed("write", key, error) from error
        self._end_outage()

    def delete(self, key: CacheEngineKey) -> None:
        """Remove the entry's file if it is there.

        Raises:
            BackendError: It is there and cannot be removed.
        """
        path = self._entry_path(key)
        try:
            if _own_file(path) is None:
                return
            with self._locked() as usage:
                found = _own_file(path)
                if found is not None:
                    path.unlink()
                    _add(usage, -found.st_size)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed("delete", key, error) from error

    def close(self) -> None:
        """Nothing to release: no file stays open between two calls."""

    def _entry_path(self, key: CacheEngineKey) -> Path:
        return self._root / key.name[:2] / f"{key.name}.safetensors"

    def _failed(self, verb: str, key: CacheEngineKey, error: OSError) -> BackendError:
        return BackendError(f"cannot {verb} entry {key.name} in {self._path}: {_reason(error)}")

    def _unsafe(self) -> str | None:
        """Why the directories must not be used, with the remedy; None if they may or are missing.

        A path that cannot even be looked at counts as missing: that is an outage of this tier,
        not a reason to stop the engine.
        """
        for path in (self._path, self._root):
            try:
                # The user may point to a directory by a link; inside it, nothing is a link.
                found = path.stat(follow_symlinks=path is self._path)
            except OSError:
                return None
            if not stat.S_ISDIR(found.st_mode):
                problem = "is not a directory"
                remedy = "set local_disk to a directory, and let nothing inside it be a link"
            elif found.st_uid != os.geteuid():
                problem = f"belongs to user {found.st_uid}, this process is user {os.geteuid()}"
                remedy = "set local_disk to a directory of your own, or chown it"
            elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                problem = f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may write there"
                remedy = f"chmod go-w {path}, or set local_disk to a directory of your own"
            else:
                continue
            return f"local_disk {self._path}: {path} {problem}; {remedy}"
        return None

    def _prepare(self, shard: Path) -> None:
        """Make the directories, unless somebody else made them unsafe since the start."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.mkdir(mode=0o700, exist_ok=True)
        reason = self._unsafe()
        if reason is not None:
            raise PermissionError(errno.EACCES, reason)
        shard.mkdir(mode=0o700, exist_ok=True)

    def _write(self, path: Path, parts: Sequence[memoryview], size: int) -> None:
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
        file = self._reserve(temporary, size)
        published = False
        try:
            _write_all(file, parts)
            with self._locked():
                # Of two writers of one entry the first one wins, so its bytes count once.
                if not _is_kept(path):
                    temporary.rename(path)
                    published = True
        finally:
            if not published:
                # What cannot be given back stays reserved until the next scan.
                with contextlib.suppress(OSError, BackendError), self._locked() as usage:
                    temporary.unlink()
                    _add(usage, -size)
            os.close(file)

    def _reserve(self, temporary: Path, size: int) -> int:
        """Make room, then a temporary file of that size that is locked by this writer.

        Returns its descriptor. The lock tells a scan that the writer lives, and the size how
        much it has reserved.
        """
        # Whatever fails, the file is closed: a lock that is never given up would keep it for ever.
        with contextlib.ExitStack() as opened:
            with self._locked() as usage:
                used = _usage(usage)
                if used is None or not self._scanned or used + size > self._capacity_bytes:
                    used = self._make_room(size)
                    _set_usage(usage, used)
                    self._scanned = True  # only now: a result that was lost is found again
                if used + size > self._capacity_bytes:
                    raise BackendError(
                        f"{self._path} has no room for {size} bytes: writers at work hold {used} "
                        f"of {self._capacity_bytes}; raise max_local_disk_size"
                    )
                _set_usage(usage, used + size)
                try:
                    file = _create(temporary, size, opened)
                except OSError:
                    temporary.unlink(missing_ok=True)  # what cannot be removed stays reserved
                    _set_usage(usage, used)
                    raise
            opened.pop_all()
            return file

    def _make_room(self, size: int) -> int:
        """Count the bytes in use and evict the least recently used entries if need be.

        Returns the bytes then in use. Runs under the directory's lock.
        """
        entries: list[tuple[int, int, Path]] = []  # mtime in ns, bytes, path
        used = 0
        for path, found in self._files():
            if _ENTRY.fullmatch(path.name):
                entries.append((found.st_mtime_ns, found.st_size, path))
                used += found.st_size
            elif _TEMPORARY.fullmatch(path.name) and not _remove_orphan(path):
                used += found.st_size
        if used + size <= self._capacity_bytes:
            return used
        goal = max(self._capacity_bytes * EVICT_TO_PERCENT // 100 - size, 0)
        for _, entry_bytes, path in sorted(entries):
            if used <= goal:
                break
            try:
                path.unlink(missing_ok=True)  # somebody may remove files by hand
            except OSError:  # it stays, and stays counted: another one goes in its place
                continue
            used -= entry_bytes
            self._events.count("evictions", self.name)
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every regular file of ours in the shards. Anything else there is left alone."""
        for shard in self._root.iterdir():
            if not _SHARD.fullmatch(shard.name) or shard.is_symlink() or not shard.is_dir():
                continue
            for path in shard.iterdir():
                found = _own_file(path)
                if found is not None:
                    yield path, found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the directory's lock; gives the descriptor of the usage file.

        Each holder opens the file anew, so threads of one process exclude each other as well.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            usage = os.open(self._usage_path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600)
            try:
                self._flock(usage, deadline)
                try:
                    # The file may have been removed by hand, and made anew by somebody else.
                    found = _own_file(self._usage_path)
                    if found is not None and os.path.samestat(found, os.fstat(usage)):
                        yield usage
                        return
                finally:
                    # Closing alone would leave it locked if another thread has forked meanwhile.
                    fcntl.flock(usage, fcntl.LOCK_UN)
            finally:
                os.close(usage)

    def _flock(self, usage: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BackendError(
                        f"{self._usage_path} has been locked by another process for "
                        f"{LOCK_TIMEOUT_S:g} s; end that process if it hangs"
                    ) from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def _refuse_during_outage(self) -> None:
        with self._outage:
            if self._retry_at is not None and time.monotonic() < self._retry_at:
                raise BackendError(
                    f"{self._path} could not be written; the next try is in "
                    f"{self._retry_at - time.monotonic():.0f} s"
                )

    def _begin_outage(self, error: OSError) -> None:
        with self._outage:
            is_new = self._retry_at is None
            self._retry_at = time.monotonic() + RETRY_INTERVAL_S
        if is_new:
            remedy = _REMEDIES.get(error.errno or 0, "check the device and the directory")
            logger.warning(
                "Cannot write to the disk cache %s: %s. Remedy: %s. Reads go on; writes are tried "
                "again every %g s.",
                *(self._path, _reason(error), remedy, RETRY_INTERVAL_S),
            )

    def _end_outage(self) -> None:
        with self._outage:
            was_out = self._retry_at is not None
            self._retry_at = None
        if was_out:
            logger.info("The disk cache %s can be written again.", self._path)


def _reason(error: OSError) -> str:
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _own_file(path: Path) -> os.stat_result | None:
    """Status of a regular file of this user; None if there is none at ``path``."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if _is_own(found) else None


def _is_kept(path: Path) -> bool:
    """Whether the entry is there already; makes it the most recently used one.

    Raises:
        BackendError: Something else has its name.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not _is_own(found):
        raise BackendError(f"{path} is not a file of this user; move it away")
    with contextlib.suppress(OSError):  # removed meanwhile, or a read-only file system
        os.utime(path, follow_symlinks=False)
    return True


def _create(temporary: Path, size: int, opened: contextlib.ExitStack) -> int:
    """Create a file of ``size`` bytes, all holes, and lock it; ``opened`` closes it."""
    file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
    opened.callback(os.close, file)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(file, size)
    return file


def _remove_orphan(temporary: Path) -> bool:
    """Remove a temporary file whose writer has died; whether it was one."""
    try:
        file = os.open(temporary, os.O_RDWR | _OPEN_FLAGS)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _usage(usage: int) -> int | None:
    """Bytes in use by the usage file; None if it is new or damaged."""
    text = os.pread(usage, 21, 0)
    return int(text) if _USAGE.fullmatch(text) else None


def _set_usage(usage: int, used: int) -> None:
    text = b"%020d\n" % used
    if os.pwrite(usage, text, 0) != len(text):
        # Digits of two numbers could make a smaller one. An empty file is counted anew.
        os.ftruncate(usage, 0)
        raise OSError(errno.EIO, "The usage file was written in part")


def _add(usage: int, delta: int) -> None:
    used = _usage(usage)
    if used is not None:
        _set_usage(usage, max(used + delta, 0))


def _write_all(file: int, parts: Sequence[memoryview]) -> None:
    pending = [part for part in parts if part.nbytes]
    while pending:
        written = os.writev(file, pending)
        while pending and written >= pending[0].nbytes:
            written -= pending.pop(0).nbytes
        if written:
            pending[0] = pending[0][written:]


def _read_exactly(file: int, view: memoryview, path: Path) -> None:
    # A larger read-ahead; the whole file is wanted, from front to back. A hint, no more.
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    position = 0
    while position < len(view):
        count = os.preadv(file, [view[position:]], position)
        if count == 0:
            raise CorruptEntryError(
                f"{path} ended at byte {position} of {len(view)}; delete the entry"
            )
        position += count
