"""A simulated run as it was saved, for what is written from it: tables, summary, manifest, and the limits of its SLO.

It knows neither the scenario nor the format of any tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """requests, steps: as `sim.result.Result` has them; gaps: `id`, `since_s`, `end_s` of the token gaps in which a
    request was preempted or left out. slo: limits in seconds (`ttft`, `tpot`, `e2e`); class_slo: those of the classes
    with limits of their own. source: where it comes from, for messages.
    """

    source: str
    requests: pl.DataFrame
    steps: pl.DataFrame
    gaps: pl.DataFrame
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]
    slo: Mapping[str, float]
    class_slo: Mapping[str, Mapping[str, float]]

    @property
    def model(self) -> str:
        """The model, or the first of several."""
        return str(self.manifest["pools"][0]["model"])

    @property
    def stream_intervals(self) -> list[int]:
        """The tokens of a message, of each replica."""
        found = []
        for pool in self.manifest["pools"]:
            option = pool["engine_options"].get("stream_interval", {"value": None})
            found += [option["value"] or 1] * (pool["replicas"] * pool["dp"])
        return found

    @property
    def made_by(self) -> str:
        """Who simulated it: `servecast` and its version."""
        return f"servecast {self.manifest['servecast']}"

    @property
    def rate(self) -> float | None:
        """Requests per second that the workload was told; None for traces, and for clients that wait for answers."""
        told = self._workload.get("arrivals", {}).get("rate")
        return float(told) if isinstance(told, int | float) and told > 0 else None

    @property
    def concurrency(self) -> int | None:
        """How many clients wait for answers; None for an open loop."""
        told = self._workload.get("closed_loop", {}).get("concurrency")
        return told if isinstance(told, int) else None

    @property
    def arrivals(self) -> str:
        """How requests arrived: `poisson` and other processes, `closed_loop`, or `trace`."""
        if self.concurrency is not None:
            return "closed_loop"
        return str(self._workload.get("arrivals", {}).get("kind", "trace"))

    @property
    def _workload(self) -> Mapping[str, Any]:
        found = self.manifest["scenario"].get("workload")
        return found if isinstance(found, dict) else {}
