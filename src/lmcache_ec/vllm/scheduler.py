"""The scheduler half: what may be promised, and for how long it stays.

vLLM kills the engine when a promised tensor is absent, so a promise is a lease: the bytes are in
host memory, verified, of the right shape, and pinned. Leases are taken only in
``ensure_cache_available``, so the answers of ``has_cache_item`` cannot change within a step.

All methods run on the scheduler's thread. None does I/O, and a request waits for that of the read
threads once, for half a millisecond at most: else it is deferred.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_ec.errors import BackendError
from lmcache_ec.events import Events
from lmcache_ec.fetch import ABSENT
from lmcache_ec.vllm.content import Content
from lmcache_ec.vllm.plan import ECPlan, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

    from lmcache_ec.backends.local_cpu import Lease
    from lmcache_ec.engine import ECCacheEngine
    from lmcache_ec.fetch import Fetch
    from lmcache_ec.vllm.content import EntryNames

logger = logging.getLogger(__name__)

LOOKUP_GRACE_S = 0.0005  # how long a new request may hold up the scheduler for its look-ups
CONFLICT_TIMEOUT_S = 1.0  # how long a request may wait for another that uses its identifier


@dataclass(slots=True)
class _Request:
    """What one request holds and knows, by index into its ``mm_features``."""

    leases: dict[int, tuple[str, Lease]] = field(default_factory=dict)
    fetches: dict[int, Fetch] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)
    deadline: float = 0.0
    conflict_deadline: float = 0.0


class SchedulerHalf:
    """Leases for requests, and the plan of each step.

    Args:
        engine: The cache, closed by this object; None if this process has none.
        workers: Labels under which the workers tell in the arena what they have loaded.
        budget_s: How long a request may wait for the tiers below memory.
        may_load: Whether workers can load what is promised.
        may_save: Whether this server keeps what it computes.
        widths: Width of the encoder's output by modality, as far as vLLM measured it.
        names: Names of entries for items.
    """

    def __init__(
        self,
        engine: ECCacheEngine | None,
        *,
        workers: Collection[bytes],
        budget_s: float,
        may_load: bool,
        may_save: bool,
        widths: dict[str, int],
        names: EntryNames,
    ) -> None:
        self.engine = engine
        self.events = Events() if engine is None else engine.events
        self._workers = workers
        self._may_load = may_load and engine is not None
        self._may_save = may_save and engine is not None
        self._widths = widths
        self._names = names
        self._budget_s = budget_s
        self._requests: dict[str, _Request] = {}
        self._leased: dict[str, list[Lease]] = {}  # identifier -> leases of requests
        self._unavailable: set[str] = set()
        self._loads: dict[str, Lease] = {}
        self._saves: dict[str, str] = {}  # identifier -> name of the entry to be
        self._step = 0
        self._inflight: deque[tuple[int, list[Lease]]] = deque()
        self._shape_warned = False

    # ------------------------------------------------------------------ promises

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Lease what the request still needs and the cache has; False defers the request.

        A request is deferred while entries come from disk or network, for at most
        ``prefetch_timeout_ms``; while another request has a promise under the same identifier for
        other content; or because it can never run (see :meth:`take_unavailable_requests`).
        """
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens:
            return True
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request()
        fresh = not state.fetches
        settled = self._settle_all(request, num_computed_tokens, state)
        if not settled and fresh and state.fetches:
            # Most look-ups end within this, found or not, and a step may be far longer.
            end = time.monotonic() + LOOKUP_GRACE_S
            for fetch in state.fetches.values():
                fetch.wait(max(0.0, end - time.monotonic()))
            settled = self._settle_all(request, num_computed_tokens, state)
        return settled

    def _settle_all(self, request: Request, num_computed_tokens: int, state: _Request) -> bool:
        """Settle what can be settled now; False while anything is open."""
        settled = True
        for index, feature in enumerate(request.mm_features):
            end = feature.mm_position.offset + feature.mm_position.length
            if end <= num_computed_tokens or index in state.leases:
                continue
            if index not in state.missed and not self._settle(request, index, state):
                settled = False
            if self._conflicts(feature) and not self._resolve(request, index, state):
                return False
        return settled

    def has_cache_item(self, identifier: str) -> bool:
        """Whether some request holds a lease on the item. A dict look-up."""
        return identifier in self._leased

    def take_unavailable_requests(self) -> set[str]:
        """Requests that name an item that nobody has, or one that others use for other media."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def _settle(self, request: Request, index: int, state: _Request) -> bool:
        """Lease one item or know that it cannot be had; False while that is open."""
        feature = request.mm_features[index]
        fetch = state.fetches.get(index)
        if fetch is None:
            name = self._names.of(feature)
            if name is None or self.engine is None or not self._may_load:
                return self._miss(request, index, state, None)
            lease = self.engine.lease(name)
            if lease is not None:
                return self._accept(request, index, state, lease)
            if not self.engine.has_tiers:
                return self._miss(request, index, state, ABSENT)
            if not state.fetches:
                state.deadline = time.monotonic() + self._budget_s
            state.fetches[index] = fetch = self.engine.prefetch(name)
        if not fetch.done():
            if time.monotonic() < state.deadline:
                return False
            reason = "timeout"
            lease = None
        else:
            reason = fetch.reason
            lease = fetch.take()
        fetch.drop()
        del state.fetches[index]
        if lease is None:
            return self._miss(request, index, state, reason)
        return self._accept(request, index, state, lease)

    def _accept(self, request: Request, index: int, state: _Request, lease: Lease) -> bool:
        """Promise a leased item, if its shape is what the request needs."""
        feature = request.mm_features[index]
        shape = lease.extent.shape
        rows = request.get_num_encoder_embeds(index)
        width = self._widths.get(feature.modality, shape[-1])
        if shape != (rows, width):
            lease.release()
            if not self._shape_warned:
                self._shape_warned = True
                logger.warning(
                    "lmcache-ec: entry of %s has shape %s where %s is needed, so it is not used; "
                    "set another epoch if this repeats",
                    feature.identifier, shape, (rows, width),
                )  # fmt: skip
            return self._miss(request, index, state, "shape")
        state.leases[index] = (feature.identifier, lease)
        self._leased.setdefault(feature.identifier, []).append(lease)
        return True

    def _miss(self, request: Request, index: int, state: _Request, reason: str | None) -> bool:
        """Leave the item to the encoder; one with nothing to encode fails its request instead."""
        feature = request.mm_features[index]
        if reason is not None:
            self.events.count("misses", reason)
        if self._names.content(feature) is Content.NAME:
            logger.warning(
                "lmcache-ec: request %s refers to %s %s without its media, and the cache does not "
                "have it; send the media",
                request.request_id, feature.modality, feature.identifier[:64],
            )  # fmt: skip
            self.events.count("misses", "unavailable")
            self._unavailable.add(request.request_id)
            return False
        state.missed.add(index)
        return True

    def _conflicts(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether the item has the identifier, but not the content, of one promised to another.

        ``has_cache_item`` is asked by identifier alone, so it would be given the other's tensor.
        Only identifiers chosen by clients can do this.
        """
        promised = self._leased.get(feature.identifier)
        return promised is not None and promised[0].key.mm_hash != self._names.of(feature)

    def _resolve(self, request: Request, index: int, state: _Request) -> bool:
        """Deal with a conflict; False if the request has to wait, or fails after waiting.

        It waits without leases of its own, or two such requests could wait for each other. And not
        for long: the other one may itself be waiting for the memory that this one occupies.
        """
        identifier = request.mm_features[index].identifier
        own = [number for number, (name, _) in state.leases.items() if name == identifier]
        if own:  # one identifier for two items of one request: vLLM computes one for both
            for number in own:
                self._drop(number, state)
            state.missed.update([*own, index])
            return True
        self._drop_all(state)
        now = time.monotonic()
        state.conflict_deadline = state.conflict_deadline or now + CONFLICT_TIMEOUT_S
        if now > state.conflict_deadline:
            logger.warning(
                "lmcache-ec: request %s fails: its item %s has the identifier of other media that "
                "another request uses; give each its own uuid",
                request.request_id, identifier[:64],
            )  # fmt: skip
            self._unavailable.add(request.request_id)
        return False

    # ------------------------------------------------------------------ the plan of a step

    def plan_load(self, request: Request, index: int) -> bool:
        """Load the item in this step if it was promised; whether it was."""
        identifier = request.mm_features[index].identifier
        leases = self._leased.get(identifier)
        if leases is None or self.engine is None:
            return False
        if identifier not in self._loads:
            self._loads[identifier] = leases[0].share()
            self.engine.count_hit(leases[0])
        return True

    def plan_save(self, request: Request, index: int) -> None:
        """Keep an item once it is computed in this step, if it may be kept."""
        feature = request.mm_features[index]
        if self._may_save and (name := self._names.of(feature)) is not None:
            self._saves[feature.identifier] = name

    def build_connector_meta(self) -> ECPlan:
        """The plan of this step."""
        self.release_loaded()
        self._step += 1
        plan = ECPlan(
            self._step,
            tuple((identifier, lease.extent) for identifier, lease in self._loads.items()),
            self._saves,
        )
        if self._loads:
            self._inflight.append((self._step, list(self._loads.values())))
        self._loads = {}
        self._saves = {}
        return plan

    def release_loaded(self) -> None:
        """Release the leases of plans that every worker has loaded."""
        if not self._inflight or self.engine is None:
            return
        try:
            noted = self.engine.memory.noted()
        except BackendError:  # later, then
            self.events.count("errors", "memory")
            return
        loaded = min(noted.get(label, 0) for label in self._workers)
        while self._inflight and self._inflight[0][0] <= loaded:
            for lease in self._inflight.popleft()[1]:
                lease.release()

    def update_connector_output(self, report: WorkerReport) -> None:
        """Count what the workers counted."""
        for (name, label), amount in report.counts.items():
            self.events.count(name, label, amount)

    # ------------------------------------------------------------------ the end of a lease

    def update_state_after_free(self, request: Request, index: int) -> None:
        """The item's tokens are in the KV cache: let its entry go."""
        state = self._requests.get(request.request_id)
        if state is not None:
            self._drop(index, state)

    def request_finished(self, request: Request) -> None:
        """Let go of everything that the request holds; at its end, failure or abort."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._drop_all(state)

    def _drop_all(self, state: _Request) -> None:
        for index in [*state.leases, *state.fetches, *state.missed]:
            self._drop(index, state)

    def _drop(self, index: int, state: _Request) -> None:
        state.missed.discard(index)  # after a preemption it is looked up anew
        if fetch := state.fetches.pop(index, None):
            fetch.drop()
        if index in state.leases:
            identifier, lease = state.leases.pop(index)
            self._leased[identifier].remove(lease)
            if not self._leased[identifier]:
                del self._leased[identifier]
            lease.release()

    def shutdown(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()
