"""The counters as vLLM shows them: its ``/metrics`` page and its periodic log line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from lmcache_ec.events import COUNTERS

GAUGES = {
    "memory_bytes": "Bytes of the memory tier in use, by all processes that share it",
    "memory_pinned_bytes": "Bytes of the memory tier that are leased or being written",
    "memory_entries": "Entries of the memory tier",
    "queue_bytes": "Bytes waiting to be written to the tiers below memory",
}
"""Every gauge, with its help text."""

_SEPARATOR = "|"


@dataclass
class ECStats(ECConnectorStats):
    """Increments of counters as "name|label" and values of gauges as "name", in plain types."""

    data: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, increments: dict[tuple[str, str], float], gauges: dict[str, float]) -> ECStats:
        """Stats of one interval."""
        counters = {f"{name}{_SEPARATOR}{label}": by for (name, label), by in increments.items()}
        return cls({**counters, **gauges})

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: ECConnectorStats) -> ECStats:
        """Counters add up; of gauges the later one counts."""
        merged = {**self.data, **other.data}
        for key in self.data.keys() & other.data.keys():
            if _SEPARATOR in key:
                merged[key] = self.data[key] + other.data[key]
        return ECStats(merged)

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows."""
        return {
            key.replace(_SEPARATOR, "_"): round(value, 4)
            for key, value in sorted(self.data.items())
            if value
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.data


class ECPromMetrics(ECConnectorPromMetrics):
    """``vllm:lmcache_ec_*`` on the metrics page."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's types are not installed where this is checked
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:lmcache_ec_{name}",
                documentation=f"Encoder cache: {help_text}.",
                labelnames=[*labelnames, label],
            )
            for name, (label, help_text) in COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[Gauge](
                name=f"vllm:lmcache_ec_{name}",
                documentation=f"Encoder cache: {help_text}.",
                labelnames=labelnames,
            )
            for name, help_text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's increments."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, separator, label = key.partition(_SEPARATOR)
            if separator:
                self._counters[name].labels(*engine, label).inc(value)
            else:
                self._gauges[name].labels(*engine).set(value)
