"""LMCache 0.5.6's ``ECCacheEngine`` in one process, the one case in which its ``get`` hits."""

from __future__ import annotations

import os

# Before the import: it reads them there.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"  # it logs a line for each put and each eviction

import torch
from benchmarks.contenders.serving import SPARE, Operation, serve
from lmcache.v1.config import load_ec_engine_config  # type: ignore[import-not-found]
from lmcache.v1.ec_engine import ECCacheEngine  # type: ignore[import-not-found]
from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]


class LMCache:
    """Its memory tier, with room for as many entries as there are buffers."""

    def __init__(self) -> None:
        self._engine: ECCacheEngine | None = None
        self._puts = 0

    def prepare(self, sources: list[torch.Tensor]) -> dict[str, Operation]:
        if self._engine is not None:
            self._engine.close()
        room = (len(sources) + SPARE) * sources[0].nbytes
        os.environ["LMCACHE_EC_MAX_LOCAL_CPU_SIZE"] = str(room / 2**30)
        metadata = LMCacheMetadata(
            model_name="benchmark",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, 16, 1, 64),
            role="worker",
        )
        self._engine = engine = ECCacheEngine(load_ec_engine_config(), metadata, torch.bfloat16)
        use = torch.zeros_like(sources[0])
        names = [""] * len(sources)

        def write(i: int) -> None:
            names[i] = f"{self._puts:064x}"
            self._puts += 1
            assert engine.put(names[i], sources[i])

        def read(i: int) -> torch.Tensor:
            tensor: torch.Tensor | None = engine.get(names[i], "cpu")
            assert tensor is not None
            return tensor

        def read_use(i: int) -> torch.Tensor:
            return use.copy_(read(i))

        return {"write": (write, None), "read": (read, None), "read_use": (read_use, None)}


if __name__ == "__main__":
    serve(LMCache())
    os._exit(0)  # its threads outlive its close()
