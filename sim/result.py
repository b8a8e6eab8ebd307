"""The outcome of one simulation: requests and steps as tables, and the summary of both.

It knows what ran only as a few facts (`Deployment`), and nothing of how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim import metrics
from sim.metrics import Distribution, Floats
from sim.steplog import CANCELLED, FINISHED, OUTCOMES, REJECTED, UNFINISHED, Log

if TYPE_CHECKING:
    import polars as pl

INTEGERS = {
    "id", "replica", "prompt_tokens", "output_tokens", "max_tokens", "preemptions", "step", "steps", "prefill_requests",
    "prefill_tokens", "decodes", "kv_tokens", "gaps", "running", "waiting", "kv_blocks", "kv_blocks_end", "preempted",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployment:
    """What ran, as far as the metrics need it. Bytes are per GPU, KV blocks per replica."""

    gpus: int
    replicas: int
    fixed_memory_bytes: int  # weights, activations, graphs, buffers: all but the KV cache
    kv_blocks: int  # that requests can use
    block_size: int
    kv_bytes_per_token: int


class Result:
    """What happened. `open_loop` False: clients waited for answers, so saturation does not apply.

    `complete` False: the run was stopped early, and requests that had arrived by then may be unfinished.
    """

    def __init__(
        self,
        log: Log,
        deployment: Deployment,
        slo: Mapping[str, float],
        manifest: Mapping[str, Any],
        *,
        open_loop: bool,
        complete: bool,
        unsent: int = 0,
    ) -> None:
        self.deployment = deployment
        self.slo = slo
        self.manifest = manifest
        self.unsent = unsent
        self.open_loop = open_loop
        self.complete = complete
        self._log = log
        rows = log.requests.table()
        order = np.argsort(rows["id"], kind="stable")
        self._rows = {name: column[order] for name, column in rows.items()}
        self._steps = log.steps.table()
        outcome = self._rows["outcome"]
        self._finished = self._where(np.isin(outcome, FINISHED))
        self._accepted = self._where(~np.isin(outcome, REJECTED))
        unfinished = self._accepted["outcome"] == UNFINISHED
        self._accepted["left_s"] = np.where(unfinished, np.inf, self._accepted["finish_s"])
        never = np.isnan(self._accepted["scheduled_s"])
        self._accepted["left_queue_s"] = np.where(never, self._accepted["left_s"], self._accepted["scheduled_s"])

    def _where(self, chosen: npt.NDArray[np.bool_]) -> dict[str, Floats]:
        return {name: column[chosen] for name, column in self._rows.items()}

    @cached_property
    def requests(self) -> pl.DataFrame:
        """A row a request that is over, by id.

        `status` finished, cancelled, rejected or unfinished, `reason` as in `sim.steplog.OUTCOMES`; `queue_s`,
        `ttft_s`, `tpot_s`, `e2e_s` and the times they come from in seconds, null where they do not exist;
        `first_step` and `last_step` count the replica's steps. A cancelled request has its end in `finish_s`, and like
        an unfinished one what its client received in `output_tokens`.
        """
        import polars as pl

        rows = self._rows
        columns: dict[str, Any] = {"id": rows["id"], "replica": rows["replica"]}
        outcome = rows["outcome"]
        columns["status"] = np.select(
            [np.isin(outcome, FINISHED), np.isin(outcome, REJECTED), outcome == CANCELLED],
            ["finished", "rejected", "cancelled"],
            "unfinished",
        )
        columns["reason"] = np.array(OUTCOMES)[rows["outcome"].astype(int)]
        columns["queue_s"] = rows["scheduled_s"] - rows["arrival_s"]
        columns |= {"ttft_s": metrics.ttft_s(rows), "tpot_s": metrics.tpot_s(rows), "e2e_s": metrics.e2e_s(rows)}
        columns |= {name: rows[name] for name in rows if name not in columns and name != "outcome"}
        frame = pl.DataFrame(columns).with_columns(pl.col(pl.Float64).fill_nan(None))
        steps = [pl.when(pl.col(c) >= 0).then(pl.col(c)).cast(pl.Int64) for c in ("first_step", "last_step")]
        integers = [pl.col(c).cast(pl.Int64) for c in frame.columns if c in INTEGERS]
        return frame.with_columns(*steps, *integers, pl.col("status", "reason").cast(pl.Categorical))

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The step log: a row an engine step or a run of decode steps; columns as in `sim.steplog.STEP_COLUMNS`.

        And `kv_cache_bytes`, what `kv_blocks` are on each GPU of the replica.
        """
        import polars as pl

        frame = pl.DataFrame(self._steps)
        integers = [pl.col(c).cast(pl.Int64) for c in frame.columns if c in INTEGERS]
        block_bytes = self.deployment.block_size * self.deployment.kv_bytes_per_token
        return frame.with_columns(integers).with_columns(kv_cache_bytes=pl.col("kv_blocks") * block_bytes)

    @cached_property
    def itl(self) -> Distribution:
        """The distribution of the time between consecutive tokens, in seconds, over all requests."""
        return metrics.itl(self._steps, np.array(self._log.gaps))

    @cached_property
    def saturation(self) -> metrics.Saturation:
        """Whether work piled up, and how that was judged."""
        if not self.open_loop:
            return metrics.Saturation(None, "not applicable: clients wait for their answers (closed loop)")
        if not len(self._finished["id"]):
            return metrics.Saturation(None, "not applicable: no request finished")
        return metrics.saturation(self._accepted)

    @property
    def submitted(self) -> int:
        """Requests that arrived."""
        return len(self._rows["id"])

    @property
    def queue(self) -> tuple[Floats, Floats]:
        """(times, requests that wait for their first step from each time on), all replicas together.

        A preempted request that waits again is not in it.
        """
        return metrics.in_system(self._accepted, "left_queue_s")

    @property
    def duration_s(self) -> float:
        """From time 0 to the last token of a finished request; to the end of the last step if none finished."""
        return float(self._finished["finish_s"].max(initial=0.0) or self._steps["end_s"].max(initial=0.0))

    def summary(self) -> dict[str, Any]:
        """Flat figures under the keys of `vllm bench serve --save-result` where it has them; None where undefined."""
        done, rows, steps, duration = self._finished, self._rows, self._steps, self.duration_s
        per_second = (lambda x: float(x) / duration) if duration > 0 else (lambda x: None)
        good = int(metrics.meets(done, self.slo).sum()) if self.slo else None
        count = len(done["id"])
        over = int((rows["outcome"] != UNFINISHED).sum())
        reasons = rows["outcome"][np.isin(rows["outcome"], REJECTED)].astype(int)
        prompt, output = float(done["prompt_tokens"].sum()), float(done["output_tokens"].sum())
        tpot = metrics.tpot_s(done)
        out: dict[str, Any] = {
            "complete": self.complete,
            "saturated": self.saturation.saturated,
            "saturation_note": self.saturation.why,
            "duration": duration,
            "submitted": self.submitted,
            "completed": count,
            "cancelled": int((rows["outcome"] == CANCELLED).sum()),
            "rejected": len(reasons),
            "rejected_reasons": {OUTCOMES[i]: int((reasons == i).sum()) for i in np.unique(reasons)},
            "unfinished": int((rows["outcome"] == UNFINISHED).sum()),
            "unsent": self.unsent,
            "total_input_tokens": int(prompt),
            "total_output_tokens": int(output),
            "request_throughput": per_second(count),
            "input_throughput": per_second(prompt),
            "output_throughput": per_second(output),
            "total_token_throughput": per_second(prompt + output),
            "request_goodput": None if good is None else per_second(good),
            "slo_attainment": None if good is None or not over else good / over,
        }
        out |= Distribution.of(metrics.ttft_s(done)).summary("ttft_ms", 1e3)
        out |= Distribution.of(tpot[~np.isnan(tpot)]).summary("tpot_ms", 1e3)
        out |= self.itl.summary("itl_ms", 1e3)
        out |= Distribution.of(metrics.e2e_s(done)).summary("e2el_ms", 1e3)
        out |= Distribution.of(done["scheduled_s"] - done["arrival_s"]).summary("queue_ms", 1e3)
        out |= Distribution.of(done["first_token_s"] - done["scheduled_s"]).summary("prefill_latency_ms", 1e3)
        out |= {k.replace("tpot_ms", "decode_latency_per_token_ms"): v for k, v in out.items() if k.endswith("tpot_ms")}
        out |= Distribution.of(done["prompt_tokens"]).summary("input_tokens_per_request")
        out |= Distribution.of(done["output_tokens"]).summary("output_tokens_per_request")
        out["tpot_undefined"] = int(np.isnan(tpot).sum())
        out |= self._occupancy(steps)
        out["preemptions"] = int(rows["preemptions"].sum())
        out["gpus"] = self.deployment.gpus
        out["gpu_seconds"] = self.deployment.gpus * duration
        return out

    def _occupancy(self, steps: Mapping[str, Floats]) -> dict[str, Any]:
        """Queue and requests in the system of all replicas together; batch, KV and memory use of a replica or GPU.

        Means are over the time to the end of the last step, and over replicas; peaks are those of one moment.
        """
        d = self.deployment
        if not len(steps["step"]):
            names = ("queue_size", "batch_size_current", "kv_cache_memory_used", "gpu_memory_used")
            empty = {f"{stat}_{name}": None for name in names for stat in ("mean", "peak")}
            return empty | {
                "max_concurrent_requests": 0,
                "kv_peak_fraction": 0.0,
                "kv_mean_fraction": 0.0,
                "engine_steps": 0,
            }
        span = float(steps["end_s"].max())
        share = (steps["end_s"] - steps["start_s"]) / (span * d.replicas)
        batch = steps["prefill_requests"] + steps["decodes"]
        peak = float(steps["kv_blocks_end"].max())
        mean = float(np.dot(share, (steps["kv_blocks"] + steps["kv_blocks_end"]) / 2))
        block = d.block_size * d.kv_bytes_per_token
        times, queued = self.queue
        return {
            "mean_queue_size": metrics.time_average(times, queued, 0.0, span),
            "peak_queue_size": int(queued.max()),
            "max_concurrent_requests": int(metrics.in_system(self._accepted, "left_s")[1].max()),
            "mean_batch_size_current": float(np.dot(share, batch)),
            "peak_batch_size_current": int(batch.max()),
            "kv_peak_fraction": peak / d.kv_blocks,
            "kv_mean_fraction": mean / d.kv_blocks,
            "mean_kv_cache_memory_used": mean * block,
            "peak_kv_cache_memory_used": peak * block,
            "mean_gpu_memory_used": d.fixed_memory_bytes + mean * block,
            "peak_gpu_memory_used": d.fixed_memory_bytes + peak * block,
            "engine_steps": int(steps["steps"].sum()),
        }

    def write(self, folder: str | Path, texts: Mapping[str, str]) -> Path:
        """Write `summary.json`, `manifest.json`, `requests.parquet`, `steps.parquet` and `texts` (name to content).

        All files are written before any takes its name, so that a full disk leaves older results whole.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []

        def part(name: str) -> Path:
            written.append(folder / f"{name}.part")
            return written[-1]

        try:
            self.requests.write_parquet(part("requests.parquet"))
            self.steps.write_parquet(part("steps.parquet"))
            tables = {"summary.json": self.summary(), "manifest.json": dict(self.manifest)}
            dumped = {name: json.dumps(table, indent=2, allow_nan=False) + "\n" for name, table in tables.items()}
            for name, text in (dumped | dict(texts)).items():
                part(name).write_text(text, encoding="utf-8")
            for path in written:
                path.replace(path.with_suffix(""))
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        return folder
