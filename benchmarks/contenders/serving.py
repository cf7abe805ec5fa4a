"""One contender in its own process: it times what its parent asks for, one pass at a time.

A line of JSON on standard input asks, a line of JSON on standard output answers:

    {"bytes": 4500000, "buffers": 30}   make the buffers; answers the names of the operations
    {"operation": "write"}              one pass over all buffers; answers seconds, one a call
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 2560  # columns of a row, as a vision encoder of this size of entry has
HELD = 4  # results a caller still holds when it asks for the next: a fresh tensor is then fresh
SPARE = 2  # entries of room beyond the buffers, so that all of one pass are still there
CHECK_ROWS = 2  # rows compared after each call, at both ends of the tensor

Operation = tuple["Callable[[int], torch.Tensor | None]", "Callable[[int], None] | None"]
"""What is timed for buffer number i, and what follows it untimed."""


class Contender(Protocol):
    """What takes part in the comparison."""

    def prepare(self, sources: list[torch.Tensor]) -> dict[str, Operation]:
        """Forget the earlier buffers; the operations over these, in the order of one round.

        ``sources`` are bfloat16 tensors ``[tokens, WIDTH]`` on CPU. An operation that returns a
        tensor returns the content of ``sources[i]``.
        """
        ...


def serve(contender: Contender) -> None:
    """Answer the parent until it closes the pipe."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    sources: list[torch.Tensor] = []
    operations: dict[str, Operation] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "bytes" in request:
            operations.clear()
            sources.clear()
            sources = make_sources(request["bytes"], request["buffers"])
            operations = contender.prepare(sources)
            gc.collect()
            gc.freeze()
            print(json.dumps(list(operations)), file=answers)
        else:
            print(json.dumps(_time(operations[request["operation"]], sources)), file=answers)


def make_sources(nbytes: int, buffers: int) -> list[torch.Tensor]:
    """Tensors of about ``nbytes`` whose rows differ from each other and between buffers."""
    rows = max(1, round(nbytes / 2 / WIDTH))
    period = (torch.arange(65521) - 32768).to(torch.int16)  # a prime: no two near rows are equal
    first = period.repeat(rows * WIDTH // len(period) + 1)[: rows * WIDTH].view(rows, WIDTH)
    return [(first + i).view(torch.bfloat16) for i in range(buffers)]


def _time(operation: Operation, sources: list[torch.Tensor]) -> list[float]:
    timed, after = operation
    held: deque[torch.Tensor] = deque(maxlen=HELD)
    seconds = []
    gc.disable()
    for i, source in enumerate(sources):
        began = time.perf_counter()
        result = timed(i)
        seconds.append(time.perf_counter() - began)
        if result is not None:
            for rows in (slice(CHECK_ROWS), slice(-CHECK_ROWS, None)):
                if not same_bytes(result[rows], source[rows]):
                    raise SystemExit(f"buffer {i} came back with other bytes")
            held.append(result)
        if after is not None:
            after(i)
    gc.enable()
    return seconds


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two bfloat16 tensors are equal bit for bit, NaNs included."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
