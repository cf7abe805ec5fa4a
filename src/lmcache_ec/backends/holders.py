"""Who lives in an arena: one file for each process, which the process keeps locked.

The kernel drops the lock at any kind of death, so no pid is ever trusted. All functions are called
under the lock of the arena's directory, but for :func:`remove_if_abandoned`, which takes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


DYING_S = 1.0  # how long a process that was killed may take to be gone


def register(directory: Path, holder: bytes) -> int:
    """Create the holder's file, locked before anyone can see it.

    Returns its descriptor: the holder lives until it is closed. Lines may be appended to it.
    """
    files = directory / "holders"
    files.mkdir(mode=0o700, exist_ok=True)
    hidden = directory / f"{holder.hex()}.new"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    hidden.rename(files / holder.hex())
    return fd


def unregister(directory: Path, holder: bytes) -> None:
    """Remove the holder's file."""
    (directory / "holders" / holder.hex()).unlink(missing_ok=True)


def living(directory: Path, me: bytes = b"") -> set[bytes]:
    """The live holders but ``me``, whose file is not looked at; files of dead ones are removed."""
    for hidden in directory.glob("*.new"):  # killed before it was registered
        hidden.unlink()
    files = directory / "holders"
    alive = set()
    for path in list(files.iterdir()) if files.is_dir() else []:
        if path.name == me.hex():
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alive.add(bytes.fromhex(path.name))
        else:
            path.unlink()
        finally:
            os.close(fd)
    return alive


def lines(directory: Path) -> set[str]:
    """Every line that a registered holder wrote into its file."""
    return {
        line for path in (directory / "holders").iterdir() for line in path.read_text().splitlines()
    }


def remove_if_abandoned(directory: Path) -> None:
    """Give back the memory of an arena in which nobody lives any more; else do nothing.

    Waits a little for processes that are being killed: vLLM does not wait for those it kills.
    """
    deadline = time.monotonic() + DYING_S
    while directory.is_dir() and not _remove_if_abandoned(directory):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _remove_if_abandoned(directory: Path) -> bool:
    """Whether nothing is left to do."""
    with contextlib.suppress(OSError):  # gone, or not ours: nothing to give back
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            info = os.fstat(fd)
            if info.st_uid == os.geteuid() and os.path.samestat(info, directory.lstat()):
                if living(directory):
                    return False
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)
    return True
