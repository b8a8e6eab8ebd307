"""What an engine step costs in seconds: the `StepCost` that the simulation calls, and its datasheet implementation.

The datasheet cost is a roofline: each operator takes a fixed time plus the larger of its FLOPs and its bytes at a
stated share of the GPU's peak. It knows nothing of requests or queues, and was not validated against measured runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from calibrate.engine import EngineSpec
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operators import (
    Operator,
    attention_flops_per_pair,
    query_bytes_per_token,
    step_operators,
)
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]


class StepCost(Protocol):
    """Prices steps. Implementations are deterministic and keep no state that a call changes."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """Where the prices come from, for the manifest."""

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
        """Seconds of one step.

        `chunks` are the prefill chunks as (new tokens, tokens already in KV), `decodes` the sequences that decode one
        token each, `kv_tokens` the sum over those of their tokens in KV before the step.
        """

    def decode_line(self, decodes: int) -> tuple[float, float, float] | None:
        """(a, b, floor) with `step_s((), decodes, kv) == max(floor, a + b * kv)` bit for bit, or None if no such."""


@dataclass(frozen=True, slots=True)
class DatasheetCost:
    """The datasheet roofline, compiled into lookups; built by `datasheet_cost`.

    Lists are indexed by the step's tokens (`tokens_s`) or sampled sequences (`samples_s`, `decode_s`, `after_s`,
    `floor_s`, and `lines`, the decode lines made of them); all entries are seconds. Attention is priced per chunk and
    per KV token. Host time: `after_s` is added to the GPU time, `floor_s` is the least that a step can take.
    """

    tokens_s: list[float]
    samples_s: list[float]
    decode_s: list[float]
    after_s: list[float]
    floor_s: list[float]
    lines: list[tuple[float, float, float]]
    pair_s: float
    chunk_kv_token_s: float
    chunk_query_s: float
    prefill_fixed_s: float
    decode_kv_token_s: float
    provenance: Mapping[str, object]

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
        """Seconds of one step; see `StepCost`. Sequences and tokens must be within the engine's limits."""
        if not chunks:
            a, b, floor = self.lines[decodes]
            return max(floor, a + b * kv_tokens)
        tokens = decodes
        attention = self.prefill_fixed_s
        for q, context in chunks:
            tokens += q
            compute = self.pair_s * q * (context + (q + 1) * 0.5)
            memory = self.chunk_kv_token_s * (context + q) + self.chunk_query_s * q
            attention += compute if compute > memory else memory
        samples = decodes + len(chunks)
        if decodes:
            attention += self.decode_s[decodes] + self.decode_kv_token_s * kv_tokens
        step = self.tokens_s[tokens] + self.samples_s[samples] + attention + self.after_s[samples]
        floor = self.floor_s[samples]
        return step if step > floor else floor

    def decode_line(self, decodes: int) -> tuple[float, float, float]:
        """See `StepCost`."""
        return self.lines[decodes]


def datasheet_cost(model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec) -> DatasheetCost:
    """Compile the roofline of `model` under `layout` on `gpu` for every step that `engine` can run."""
    import numpy as np  # here, so that importing the catalogue stays cheap

    if model.dtype == "fp32":
        raise ServecastError(
            f"{model.name}: fp32 weights are not priced (GPUs' dense fp32 rates are not in the catalogue). vLLM serves "
            "such a checkpoint in 16 bit by default: write torch_dtype bfloat16 or float16 in its config.json"
        )
    # A GPU's fp16 and bf16 tensor rates are the same.
    peak, bandwidth, share = gpu.flops["bf16"], gpu.bandwidth_bytes_per_s, gpu.efficiency
    tokens = np.arange(engine.max_num_batched_tokens + 1, dtype=np.float64)
    samples = np.arange(engine.max_num_seqs + 1, dtype=np.float64)
    rows = {"tokens": tokens, "samples": samples}
    times = {"tokens": np.zeros_like(tokens), "samples": np.zeros_like(samples)}
    for op in step_operators(model, layout):
        times[op.rows] += _operator_s(op, rows[op.rows], layout, gpu)

    pair_flops, query_bytes = attention_flops_per_pair(model, layout), query_bytes_per_token(model, layout)
    kv_bytes = model.kv_bytes_per_token(layout.tp)
    decode_byte_s = 1 / (share.decode_bandwidth * bandwidth)
    # Few-headed KV on a card with little compute makes even decode attention compute-bound.
    kv_token_s = max(kv_bytes * decode_byte_s, pair_flops / (share.prefill_flops * peak))
    decode = model.layers * share.decode_fixed_s + samples * (kv_token_s + query_bytes * decode_byte_s)

    host = engine.host
    if engine.async_scheduling:
        after = np.full_like(samples, host.bubble_s)
        floor = host.async_base_s + host.async_per_sequence_s * samples + host.bubble_s
    else:
        after = host.sync_base_s + host.sync_per_sequence_s * samples
        floor = np.zeros_like(samples)
    for table in (times["tokens"], times["samples"], decode, after, floor):
        table[0] = 0.0  # a step without work costs nothing
    base = times["tokens"][: engine.max_num_seqs + 1] + times["samples"] + decode + after
    return DatasheetCost(
        tokens_s=times["tokens"].tolist(),
        samples_s=times["samples"].tolist(),
        decode_s=decode.tolist(),
        after_s=after.tolist(),
        floor_s=floor.tolist(),
        lines=[(a, kv_token_s, least) for a, least in zip(base.tolist(), floor.tolist(), strict=True)],
        pair_s=pair_flops / (share.prefill_flops * peak),
        chunk_kv_token_s=kv_bytes * decode_byte_s,
        chunk_query_s=query_bytes * decode_byte_s,
        prefill_fixed_s=model.layers * share.prefill_fixed_s,
        decode_kv_token_s=kv_token_s,
        provenance=_provenance(model, layout, gpu, engine),
    )


def _operator_s(op: Operator, rows: Times, layout: Parallelism, gpu: Gpu) -> Times:
    """Seconds of all of the operator's kernels in a step, for every row count."""
    import numpy as np

    share = gpu.efficiency
    moved = op.fixed_bytes + op.bytes_per_row * rows
    if op.family == "gemm":
        compute = op.flops_per_row * rows / (share.gemm_flops * gpu.flops["bf16"])
        memory = moved / (share.gemm_bandwidth * gpu.bandwidth_bytes_per_s)
        return op.kernels * share.gemm_fixed_s + np.maximum(compute, memory)
    if op.family == "elementwise":
        return op.kernels * share.elementwise_fixed_s + moved / (
            share.elementwise_bandwidth * gpu.bandwidth_bytes_per_s
        )
    link = gpu.link
    return op.kernels * link.latency_s + moved / (link.share(layout.tp) * link.bandwidth_bytes_per_s)


def _provenance(model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec) -> dict[str, Any]:
    return {
        "kind": "datasheet",
        "gpu": gpu.id,
        "model": model.name,
        "tp": layout.tp,
        "dtype": model.dtype,
        "peak_flops": gpu.flops["bf16"],
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "link": gpu.link.name,
        "efficiencies": {key: value for key, value in asdict(gpu.efficiency).items() if key != "source"},
        "host": {**asdict(engine.host), "overlapped": engine.async_scheduling},
        "sources": {
            "gpu": gpu.source,
            "efficiencies": gpu.efficiency.source,
            "host": f"calibrate/catalog/engines.yaml, {engine.preset}",
        },
        "accuracy": "not yet validated",
    }
