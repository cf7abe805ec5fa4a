"""Faults on purpose: system calls that fail, and a tier that misbehaves, both by a script.

A script is asked before every call, and answers with the fault to make or None. It is called
under a lock, so it may count, and it may act by itself, for example remove a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from lmcache_ec.errors import BackendError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType, TracebackType

    from lmcache_ec.backends.base import Allocate, Backend
    from lmcache_ec.key import CacheEngineKey


@dataclass(frozen=True)
class CallFault:
    """How one system call goes wrong.

    Attributes:
        number: The errno that it fails with; 0 for none, and then it is short: ``writev``,
            ``preadv``, ``pread`` and ``pwrite`` move about half of the bytes.
        done: Whether it does its work before it fails, as when a network file system loses the
            answer. ``close`` always does.
    """

    number: int
    done: bool = False


SHORT = CallFault(0)
"""A call that moves fewer bytes than it was asked to."""

CallScript = Callable[[str], CallFault | None]
"""Gets the name of a call of ``CALLS``."""

CALLS: dict[str, ModuleType] = dict.fromkeys(
    (
        *("open", "close", "stat", "fstat", "mkdir", "unlink", "rename", "listdir", "ftruncate"),
        *("writev", "preadv", "pread", "pwrite", "utime", "posix_fadvise"),
    ),
    os,
) | {"flock": fcntl}
"""Every system call of the disk tier, its own and pathlib's, and the module that has it."""


def always(call: str, fault: CallFault) -> CallScript:
    """Every call of this name goes wrong."""
    return lambda name: fault if name == call else None


def nth(number: int, fault: CallFault | Callable[[], None]) -> CallScript:
    """Only the ``number``-th call of all goes wrong, from 0; or then something is done."""
    left = number

    def script(_: str) -> CallFault | None:
        nonlocal left
        left -= 1
        if left != -1:
            return None
        return fault if isinstance(fault, CallFault) else fault()

    return script


