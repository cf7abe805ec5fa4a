"""The worker half: copies promised tensors out of the arena, and keeps computed ones.

Loading runs on the model's thread, from leases that the scheduler half holds. Saving costs that
thread an event and a place in a queue; a thread of our own does the copy, while the tensor is kept
alive.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import torch

from lmcache_ec.vllm.plan import ECPlan, WorkerReport
from lmcache_ec.workqueue import WorkQueue

if TYPE_CHECKING:
    from lmcache_ec.backends.local_cpu import LocalCPUBackend
    from lmcache_ec.engine import ECCacheEngine
    from lmcache_ec.events import Events

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # how long shutdown waits for what is still to be saved


class WorkerHalf:
    """Loads and saves for one rank. Methods run on the model's thread.

    Args:
        memory: The arena that the scheduler half leases from; closed by this object.
        label: Under which this rank tells in the arena what it has loaded.
        dtype: dtype of the encoder's outputs.
        device: Where this rank's encoder cache lives, with its index.
        engine: The cache to save into, closed by this object; None for a rank that does not save.
        max_queue_bytes: Bound on the bytes that waiting saves keep alive.
        events: The counters of this process, reported to the scheduler half.
    """

    def __init__(
        self,
        memory: LocalCPUBackend,
        label: bytes,
        dtype: torch.dtype,
        device: torch.device,
        engine: ECCacheEngine | None,
        max_queue_bytes: int,
        events: Events,
    ) -> None:
        self._memory = memory
        self._label = label
        self._dtype = dtype
        self._device = device
        self._engine = engine
        self._events = events
        self._reported: dict[tuple[str, str], float] = {}
        self._saves = WorkQueue("lmcache-ec-save", 1, max_queue_bytes)
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._loaded = self._told = 0  # plans whose loads are done, and told to be done
        self._copies: deque[tuple[int, torch.cuda.Event | None]] = deque()
        if self._cuda and not memory.arena.short:
            _register_with_cuda(memory.arena.bytes)

    # ------------------------------------------------------------------ loading

    def start_load_caches(self, plan: ECPlan, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Copy what the plan promises to the device, into vLLM's dict."""
        for identifier, extent in plan.loads:
            if identifier not in encoder_cache:
                source = self._memory.view(extent, self._dtype)
                target = torch.empty(extent.shape, dtype=self._dtype, device=self._device)
                # With CUDA this is one asynchronous copy from registered memory, which the
                # stream orders before all that reads the tensor.
                encoder_cache[identifier] = target.copy_(source, non_blocking=self._cuda)
        if plan.loads:
            event = torch.cuda.Event() if self._cuda else None
            if event is not None:
                event.record()
            self._copies.append((plan.step, event))

    def report(self) -> WorkerReport | None:
        """Tell in the arena what is loaded, and return what was counted since the last report.

        Not in the report: vLLM drops those of pooling models and of pipelines, and skips a rank
        that has none, so the scheduler half could neither count on them nor wait for all.
        """
        while self._copies and ((event := self._copies[0][1]) is None or event.query()):
            self._loaded = self._copies.popleft()[0]
        if self._loaded > self._told:
            self._memory.note(self._label, self._loaded)
            self._told = self._loaded
        counts = self._events.since(self._reported)
        return WorkerReport(counts) if counts else None

    # ------------------------------------------------------------------ saving

    def save_caches(
        self, plan: ECPlan, encoder_cache: dict[str, torch.Tensor], identifier: str
    ) -> None:
        """Queue a computed tensor for keeping, if the plan says so and this rank saves."""
        name = plan.saves.get(identifier)
        if self._engine is None or name is None:
            return
        tensor = encoder_cache[identifier]
        computed = None
        if self._cuda:
            computed = torch.cuda.Event()
            computed.record()
        elif self._device.type != "cpu":  # no way to wait for this device on another thread
            self._engine.put(name, tensor)
            return
        storage = tensor.untyped_storage()  # outputs are views of a batch
        if not self._saves.submit(
            lambda: self._save(name, tensor, computed), storage.nbytes(), storage.data_ptr()
        ):
            self._events.count("drops", "save_queue_full")

    def _save(self, name: str, tensor: torch.Tensor, computed: torch.cuda.Event | None) -> None:
        assert self._engine is not None
        if computed is None:
            self._engine.put(name, tensor)
            return
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            self._engine.put(name, tensor)  # its copy to the host ends before it returns

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Save what is queued, for at most ``CLOSE_TIMEOUT_S``, and leave the arena."""
        self._saves.close(CLOSE_TIMEOUT_S)
        if self._engine is not None:
            self._engine.close()
        self._memory.close()


def _register_with_cuda(arena: torch.Tensor) -> None:
    """Page-lock the arena for this process's GPU, so that it copies without a staging buffer."""
    error = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "lmcache-ec: CUDA cannot page-lock the memory tier of %d MiB (error %d), so copies "
            "to and from the GPU are staged; raise the limit of locked memory (ulimit -l)",
            arena.nbytes >> 20, int(error),
        )  # fmt: skip
