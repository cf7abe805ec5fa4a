"""Ending a process and all its descendants, which share its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def kill_at_once(group: int, *, spare: bytes | None = None) -> None:
    """SIGKILL the processes of the group, such that none can act on another's death.

    Args:
        group: Id of the group, which is the process id of its leader.
        spare: A process with these bytes in its command line lives on.
    """
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        os.killpg(group, signal.SIGSTOP)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _members(group)}
        for pid, command in commands.items():
            if spare is None or spare not in command:
                with contextlib.suppress(ProcessLookupError):  # its parent's death took it
                    os.kill(pid, signal.SIGKILL)
        os.killpg(group, signal.SIGCONT)


def wait_until_ended(group: int, timeout_s: float) -> None:
    """Wait until no process of the group runs, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while _members(group) and time.monotonic() < deadline:
        time.sleep(0.01)


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
