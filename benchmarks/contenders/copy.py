"""The yardstick: ``Tensor.copy_`` of the same bytes, with nothing around it."""

from __future__ import annotations

import torch
from benchmarks.contenders.serving import Operation, serve


class Copy:
    """Copies into memory whose pages are there, and into a tensor made for the call."""

    def prepare(self, sources: list[torch.Tensor]) -> dict[str, Operation]:
        targets = [torch.zeros_like(source) for source in sources]

        def warm(i: int) -> torch.Tensor:
            return targets[i].copy_(sources[i])

        def fresh(i: int) -> torch.Tensor:
            return torch.empty_like(sources[i]).copy_(sources[i])

        return {"warm": (warm, None), "fresh": (fresh, None)}


if __name__ == "__main__":
    serve(Copy())
