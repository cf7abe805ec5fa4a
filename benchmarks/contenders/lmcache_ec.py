"""lmcache-ec: the engine, and both halves of its vLLM connector over it."""

from __future__ import annotations

import sys

import torch
from benchmarks.contenders.serving import SPARE, Operation, serve
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.request import Request

from lmcache_ec import ECCacheEngine, ECMetadata
from lmcache_ec.config import GIB, ECEngineConfig
from lmcache_ec.events import Events
from lmcache_ec.vllm.content import EntryNames
from lmcache_ec.vllm.plan import ECPlan
from lmcache_ec.vllm.scheduler import SchedulerHalf
from lmcache_ec.vllm.worker import WorkerHalf
from vllm import SamplingParams

SAVE_TIMEOUT_S = 60
LABEL = b"rank 0".ljust(16)


class LMCacheEC:
    """An arena with room for as many entries as there are buffers: each put evicts an old one."""

    def __init__(self, shm_path: str) -> None:
        self._shm_path = shm_path
        self._engine: ECCacheEngine | None = None
        self._puts = 0

    def close(self) -> None:
        """Leave the arena, which removes it."""
        if self._engine is not None:
            self._engine.close()

    def prepare(self, sources: list[torch.Tensor]) -> dict[str, Operation]:
        self.close()
        room = (len(sources) + SPARE) * (sources[0].nbytes + 4096)
        config = ECEngineConfig(max_local_cpu_size=room / GIB, shm_path=self._shm_path)
        engine = ECCacheEngine(config, ECMetadata("benchmark"), torch.bfloat16)
        self._engine = engine
        names_of = EntryNames(
            client_uuids=False, verify_content=False, metadata_fields=lambda _: ()
        )
        scheduler = SchedulerHalf(
            engine,
            workers=[LABEL],
            budget_s=1,
            may_load=True,
            may_save=True,
            widths={},
            names=names_of,
        )
        cpu = torch.device("cpu")
        worker = WorkerHalf(engine.memory, LABEL, torch.bfloat16, cpu, engine, 1 << 40, Events())
        use = torch.zeros_like(sources[0])
        targets = [torch.zeros_like(source) for source in sources]
        names = [""] * len(sources)
        requests = [_request("", len(sources[0]))] * len(sources)
        plans = [ECPlan(0)] * len(sources)

        def renew(i: int) -> None:
            self._puts += 1
            names[i] = f"{self._puts:064x}"
            requests[i] = _request(names[i], len(sources[0]))

        def plan(i: int) -> None:
            if not scheduler.plan_load(requests[i], 0):
                scheduler.plan_save(requests[i], 0)
            plans[i] = scheduler.build_connector_meta()

        def renew_and_plan(i: int) -> None:
            renew(i)
            plan(i)

        def write(i: int) -> None:
            assert engine.put(names[i], sources[i])

        def read(i: int) -> torch.Tensor:
            tensor = engine.get(names[i], "cpu")
            assert tensor is not None
            return tensor

        def read_use(i: int) -> torch.Tensor:
            return use.copy_(read(i))

        def read_arena(i: int) -> torch.Tensor:
            lease = engine.lease(names[i])
            assert lease is not None
            tensor = targets[i].copy_(lease.tensor)
            lease.release()
            return tensor

        def lookup(i: int) -> None:
            assert scheduler.ensure_cache_available(requests[i], 0)

        def has(i: int) -> None:
            assert scheduler.has_cache_item(names[i])

        def load(i: int) -> torch.Tensor:
            cache: dict[str, torch.Tensor] = {}
            worker.start_load_caches(plans[i], cache)
            return cache[names[i]]

        def report(i: int) -> None:
            worker.report()
            scheduler.release_loaded()

        def finish(i: int) -> None:
            scheduler.request_finished(requests[i])

        def save(i: int) -> None:
            worker.save_caches(plans[i], {names[i]: sources[i]}, names[i])

        def saved(i: int) -> None:
            assert worker._saves.flush(SAVE_TIMEOUT_S)
            assert engine.contains(names[i])
            renew_and_plan(i)

        def all_saved(i: int) -> None:
            if i == len(sources) - 1:
                assert worker._saves.flush(SAVE_TIMEOUT_S)
                for number in range(len(sources)):
                    renew(number)

        for i in range(len(sources)):
            renew(i)
        return {
            "write": (write, None),
            "read": (read, None),
            "read_use": (read_use, None),
            "read_arena": (read_arena, None),
            "lookup": (lookup, None),
            "has": (has, plan),
            "load": (load, report),
            "finish": (finish, renew_and_plan),
            "save": (save, saved),
            "save_busy": (save, all_saved),
        }


def _request(identifier: str, tokens: int) -> Request:
    feature = MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(),
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=0, length=tokens),
        mm_hash=identifier,
    )
    return Request(
        request_id=identifier,
        prompt_token_ids=[0] * tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature],
    )


if __name__ == "__main__":
    contender = LMCacheEC(sys.argv[1])
    serve(contender)
    contender.close()
