"""The worker half through its own interface, on CPU and, where there is one, on a GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_ec import ECCacheEngine, ECMetadata, load_ec_engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it")

from lmcache_ec.vllm.plan import ECPlan, WorkerReport
from lmcache_ec.vllm.worker import WorkerHalf

LABEL = b"rank 0".ljust(16)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.fixture
def cache(memory_dir: Path) -> Iterator[ECCacheEngine]:
    """A cache as the scheduler's process has it."""
    config = load_ec_engine_config({"shm_path": str(memory_dir), "max_local_cpu_size": 0.1})
    with ECCacheEngine(config, ECMetadata("model"), torch.bfloat16) as engine:
        yield engine


@pytest.fixture(params=DEVICES)
def worker(request: pytest.FixtureRequest, cache: ECCacheEngine) -> Iterator[WorkerHalf]:
    """A saving worker of the same server."""
    saver = ECCacheEngine(cache.config, ECMetadata("model"), torch.bfloat16)
    half = WorkerHalf(
        saver.memory,
        LABEL,
        torch.bfloat16,
        torch.device(request.param),
        saver,
        max_queue_bytes=8 << 20,
        events=saver.events,
    )
    yield half
    half.shutdown()


def save(half: WorkerHalf, tensors: dict[str, torch.Tensor], step: int = 1) -> None:
    for name in tensors:
        half.save_caches(ECPlan(step, saves={name: name for name in tensors}), tensors, name)


def wait_for(cache: ECCacheEngine, name: str) -> None:
    deadline = time.monotonic() + 20
    while not cache.contains(name):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_saved_is_loaded_bit_by_bit(cache: ECCacheEngine, worker: WorkerHalf) -> None:
    batch = torch.randn(96, 640, device=worker._device, dtype=torch.bfloat16)
    views = {"a": batch[:40], "b": batch[40:]}
    save(worker, views)
    expected = {name: view.cpu().clone() for name, view in views.items()}
    loads = []
    for name in views:
        wait_for(cache, name)
        lease = cache.lease(name)
        assert lease is not None
        loads.append((name, lease.extent))
    encoder_cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(ECPlan(2, tuple(loads)), encoder_cache)
    for name, tensor in expected.items():
        assert encoder_cache[name].device == worker._device
        assert torch.equal(encoder_cache[name].cpu(), tensor)
    if worker._cuda:
        torch.cuda.synchronize()
    worker.report()
    assert cache.memory.noted() == {LABEL: 2}


def test_a_loaded_tensor_is_a_copy(cache: ECCacheEngine, worker: WorkerHalf) -> None:
    cache.put("a", torch.ones(8, 8))
    lease = cache.lease("a")
    assert lease is not None
    encoder_cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(ECPlan(1, (("a", lease.extent),)), encoder_cache)
    encoder_cache["a"].zero_()
    again = cache.get("a", "cpu")
    assert again is not None
    assert torch.equal(again, torch.ones(8, 8).bfloat16())


def test_only_what_the_plan_lists_is_saved(cache: ECCacheEngine, worker: WorkerHalf) -> None:
    """On the V2 runner every new key of the dict is offered, client embeddings included."""
    tensors = {"client's": torch.ones(4, 8), "mine": torch.ones(4, 8)}
    for name in tensors:
        worker.save_caches(ECPlan(1, saves={"mine": "mine"}), tensors, name)
    wait_for(cache, "mine")
    assert not cache.contains("client's")


def test_a_rank_without_an_engine_saves_nothing(cache: ECCacheEngine) -> None:
    half = WorkerHalf(
        cache.memory, LABEL, torch.bfloat16, torch.device("cpu"), None, 8 << 20, cache.events
    )
    save(half, {"a": torch.ones(4, 8)})
    assert half._saves.flush(10)
    assert not cache.contains("a")
    half.shutdown()


def test_waiting_saves_are_bounded_by_the_batches_they_keep_alive(
    cache: ECCacheEngine, worker: WorkerHalf
) -> None:
    """Eight small views of one batch count as one batch, and a second batch does not fit."""
    batch = torch.randn(3 << 20, 2, device=worker._device, dtype=torch.bfloat16)  # 12 MiB
    views = {f"view {number}": batch[number : number + 4] for number in range(8)}
    other = {"other": torch.randn(64, 2, device=worker._device, dtype=torch.bfloat16)}
    with worker._saves._changed:  # its thread cannot take work up meanwhile
        save(worker, {**views, **other})
    for name in views:
        wait_for(cache, name)
    assert not cache.contains("other")
    report = worker.report()
    assert isinstance(report, WorkerReport)
    assert report.counts["drops", "save_queue_full"] == 1


def test_what_is_loaded_is_told_and_counts_are_reported_once(
    cache: ECCacheEngine, worker: WorkerHalf
) -> None:
    assert worker.report() is None
    cache.put("a", torch.ones(4, 8))
    lease = cache.lease("a")
    assert lease is not None
    worker.start_load_caches(ECPlan(5, (("a", lease.extent),)), {})
    assert cache.memory.noted() == {}
    if worker._cuda:
        torch.cuda.synchronize()
    worker._events.count("drops", "memory_full")
    report = worker.report()
    assert cache.memory.noted() == {LABEL: 5}
    assert report is not None
    assert report.counts == {("drops", "memory_full"): 1}
    assert worker.report() is None
