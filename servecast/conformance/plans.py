"""What an engine planned and which requests it got, in the form in which a replay asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.request import Request

if TYPE_CHECKING:
    from calibrate.observe.steps import ObservedRun

Chunk = tuple[int | None, int, int]
"""Whose (None where nobody knows), new tokens, tokens in KV before."""
OF_ITSELF = ("stopped", "length_capped", "repetition")
"""Ends that come with a request's last token; all others come from outside."""


class Plan(NamedTuple):
    """One recorded plan: see `ObservedRun.steps`."""

    step: int
    updates: int
    begin_s: float
    chunks: tuple[Chunk, ...]
    decodes: int
    kv_tokens: int
    running: int
    waiting: int
    free_blocks: int
    preempted: tuple[int, ...] | None
    prefix_hits: int

    @property
    def idle(self) -> bool:
        """Nothing was left in the engine."""
        return not (self.running or self.waiting or self.chunks or self.decodes)


class Record:
    """The plans of a run, and its requests in the order in which plans learn of them."""

    def __init__(self, run: ObservedRun) -> None:
        self.plans = [_plan(row) for row in run.steps.iter_rows(named=True)]
        self.requests = list(run.requests.iter_rows(named=True))
        self.named = all(chunk[0] is not None for plan in self.plans for chunk in plan.chunks) and all(
            plan.preempted is not None for plan in self.plans
        )
        """Whether it says whose chunks they were, and who was preempted."""
        self.arrivals = sorted(range(len(self.requests)), key=lambda i: self.requests[i]["plan"])
        ended = [i for i, r in enumerate(self.requests) if r["end_plan"] is not None]
        self.ends = sorted(ended, key=lambda i: self.requests[i]["end_plan"])

    def request(self, index: int) -> Request:
        """A new request as it was before it arrived; one that did not end of itself would go on to its cap."""
        row = self.requests[index]
        output, cap = row["output_tokens"], max(row["max_tokens"], 1)
        if row["status"] not in OF_ITSELF or not output:
            output = cap
        elif row["status"] == "length_capped":  # it may have been max_model_len, which the engine sees coming too
            cap = output
        at = row["reached_s"] if row["noted_s"] is None else row["noted_s"]
        return Request(index, at, max(row["prompt_tokens"], 1), output, max(cap, output), row["priority"])


def _plan(row: dict[str, object]) -> Plan:
    """A row of the steps table."""
    columns = (row["chunk_request"], row["chunk_tokens"], row["chunk_cached"])
    row["chunks"] = tuple(zip(*columns, strict=True))  # type: ignore[call-overload]
    row["preempted"] = None if row["preempted"] is None else tuple(row["preempted"])  # type: ignore[arg-type]
    row["prefix_hits"] = row["prefix_hits"] or 0
    return Plan(*(row[name] for name in Plan._fields))  # type: ignore[arg-type]
