"""A process and all its descendants, which share its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it
_TRACKER_TIMEOUT_S = 5.0


def kill(group: int) -> None:
    """SIGKILL the processes of the group, such that none sees another die; wait until all ended.

    Python's resource tracker ends by itself a moment later: it first unlinks the semaphores and
    the shared memory of the others, which would else stay for ever.
    """
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        os.killpg(group, signal.SIGSTOP)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _members(group)}
        for pid, command in commands.items():
            if b"resource_tracker" not in command:
                with contextlib.suppress(ProcessLookupError):  # its parent's death took it
                    os.kill(pid, signal.SIGKILL)
        os.killpg(group, signal.SIGCONT)
    deadline = time.monotonic() + _TRACKER_TIMEOUT_S
    while _members(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.01)


def shared_memory(group: int) -> set[Path]:
    """Files directly in /dev/shm that the group maps; these outlive processes that are killed."""
    files: set[Path] = set()
    for pid in _members(group):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        # address permissions offset device inode path
        mapped = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines())
        files.update(path for path in mapped if path.parent == _SHARED_MEMORY)
    return files


def _members(group: int) -> list[int]:
    """Ids of the processes of this group that run; a zombie does not."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent group …; the name may itself contain blanks and brackets
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if int(process_group) == group and state not in "ZX":
            members.append(int(stat.parent.name))
    return members