def sometimes(seed: int, share: float, faults: Sequence[CallFault]) -> CallScript:
    """A ``share`` (0 to 1) of all calls goes wrong, each in one of these ways."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    return lambda _: chance.choice(faults) if chance.random() < share else None


class SystemCallFaults:
    """A context in which system calls on files below a directory go wrong by a script.

    It replaces functions of the modules ``os`` and ``fcntl`` for the whole process; calls on any
    other file are left alone. Thread-safe; one context at a time.

    Args:
        root: The directory.
        script: Asked before every call; None lets all pass.

    Attributes:
        script: May be changed at any time.
        calls: The calls met so far, in order.
        open_files: Descriptors of files below ``root`` that were opened and not yet closed.
    """

    def __init__(self, root: Path, script: CallScript | None = None) -> None:
        self.script = script
        self.calls: list[str] = []
        self.open_files: set[object] = set()
        self._root = str(root)
        self._lock = threading.Lock()
        self._paused = threading.local()
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        for name, module in CALLS.items():
            self._real[name] = getattr(module, name)
            setattr(module, name, functools.partial(self._call, name))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, module in CALLS.items():
            setattr(module, name, self._real[name])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile the calls of this thread pass unseen, for example those of a check."""
        self._paused.now = True
        try:
            yield
        finally:
            del self._paused.now

    def _call(self, name: str, /, *args: object, **options: object) -> object:
        if hasattr(self._paused, "now") or not self._concerns(args[0]):
            return self._real[name](*args, **options)
        fault = self._ask(name)
        if name == "close":  # before the number can be given to another file
            self.open_files.discard(args[0])
        if fault == SHORT:
            return self._short(name, *args)
        result = None
        if fault is None or fault.done or name == "close":
            result = self._real[name](*args, **options)
        if fault is not None:
            if name == "open" and result is not None:
                self._real["close"](result)  # whoever lost the answer has no descriptor either
            raise OSError(fault.number, os.strerror(fault.number), str(args[0]))
        if name == "open":
            self.open_files.add(result)
        return result

    def _ask(self, name: str) -> CallFault | None:
        with self._lock:
            self.calls.append(name)
            if self.script is None:
                return None
            with self.paused():  # the script's own calls pass
                return self.script(name)

    def _concerns(self, target: object) -> bool:
        if isinstance(target, int):
            return target in self.open_files
        if not isinstance(target, str | os.PathLike):
            return False
        path = str(os.fspath(target))
        return path == self._root or path.startswith(self._root + "/")

    def _short(self, name: str, *args: Any) -> object:  # noqa: ANN401 - each call has its own
        """Do about half of a call that moves bytes, but never nothing."""
        file, data, *offset = args
        if name in ("writev", "preadv"):
            data = [memoryview(data[0])[: max(1, len(data[0]) // 2)]]
        elif name == "pwrite":
            data = data[: max(1, len(data) // 2)]
        elif name == "pread":
            data = max(1, data // 2)
        else:
            raise ValueError(f"{name} cannot be short; give its fault an errno")
        return self._real[name](file, data, *offset)


class TierFault(Enum):
    """How one verb of a tier goes wrong. ``contains`` and ``delete`` have no bytes to damage."""

    ERROR = "fails with a BackendError"
    GARBAGE = "gives or keeps other bytes of the same length"
    TRUNCATED = "gives or keeps the first half of the bytes"
    VANISHED = "finds the entry gone, or does not keep it"


TierScript = Callable[[str], TierFault | float | None]
"""Gets the name of a verb; a number is a delay in seconds, after which all goes well."""


class FaultyTier:
    """A tier that does what another one does, except where the script wants a fault.

    Args:
        tier: The real tier.
        script: Asked before every verb; None lets all pass.
        seed: Of the garbage.

    Attributes:
        script: May be changed at any time.
    """

    def __init__(self, tier: Backend, script: TierScript | None = None, seed: int = 0) -> None:
        self.name = tier.name
        self.script = script
        self._tier = tier
        self._lock = threading.Lock()
        self._garbage = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

    def contains(self, key: CacheEngineKey) -> bool:
        """As ``Backend.contains``."""
        if self._fault("contains") is TierFault.VANISHED:
            self._tier.delete(key)
        return self._tier.contains(key)

    def get(self, key: CacheEngineKey, allocate: Allocate) -> memoryview | None:
        """As ``Backend.get``."""
        fault = self._fault("get")
        if fault is TierFault.VANISHED:
            self._tier.delete(key)
        if fault not in (TierFault.GARBAGE, TierFault.TRUNCATED):
            return self._tier.get(key, allocate)
        found = self._tier.get(key, lambda nbytes: memoryview(bytearray(nbytes)))
        if found is None:
            return None
        data = self._damaged(found, fault)
        view = allocate(len(data))
        if view is not None:
            view[:] = data
        return view

    def put(self, key: CacheEngineKey, parts: Sequence[memoryview]) -> None:
        """As ``Backend.put``."""
        fault = self._fault("put")
        if fault in (TierFault.GARBAGE, TierFault.TRUNCATED):
            parts = [memoryview(self._damaged(memoryview(b"".join(parts)), fault))]
        self._tier.put(key, parts)
        if fault is TierFault.VANISHED:
            self._tier.delete(key)

    def delete(self, key: CacheEngineKey) -> None:
        """As ``Backend.delete``."""
        if self._fault("delete") is TierFault.VANISHED:
            self._tier.delete(key)
        self._tier.delete(key)

    def close(self) -> None:
        """As ``Backend.close``."""
        self._fault("close")
        self._tier.close()

    def _fault(self, verb: str) -> TierFault | None:
        with self._lock:
            fault = self.script(verb) if self.script is not None else None
        if fault is TierFault.ERROR:
            raise BackendError(f"{self.name}: {verb} fails by script")
        if isinstance(fault, TierFault):
            return fault
        if fault is not None:
            time.sleep(fault)
        return None

    def _damaged(self, data: memoryview, fault: TierFault | None) -> bytes:
        if fault is TierFault.TRUNCATED:
            return bytes(data[: len(data) // 2])
        with self._lock:
            return self._garbage.randbytes(len(data))
