"""The outcome of one simulation: requests and steps as tables, and the summary of both.

It knows what ran only as a few facts (`Deployment`), and nothing of how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim import metrics, tables
from sim.deployment import Classes, Deployment
from sim.metrics import Distribution, Floats
from sim.occupancy import handed_over, occupancy, pool_summaries, stage_shares
from sim.presence import Presence
from sim.spent import Spent
from sim.steplog import CANCELLED, FINISHED, OUTCOMES, REJECTED, UNFINISHED, Log, Table
from sim.streamed import Streamed
from sim.summary import (
    accepted_drafts,
    came_and_went,
    class_summary,
    found_in_cache,
    given_up,
    held,
    over_limit,
    recomputed,
)  # fmt: skip
from sim.tier_use import tier_summary

if TYPE_CHECKING:
    import polars as pl


class Result:
    """What happened. `open_loop` False: clients waited for answers, so saturation does not apply.

    `complete` False: the run was stopped early, and requests that had arrived by then may be unfinished. `reasoning`,
    by request id: the share of its output that comes before the answer; None where nobody reasons.
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
        classes: Classes | None = None,
        reasoning: Floats | None = None,
    ) -> None:
        self.deployment = deployment
        self.slo = slo
        self.manifest = manifest
        self.unsent = unsent
        self.classes = classes
        self.reasoning = reasoning
        self.open_loop = open_loop
        self.complete = complete
        self._gaps = log.gaps.table()
        self._transfers = log.transfers.table()
        self._changes = log.changes.table()
        self._losses = log.losses.table()
        self._holds = log.holds.table()
        self._given_up, self._in_vain = log.given_up.table(), log.in_vain
        self._stages = log.stages.table()
        self._drafts = log.drafts.table()
        self._loads, self._tiers = log.loads.table(), log.tiers.table()
        self.presence = Presence(self._changes) if self._changes.height else None
        """How many replicas there were; None where none came or went."""
        self._steps = log.steps.table()
        rows = log.requests.table()
        self._rows = rows.take(np.argsort(rows["id"], kind="stable"))
        self._finished = self._rows.where(np.isin(self._rows["outcome"], FINISHED))

    @cached_property
    def requests(self) -> pl.DataFrame:
        """A row a request that is over, by id: `status` finished, cancelled, rejected, failed or unfinished, `reason`
        as in `sim.steplog.OUTCOMES`; `queue_s`, `ttft_s`, `tpot_s`, `e2e_s` and the times they come from in seconds,
        null where they do not exist; `gaps_over_slo` where there is a limit on gaps; `first_step` and `last_step` count
        the replica's steps. A cancelled request has its end in `finish_s`, and like an unfinished one what its client
        received in `output_tokens`. `samples` of one prompt are one row, with the tokens of all.
        """
        import polars as pl

        return pl.concat(self._request_frames(), rechunk=True)

    def _request_frames(self) -> Iterator[pl.DataFrame]:
        more, done = {"longest_gap_s": self._of_all(self.longest_gaps)}, 0
        for name, known in (("first_answer_s", self.reasoning), ("gaps_over_slo", self.gaps_over_slo)):
            if known is not None:
                more[name] = self._of_all(self.first_answers_s if known is self.reasoning else known)
        for rows in self._rows.blocks():
            named = None if self.classes is None else np.array(self.classes.names)[self.classes.of(rows)]
            count = len(rows["id"])
            yield tables.request_frame(rows, {name: c[done : done + count] for name, c in more.items()}, named)
            done += count

    def _of_all(self, finished: Floats) -> Floats:
        """A column of the finished requests as one of all; NaN for the others."""
        found = np.full(self._rows.height, np.nan)
        found[np.isin(self._rows["outcome"], FINISHED)] = finished
        return found

    @cached_property
    def transfers(self) -> pl.DataFrame:
        """A row for each request that a prefill replica handed over: columns as in `sim.steplog.TRANSFER_COLUMNS`."""
        import polars as pl

        return pl.concat((tables.transfer_frame(rows) for rows in self._transfers.blocks()), rechunk=True)

    @cached_property
    def replicas(self) -> pl.DataFrame:
        """A row for each change of a replica: `time_s`, `replica`, `pool`, `change` (as in `sim.steplog.CHANGES`), and
        how many `requests` a failure took."""
        return tables.change_frame(self._changes, self.deployment)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The step log: a row an engine step or a run of decode steps; columns as in `sim.steplog.STEP_COLUMNS`.

        And `kv_cache_bytes`, what `kv_blocks` are on each GPU of the replica.
        """
        import polars as pl

        return pl.concat(self._step_frames(), rechunk=True)

    def _step_frames(self) -> Iterator[pl.DataFrame]:
        for rows in self._steps.blocks():
            yield tables.step_frame(rows, self.deployment.of(lambda pool: pool.block_bytes))

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """A row for each token gap in which a request was preempted or left out of steps: `id`, `since_s`, `end_s`."""
        import polars as pl

        return pl.concat((tables.gap_frame(rows) for rows in self._left_out.blocks()), rechunk=True)

    @property
    def _left_out(self) -> Table:
        return self._gaps.where(self._gaps["id"] >= 0)

    def column(self, name: str, *, finished: bool = False) -> Floats:
        """One column of numbers of `requests`, or of the `finished` ones only, without the memory of the whole table.

        float64[n]; NaN where a time, and -1 where a step does not exist.
        """
        rows = self._finished if finished else self._rows
        if name in ("longest_gap_s", "first_answer_s"):
            found = self.longest_gaps if name == "longest_gap_s" else self.first_answers_s
            return found if finished else self._of_all(found)
        return tables.DERIVED[name](rows) if name in tables.DERIVED else rows[name]

    def step_blocks(self) -> Iterator[Table]:
        """The step log in pieces that fit into memory however long it is: float64 columns, in order of time."""
        return self._steps.blocks()

    @cached_property
    def _streamed(self) -> Streamed:
        return Streamed(self._finished, self._steps, self._gaps, self.deployment, bool(self._stages.height))

    @property
    def itl(self) -> Distribution:
        """The distribution of the time between consecutive messages of a stream, in seconds: see `Streamed`."""
        return self._streamed.itl

    def itl_within(self, edges_s: Floats) -> list[Distribution]:
        """The same of each of the spans between edges [n + 1]."""
        return self._streamed.itl_within(edges_s)

    @property
    def longest_gaps(self) -> Floats:
        """float64[finished], by id: see `Streams`."""
        return self._streamed.longest_gaps

    @cached_property
    def gaps_over_slo(self) -> Floats | None:
        """float64[finished], by id: how many gaps of each are over its limit; NaN where it has none, or they are not
        known; None where nobody has a limit on gaps."""
        classes, limits_s = self.classes, np.full(self.finished, self.slo.get("gap", np.nan))
        if classes is not None:
            own = [classes.slo.get(name, self.slo).get("gap", np.nan) for name in classes.names]
            limits_s = np.array(own)[classes.of(self._finished)]
        return None if np.isnan(limits_s).all() else self._streamed.over(limits_s)

    @cached_property
    def first_answers_s(self) -> Floats:
        """float64[finished], by id: seconds from arrival to the first token after the reasoning, of which `reasoning`
        says what share of the output it is; the first token of all where there is none, NaN where not known."""
        done = self._finished
        if self.reasoning is None:
            return metrics.ttft_s(done)
        share = self.reasoning[done["id"].astype(np.int64)]
        tokens = done["output_tokens"].astype(np.int64)
        number = np.minimum(np.floor(share * tokens).astype(np.int64) + 1, tokens)
        return self._streamed.token_s(number) - done["arrival_s"] + done["network_s"] / 2

    def good(self) -> npt.NDArray[np.bool_] | None:
        """bool[finished], by id: which requests meet their SLO, their class's own or the one for all; None where there
        is none."""
        rows, classes = self._finished, self.classes
        longest_gaps = None if self.gaps_over_slo is None else self.longest_gaps
        if classes is None or not classes.slo:
            return metrics.meets(rows, self.slo, longest_gaps) if self.slo else None
        own = classes.of(rows)
        good = np.zeros(len(own), dtype=bool)
        for i, name in enumerate(classes.names):
            mine = None if longest_gaps is None else longest_gaps[own == i]
            good[own == i] = metrics.meets(rows.where(own == i), classes.slo.get(name, self.slo), mine)
        return good

    @cached_property
    def spent(self) -> dict[str, dict[str, Any]]:
        """Where TTFT and TPOT were spent, of `all`, and by `pools` and `classes`: see `Spent.summary`."""
        spent = Spent(self._finished, self._steps, self._transfers, self._gaps, self.deployment, self._loads)
        return spent.summary(self.classes)

    @cached_property
    def saturation(self) -> metrics.Saturation:
        """Whether work piled up, and how that was judged."""
        if not self.open_loop:
            return metrics.Saturation(None, "not applicable: clients wait for their answers (closed loop)")
        if not self.finished:
            return metrics.Saturation(None, "not applicable: no request finished")
        return metrics.saturation(self._stays())

    @property
    def submitted(self) -> int:
        """Requests that arrived."""
        return self._rows.height

    @property
    def finished(self) -> int:
        """Requests whose last token is out."""
        return self._finished.height

    def _stays(self) -> dict[str, Floats]:
        """When accepted requests arrived, left the queue (`left_queue_s`) and were over (`left_s`, inf: not yet)."""
        rows = self._rows.where(~np.isin(self._rows["outcome"], REJECTED))
        left, scheduled = rows["finish_s"], rows["scheduled_s"]
        left[rows["outcome"] == UNFINISHED] = np.inf
        return {
            "arrival_s": rows["arrival_s"],
            "left_queue_s": np.where(np.isnan(scheduled), left, scheduled),
            "left_s": left,
        }

    @property
    def queue(self) -> tuple[Floats, Floats]:
        """(times, requests that wait for their first step from each time on), all replicas together.

        A preempted request that waits again is not in it.
        """
        return metrics.in_system(self._stays(), "left_queue_s")

    @cached_property
    def duration_s(self) -> float:
        """From time 0 to the last token of a finished request; to the end of the last step if none finished."""
        return float(self._finished["finish_s"].max(initial=0.0) or self._steps["end_s"].max(initial=0.0))

    def summary(self) -> dict[str, Any]:
        """Flat figures under the keys of `vllm bench serve --save-result` where it has them; None where undefined."""
        return deepcopy(self._summary)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        done, outcome, duration = self._finished, self._rows["outcome"], self.duration_s
        per_second = (lambda x: float(x) / duration) if duration > 0 else (lambda x: None)
        met = self.good()
        good = None if met is None else int(met.sum())
        count = self.finished
        over = int((outcome != UNFINISHED).sum())
        reasons = outcome[np.isin(outcome, REJECTED)].astype(int)
        prompt, output = float(done["prompt_tokens"].sum()), float(done["output_tokens"].sum())
        tpot = metrics.tpot_s(done)
        out: dict[str, Any] = {
            "complete": self.complete,
            "saturated": self.saturation.saturated,
            "saturation_note": self.saturation.why,
            "duration": duration,
            "submitted": self.submitted,
            "completed": count,
            "cancelled": int((outcome == CANCELLED).sum()),
            "rejected": len(reasons),
            "rejected_reasons": {OUTCOMES[i]: int((reasons == i).sum()) for i in np.unique(reasons)},
            "unfinished": int((outcome == UNFINISHED).sum()),
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
        if self.reasoning is not None:
            out |= _distribution(self.first_answers_s).summary("first_answer_ms", 1e3)
        out |= Distribution.of(tpot[~np.isnan(tpot)]).summary("tpot_ms", 1e3)
        out |= self.itl.summary("itl_ms", 1e3)
        out |= _distribution(self.longest_gaps).summary("longest_gap_ms", 1e3)
        out |= Distribution.of(metrics.e2e_s(done)).summary("e2el_ms", 1e3)
        out |= Distribution.of(metrics.queue_s(done)).summary("queue_ms", 1e3)
        out |= Distribution.of(done["first_token_s"] - done["scheduled_s"]).summary("prefill_latency_ms", 1e3)
        out |= {k.replace("tpot_ms", "decode_latency_per_token_ms"): v for k, v in out.items() if k.endswith("tpot_ms")}
        out |= Distribution.of(done["prompt_tokens"]).summary("input_tokens_per_request")
        out |= Distribution.of(done["output_tokens"]).summary("output_tokens_per_request")
        out["spent"] = self.spent["all"][""]
        if self.gaps_over_slo is not None:
            out |= over_limit(self.gaps_over_slo, self._streamed.counts())
        out["tpot_undefined"] = int(np.isnan(tpot).sum())
        out |= found_in_cache(self._rows, self.deployment)
        out |= self._occupancy(self._steps)
        out["preemptions"] = int(self._rows["preemptions"].sum())
        out |= recomputed(self._rows, self._steps, self._given_up, self._in_vain, out["preemptions"])
        out |= given_up(self._given_up, self._in_vain, self._steps)
        out |= held(self._holds, self._steps, self.deployment)
        out["gpus"] = self.deployment.gpus
        out["gpu_seconds"] = self.deployment.gpus * duration
        if self.presence is not None:
            out |= came_and_went(self._rows, self._losses, self.presence, self.deployment, duration)
        if self.classes is not None:
            out["classes"] = {
                name: self._class_summary(name, i, self.classes) for i, name in enumerate(self.classes.names)
            }
        if len(self.deployment.pools) > 1:
            out["pools"] = pool_summaries(
                self.deployment, self._rows, self._steps, self._transfers, duration, self.presence
            )
            for name, spent in self.spent["pools"].items():
                out["pools"][name]["spent"] = spent
        if self._stages.height:
            out["stages"] = stage_shares(self.deployment, self._stages, self._steps)
        if self._drafts.height:
            out |= accepted_drafts(self._drafts)
        if self._transfers.height:
            out["handed_over"] = handed_over(self._rows, self._transfers)
        if self._tiers.height:
            out |= tier_summary(self._rows, self._loads, self._tiers, self.deployment)
        return out

    def _class_summary(self, name: str, index: int, classes: Classes) -> dict[str, Any]:
        mine, of = self._rows.where(classes.of(self._rows) == index), classes.of(self._finished) == index
        met = self.good() if classes.slo.get(name, self.slo) else None
        found = class_summary(mine, None if met is None else int(met[of].sum()), self.duration_s)
        if self.gaps_over_slo is not None:
            found |= over_limit(self.gaps_over_slo[of], self._streamed.counts()[of])
        return found | {"spent": self.spent["classes"][name]}

    def _occupancy(self, steps: Table) -> dict[str, Any]:
        """Queue and requests in the system of all replicas together, and what `occupancy` says of each."""
        span = float(steps["end_s"].max(initial=0.0))
        replicas = self.deployment.replicas
        seconds = span * replicas if self.presence is None else self.presence.seconds(range(replicas), span)
        found = occupancy(self.deployment, steps, seconds)
        if not steps.height:
            return found | {"mean_queue_size": None, "peak_queue_size": None, "max_concurrent_requests": 0}
        times, queued = self.queue
        return {
            "mean_queue_size": metrics.time_average(times, queued, 0.0, span),
            "peak_queue_size": int(queued.max()),
            "max_concurrent_requests": int(metrics.in_system(self._stays(), "left_s")[1].max()),
        } | found

    def write(self, folder: str | Path, texts: Mapping[str, str]) -> Path:
        """Write `summary.json`, `manifest.json`, `requests.parquet`, `steps.parquet` and `texts` (name to content), and
        `transfers.parquet` where prefill and decode are apart, `replicas.parquet` where replicas come and go, and
        `gaps.parquet` where requests were preempted or left out of steps.

        All files are written before any takes its name, so that a full disk leaves older results whole.
        """
        frames = {"requests.parquet": self._request_frames(), "steps.parquet": self._step_frames()}
        if self._transfers.height:
            frames["transfers.parquet"] = (tables.transfer_frame(rows) for rows in self._transfers.blocks())
        if self._changes.height:
            frames["replicas.parquet"] = iter([self.replicas])
        if self._left_out.height:
            frames["gaps.parquet"] = (tables.gap_frame(rows) for rows in self._left_out.blocks())
        facts = {"summary.json": self.summary(), "manifest.json": dict(self.manifest)}
        dumped = {name: json.dumps(table, indent=2, allow_nan=False) + "\n" for name, table in facts.items()}
        return tables.write_folder(Path(folder), frames, dumped | dict(texts))


def _distribution(values: Floats) -> Distribution:
    """Of those that are known."""
    return Distribution.of(values[~np.isnan(values)])
