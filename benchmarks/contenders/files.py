"""safetensors files on a tmpfs, called as vLLM's ECExampleConnector calls them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
from benchmarks.contenders.serving import Operation, serve


class Files:
    """One file an entry, below a directory that this object empties.

    ``save_file`` writes a new file each time, as for an input never seen. ``load_file`` maps the
    file and reads nothing, so the read is also timed with one use of what was read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self, sources: list[torch.Tensor]) -> dict[str, Operation]:
        shutil.rmtree(self._directory, ignore_errors=True)
        paths = [self._directory / f"{i:064x}" / "e.safetensors" for i in range(len(sources))]
        use = torch.zeros_like(sources[0])

        def write(i: int) -> None:
            paths[i].parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file({"ec_cache": sources[i].detach().cpu()}, paths[i])

        def read(i: int) -> torch.Tensor:
            loaded: torch.Tensor = safetensors.torch.load_file(paths[i], device="cpu")["ec_cache"]
            return loaded

        def read_use(i: int) -> torch.Tensor:
            return use.copy_(read(i))

        def forget(i: int) -> None:
            if i == len(sources) - 1:
                shutil.rmtree(self._directory)

        return {"write": (write, None), "read": (read, None), "read_use": (read_use, forget)}


if __name__ == "__main__":
    serve(Files(Path(sys.argv[1])))
