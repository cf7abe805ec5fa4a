"""``LMCacheECConnector``: vLLM's interface, split into a scheduler half and a worker half.

vLLM makes one object of this class in the scheduler's process and one in each worker, and ends
the engine when a hook raises. So the hooks are guarded here, once: a fault of ours becomes a miss.
Those that keep a promise are not: a load that was promised and not made ends the engine anyway,
and hiding why would not help.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from lmcache_ec.backends.arena import arena_directory
from lmcache_ec.backends.holders import remove_if_abandoned
from lmcache_ec.backends.index import LABEL_BYTES, CachePolicy
from lmcache_ec.backends.local_cpu import LocalCPUBackend
from lmcache_ec.config import ECEngineConfig, load_ec_engine_config
from lmcache_ec.engine import ECCacheEngine
from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.vllm.content import EntryNames
from lmcache_ec.vllm.identity import encoder_dtype, metadata_from_vllm, refuse_unsupported
from lmcache_ec.vllm.metrics import ECPromMetrics, ECStats
from lmcache_ec.vllm.plan import ECPlan, WorkerReport
from lmcache_ec.vllm.scheduler import SchedulerHalf
from lmcache_ec.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_Hook = TypeVar("_Hook", bound="Callable[..., Any]")


def _guarded(fallback: Callable[[], object]) -> Callable[[_Hook], _Hook]:
    """Answer ``fallback()`` in place of raising: the outermost frame of ours under vLLM."""

    def wrap(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the hook has
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("lmcache-ec: %s failed; going on without it", hook.__name__)
                return fallback()

        return cast("_Hook", guarded)

    return wrap


class LMCacheECConnector(ECConnectorBase):
    """Keeps encoder outputs in memory and on disk, across processes, restarts and servers.

    Raises:
        ConfigError: At start, when the server or a setting cannot work; names the remedy.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        _log_as_vllm()
        refuse_unsupported(vllm_config)
        config = load_ec_engine_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._reported: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, float] = {}
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config, config)
        else:
            try:
                self._worker = self._make_worker(vllm_config, config)
            except BackendError as error:
                logger.error("lmcache-ec: this worker caches nothing: %s", error)  # noqa: TRY400

    def _make_scheduler(self, vllm_config: VllmConfig, config: ECEngineConfig) -> SchedulerHalf:
        workers = _labels(vllm_config)
        widths = dict(vllm_config.ec_transfer_config.mm_encoder_output_widths)
        if (
            config.verify_content
            and vllm_config.model_config.multimodal_config.mm_processor_cache_type == "shm"
        ):
            logger.warning(
                "lmcache-ec: nothing will be cached: with --mm-processor-cache-type shm the "
                "scheduler cannot see the media that entries are named by. Use the type lru, or, "
                "if no client can send a uuid, set verify_content to false"
            )
        metadata_fields = PlaceholderMetadataResolver(vllm_config.model_config).fields_for
        for modality in widths:
            metadata_fields(modality)  # slow the first time: now rather than in a request
        engine = None
        shared = False
        try:
            engine = ECCacheEngine(
                config, metadata_from_vllm(vllm_config, config.epoch), encoder_dtype(vllm_config)
            )
            absent = workers - engine.memory.arena.announced()
            shared = not absent
        except BackendError as error:
            logger.error("lmcache-ec: nothing is cached: %s", error)  # noqa: TRY400
        else:
            _log_start(engine, len(absent), len(workers))
        return SchedulerHalf(
            engine,
            workers=[_label_bytes(label) for label in workers],
            budget_s=config.prefetch_timeout_ms / 1000,
            may_load=self.is_consumer and shared,
            may_save=self.is_producer,
            widths=widths,
            names=EntryNames(
                client_uuids=config.cache_client_uuids,
                verify_content=config.verify_content,
                metadata_fields=metadata_fields,
            ),
        )

    def _make_worker(self, vllm_config: VllmConfig, config: ECEngineConfig) -> WorkerHalf:
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
        from vllm.platforms import current_platform

        rank = get_tensor_model_parallel_rank()
        first_stage = get_pp_group().is_first_rank
        events = Events()
        engine = None
        if self.is_producer and rank == 0 and first_stage:
            # Every rank computes the same output, so one saves.
            engine = ECCacheEngine(
                config,
                metadata_from_vllm(vllm_config, config.epoch),
                encoder_dtype(vllm_config),
                events,
            )
            memory = engine.memory
        else:
            memory = LocalCPUBackend(
                Path(config.shm_path),
                config.max_local_cpu_bytes,
                CachePolicy(config.cache_policy),
                events,
            )
        label = _label(vllm_config, rank)
        if first_stage:
            memory.arena.announce(label)
        # A bare "cuda" would be device 0 on every rank.
        device = torch.device(current_platform.device_type)
        if current_platform.is_cuda_alike():
            device = torch.device(device.type, torch.cuda.current_device())
        return WorkerHalf(
            memory,
            _label_bytes(label),
            encoder_dtype(vllm_config),
            device,
            engine,
            config.max_queue_bytes,
            events,
        )

    # ------------------------------------------------------------------ scheduler side

    @_guarded(lambda: True)  # as if there were nothing to wait for
    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Lease what the request needs; False defers it. See :class:`SchedulerHalf`."""
        if self._scheduler is None or not request.mm_features:
            return True
        return self._scheduler.ensure_cache_available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is leased by a request."""
        return self._scheduler is not None and self._scheduler.has_cache_item(identifier)

    @_guarded(set)
    def take_unavailable_requests(self) -> set[str]:
        """Requests that can never run."""
        return set() if self._scheduler is None else self._scheduler.take_unavailable_requests()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Plan the load of a promised item, or the save of one that is computed."""
        if self._scheduler is not None and not self._scheduler.plan_load(request, index):
            self._plan_save(request, index)

    @_guarded(lambda: None)
    def _plan_save(self, request: Request, index: int) -> None:
        if self._scheduler is not None:
            self._scheduler.plan_save(request, index)

    @_guarded(lambda: None)
    def update_state_after_free(self, request: Request, index: int) -> None:
        """Release the request's lease on the item."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_free(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECPlan:  # noqa: ARG002
        """The plan of this step."""
        if self._scheduler is None:
            return ECPlan(0)
        return self._scheduler.build_connector_meta()

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Count what the workers counted."""
        report = connector_output.ec_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.update_connector_output(report)

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Release all that the request holds."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request)
        return False, None

    # ------------------------------------------------------------------ worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: object) -> None:
        """Copy promised tensors into vLLM's dict."""
        if self._worker is not None:
            self._worker.start_load_caches(self._plan(), encoder_cache)

    @_guarded(lambda: None)
    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: object
    ) -> None:
        """Queue a computed tensor for keeping."""
        if self._worker is not None and self._connector_metadata is not None:
            self._worker.save_caches(self._plan(), encoder_cache, mm_hash)

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Tell the scheduler half what was loaded and counted."""
        return None if self._worker is None else self._worker.report()

    def _plan(self) -> ECPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, ECPlan)
        return plan

    # ------------------------------------------------------------------ both

    @_guarded(lambda: None)
    def get_ec_connector_stats(self) -> ECStats | None:
        """What has counted since the last time, on the scheduler's side."""
        if self._scheduler is None:
            return None
        self._scheduler.release_loaded()
        increments = self._scheduler.events.since(self._reported)
        gauges: dict[str, float] = {}
        if (engine := self._scheduler.engine) is not None:
            usage = engine.memory.usage()
            gauges = {
                "memory_bytes": usage.used,
                "memory_pinned_bytes": usage.pinned,
                "memory_entries": usage.entries,
                "queue_bytes": engine.pending_bytes,
            }
        if not increments and gauges == self._gauges:
            return None
        self._gauges = gauges
        return ECStats.of(increments, gauges)

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        """Write down what is queued and leave the tiers."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()
        self._scheduler = self._worker = None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECStats:
        """Stats of this connector from their plain form."""
        return ECStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECPromMetrics:
        """The connector's metrics for the API server's page."""
        # As plugin.give_memory_back, for a place that only these options name. vLLM asks for this
        # in the API server, which outlives its engine.
        config = load_ec_engine_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
        atexit.register(remove_if_abandoned, arena_directory(Path(config.shm_path)))
        return ECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _label(vllm_config: VllmConfig, rank: int) -> str:
    """Names one tensor-parallel rank of one engine among the holders of the arena."""
    engine_id = vllm_config.ec_transfer_config.engine_id
    return f"{engine_id}/{vllm_config.parallel_config.data_parallel_rank}/{rank}"


def _label_bytes(label: str) -> bytes:
    return hashlib.sha256(label.encode()).digest()[:LABEL_BYTES]


def _labels(vllm_config: VllmConfig) -> set[str]:
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return {_label(vllm_config, rank) for rank in range(ranks)}


def _log_start(engine: ECCacheEngine, absent: int, workers: int) -> None:
    config, arena = engine.config, engine.memory.arena
    logger.info(
        "lmcache-ec: memory tier of %d MiB at %s, %s, namespace %s",
        len(arena.bytes) >> 20, arena.directory,
        f"disk tier of {config.max_local_disk_bytes >> 20} MiB at {config.local_disk}"
        if config.local_disk else "no disk tier",
        engine.namespace.digest.hex()[:16],
    )  # fmt: skip
    if absent:
        logger.error(
            "lmcache-ec: %d of %d workers do not share the memory tier at %s with the scheduler, "
            "so nothing can be loaded. If a worker has logged an error of its own, that is why; "
            "else run all tensor-parallel workers on one host, as one user, with one /dev/shm",
            absent, workers, arena.directory,
        )  # fmt: skip


def _log_as_vllm() -> None:
    """Show this package's log lines where vLLM shows its own; vLLM sets up no other logger."""
    ours, theirs = logging.getLogger("lmcache_ec"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)
        ours.propagate = False
