"""Private tmpfs directories and real processes for the tests of the memory tier."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

# Children fork from a server that has imported torch once, and has no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lmcache_ec.engine", "pytest"])
ANSWER_TIMEOUT_S = 60


class Child:
    """A process that runs ``target(connection, *args)``."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...]) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=target, args=(theirs, *args))
        self._process.start()
        theirs.close()

    def ask(self, question: object = None) -> Any:
        """Send ``question`` and wait for the answer."""
        self._connection.send(question)
        return self.answer()

    def answer(self) -> Any:
        """Wait for what the child sends."""
        assert self._connection.poll(ANSWER_TIMEOUT_S), "no answer"
        return self._connection.recv()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def end(self, question: object = None) -> int | None:
        """Send ``question`` and wait for the end; the exit code."""
        self._connection.send(question)
        self._process.join(ANSWER_TIMEOUT_S)
        return self._process.exitcode


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts children; what still runs at the end is killed."""
    children = []

    def start_child(target: Callable[[Connection], None], *args: object) -> Child:
        children.append(Child(target, args))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory on tmpfs; every test has to leave no arena there unless it says so."""
    path = Path(tempfile.mkdtemp(prefix="lmcache-ec-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB, as containers have it."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
