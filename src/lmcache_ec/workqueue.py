"""Work done off the caller's thread, bounded by the bytes that it keeps alive."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 2.0  # how long the end of a process waits for a queue that nobody closed


class WorkQueue:
    """A first-in first-out queue with its own daemon threads, which start with the first work.

    Args:
        name: Name of the threads.
        threads: How many run the work.
        max_bytes: Bound on the bytes that waiting and running work keeps alive. One piece of work
            is always accepted by an empty queue, so that no size is impossible.
    """

    def __init__(self, name: str, threads: int, max_bytes: int) -> None:
        self._name = name
        self._threads = threads
        self._max_bytes = max_bytes
        self._work: deque[tuple[Callable[[], None], Hashable]] = deque()
        self._memory: dict[Hashable, tuple[int, int]] = {}  # what is kept alive: users, bytes
        self._changed = threading.Condition()
        self._running: list[threading.Thread] = []
        self._closed = False
        self.pending_bytes = 0
        # A thread that still runs torch's code while Python ends would abort the process. Not
        # atexit: children of multiprocessing do not run it.
        self._at_exit = Finalize(None, self.close, (EXIT_TIMEOUT_S,), exitpriority=1)

    def submit(self, work: Callable[[], None], nbytes: int, memory: Hashable = None) -> bool:
        """Run ``work`` later; False when the queue is full or closed, and then it never runs.

        Args:
            work: Called once on a thread of the queue. What it raises is logged.
            nbytes: Bytes that it keeps alive until it has run.
            memory: Names those bytes; work that shares them counts them once.
        """
        with self._changed:
            memory = object() if memory is None else memory
            users, known = self._memory.get(memory, (0, 0))
            added = 0 if users else nbytes
            full = self._memory and added and self.pending_bytes + added > self._max_bytes
            if self._closed or full:
                return False
            self._memory[memory] = users + 1, known or nbytes
            self.pending_bytes += added
            self._work.append((work, memory))
            if len(self._running) < self._threads:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._running.append(thread)
                thread.start()
            self._changed.notify()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all work submitted so far, and meanwhile, has run; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._memory, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Refuse new work, wait for what is there, forget what is not done in time. Idempotent."""
        deadline = time.monotonic() + timeout_s
        self._at_exit.cancel()
        with self._changed:
            self._closed = True
        if not self.flush(timeout_s):
            logger.warning(
                "%s: %d pieces of work were not done in time", self._name, len(self._work)
            )
        with self._changed:
            while self._work:
                self._forget(self._work.popleft()[1])
            self._changed.notify_all()
        for thread in self._running:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if not self._work:
                    return
                work, memory = self._work.popleft()
            try:
                work()
            except Exception:  # the outermost frame of this thread
                logger.exception("%s: work failed", self._name)
            del work  # the memory must be free before it is counted free
            with self._changed:
                self._forget(memory)

    def _forget(self, memory: Hashable) -> None:
        users, nbytes = self._memory.pop(memory)
        if users > 1:
            self._memory[memory] = users - 1, nbytes
        else:
            self.pending_bytes -= nbytes
        self._changed.notify_all()
