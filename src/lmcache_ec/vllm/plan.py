"""What the scheduler half and the worker halves tell each other, once for each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_ec.backends.local_cpu import Extent


@dataclass(frozen=True)
class ECPlan(ECConnectorMetadata):
    """Scheduler to workers: what to load and what may be saved in one step.

    Attributes:
        step: Number of the plan, counted by the scheduler half.
        loads: Identifiers and where in the arena their tensors lie. The scheduler half holds a
            lease on each until every worker has noted this step in the arena.
        saves: Identifiers of what is computed in this step and to be kept, with its entry's name.
    """

    step: int
    loads: tuple[tuple[str, Extent], ...] = ()
    saves: Mapping[str, str] = field(default_factory=dict)


@dataclass
class WorkerReport(ECConnectorWorkerMetadata):
    """Workers to scheduler: what the workers counted.

    Attributes:
        counts: Increments of the workers' counters by name and label.
    """

    counts: dict[tuple[str, str], float] = field(default_factory=dict)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> WorkerReport:
        """One report for both."""
        assert isinstance(other, WorkerReport)
        counts = dict(self.counts)
        for key, increment in other.counts.items():
            counts[key] = counts.get(key, 0) + increment
        return WorkerReport(counts)
