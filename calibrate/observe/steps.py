"""What an engine was seen to do: its facts, a row a step, a row a request.

It knows no file and no scheduler: `read.py` reads one, `servecast/conformance/` compares the other with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl

FACTS: dict[str, type] = {
    "vllm": str, "gpu": str, "unix_s": float, "model": str, "dtype": str, "quantization": str, "enforce_eager": bool,
    "kv_cache_dtype": str, "enable_prefix_caching": bool, "gpu_memory_utilization": float, "tensor_parallel_size": int,
    "pipeline_parallel_size": int, "data_parallel_size": int, "speculative_method": str, "scheduling_policy": str,
    "async_scheduling": bool, "enable_chunked_prefill": bool, "long_prefill_token_threshold": int,
    "scheduler_reserve_full_isl": bool, "max_num_seqs": int, "max_num_batched_tokens": int, "max_model_len": int,
    "block_size": int, "num_gpu_blocks": int, "kv_connector": str, "kv_cache_groups": int,
}  # fmt: skip
"""What is known of an engine, by vLLM's names of its options; `unix_s` is when its clock read 0."""

STEP_COLUMNS = (
    "step", "updates", "begin_s", "planned_s", "update_s", "end_s", "chunk_request", "chunk_tokens", "chunk_cached",
    "decodes", "kv_tokens", "running", "waiting", "free_blocks", "preempted", "prefix_hits", "draft_tokens",
)  # fmt: skip
REQUEST_COLUMNS = (
    "request", "plan", "reached_s", "noted_s", "prompt_tokens", "max_tokens", "priority", "kinds", "end_plan",
    "finished_s", "output_tokens", "status",
)  # fmt: skip
_LISTS = ("chunk_request", "chunk_tokens", "chunk_cached", "preempted")
_WORDS = ("kinds", "status")


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """One engine from its start on. Times are seconds of its own clock, from an arbitrary zero.

    `facts`: those of `FACTS` that are known. `notes`: what a reader should know, such as that the record is cut off.

    `steps`, in order, those that computed nothing included. step: number of its plan, from 0; updates: steps whose
    output had been processed when it was planned (step - updates were in flight); begin_s, planned_s, update_s, end_s:
    schedule() in and out, update_from_output() in and out; busy_s: see `busy_s`; chunk_request, chunk_tokens,
    chunk_cached: lists, one entry a prompt chunk in the batch's order: whose (null where unknown), its new tokens, its
    tokens in KV before; decodes, kv_tokens: requests that decode, and their tokens in KV before the step (a last single
    token that is recomputed may count as a decode); running, waiting, free_blocks: once it was planned; preempted: list
    of requests (null where unknown); prefix_hits: tokens that admitted requests found in the prefix cache (null where
    unknown); draft_tokens: of speculative decoding.

    `requests`, in order of arrival. request: number, from 0; plan: the first that could see it; reached_s: when it
    reached the scheduler; noted_s: unix time that the engine holds for its arrival (null where unknown); prompt_tokens,
    max_tokens, priority; kinds: what is special about it ("structured lora"); end_plan: the first plan without it;
    finished_s, output_tokens, status (stopped, length_capped, aborted, ...). The last four are null while it is
    unfinished, and where unknown.
    """

    path: Path
    facts: Mapping[str, Any]
    steps: pl.DataFrame
    requests: pl.DataFrame
    notes: tuple[str, ...]

    @property
    def most_in_flight(self) -> int:
        """The most steps that were not processed when one was planned: 0 synchronous, 1 asynchronous."""
        return int((self.steps["step"] - self.steps["updates"]).max() or 0)  # type: ignore[arg-type]


def observed(
    path: Path, facts: Mapping[str, Any], steps: Mapping[str, Any], requests: Mapping[str, Any], notes: tuple[str, ...]
) -> ObservedRun:
    """The run of these columns (of STEP_COLUMNS and REQUEST_COLUMNS), with what follows from them."""
    import polars as pl

    def typed(columns: Mapping[str, Any], names: tuple[str, ...]) -> pl.DataFrame:
        kinds: dict[str, pl.DataType] = {n: pl.Float64() if n.endswith("_s") else pl.Int64() for n in names}
        kinds |= {name: pl.List(pl.Int64) for name in names if name in _LISTS}
        kinds |= {name: pl.String() for name in names if name in _WORDS}
        return pl.DataFrame({name: columns[name] for name in names}, schema=kinds)

    table = typed(steps, STEP_COLUMNS)
    if not len(table):
        raise ServecastError(f"{path}: holds no steps; did the engine get a request while it was observed?")
    return ObservedRun(path, facts, table.with_columns(busy_s()), typed(requests, REQUEST_COLUMNS), notes)


def busy_s() -> pl.Expr:
    """Seconds that the engine had to give to a step, from the columns of ObservedRun.steps.

    `end - max(begin, end of the step before)`. A synchronous engine plans a step when the one before has ended, so this
    is schedule() in to update_from_output() out. An asynchronous one plans it while the one before runs: what the step
    takes is the cadence of the update ends, which contains the GPU's time or, if that is longer, the host's. Where the
    engine was idle in between, a step counts from its plan, so no idle time is in it.
    """
    import polars as pl

    return (pl.col("end_s") - pl.max_horizontal("begin_s", pl.col("end_s").shift(1))).alias("busy_s")
