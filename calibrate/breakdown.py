"""Where the time of one step goes, part by part, and the least that the GPU's peaks allow for each.

For people who ask why a step takes as long as it does; a simulation has no use for it. One engine, or one rank of a
tensor parallel one; data and context parallel ranks and pipeline stages wait for each other, which is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from calibrate.cost import CompiledCost, longer_by, lookups, padded_tokens
from calibrate.engine import EngineSpec
from calibrate.hardware import Gpu
from calibrate.kernels.gemm import RATES
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.operators import (
    attention_operators,
    decode_attention,
    prefill_attention,
    step_operators,
    touched_share,
)

if TYPE_CHECKING:
    from calibrate.prices import Prices

Bound = Literal["compute", "bandwidth", "latency", "link", "host"]
NAMES = {
    "weights": "GEMMs with the weights",
    "experts": "experts",
    "attention": "attention",
    "elementwise": "norms, activations, sampling",
    "communication": "between GPUs",
    "host": "host",
}
"""The parts of a step, in their order, and what they are called."""
FAR = 0.2
"""The share of the peaks below which it is the fixed times of its kernels that a part takes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step, one of NAMES: the seconds that it takes, its FLOPs and bytes of HBM on one GPU, and the seconds
    that these take at the peaks."""

    name: str
    seconds: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    compute_s: float = 0.0
    bandwidth_s: float = 0.0

    @property
    def bound(self) -> Bound:
        """What its seconds go with."""
        if self.name == "communication":
            return "link"
        if self.name == "host":
            return "host"
        if max(self.compute_s, self.bandwidth_s) < FAR * self.seconds:
            return "latency"
        return "compute" if self.compute_s > self.bandwidth_s else "bandwidth"


@dataclass(frozen=True, slots=True)
class Step:
    """A whole step: its parts take `seconds` together."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """What the step takes."""
        return sum(part.seconds for part in self.parts)

    @property
    def flops(self) -> float:
        """Of one GPU."""
        return sum(part.flops for part in self.parts)

    @property
    def hbm_bytes(self) -> float:
        """Of one GPU."""
        return sum(part.hbm_bytes for part in self.parts)

    @property
    def intensity(self) -> float:
        """FLOPs a byte of HBM."""
        return self.flops / self.hbm_bytes

    @property
    def compute_s(self) -> float:
        """Its FLOPs at the peaks of their dtypes."""
        return sum(part.compute_s for part in self.parts)

    @property
    def bandwidth_s(self) -> float:
        """Its bytes at the peak bandwidth."""
        return sum(part.bandwidth_s for part in self.parts)

    @property
    def bound(self) -> Bound:
        """What most of its seconds go with; of those of the GPU's own work, what all of it would need longer for."""
        work: Bound = "compute" if self.compute_s > self.bandwidth_s else "bandwidth"
        seconds: dict[Bound, float] = {}
        for part in self.parts:
            of = work if part.bound in ("compute", "bandwidth") else part.bound
            seconds[of] = seconds.get(of, 0.0) + part.seconds
        return max(seconds, key=lambda bound: seconds[bound])


def step_of(
    model: ModelSpec,
    layout: Parallelism,
    engine: EngineSpec,
    prices: Prices,
    cost: CompiledCost,
    chunks: Sequence[tuple[int, int]],
    decodes: int,
    kv_tokens: int,
) -> Step:
    """The parts of a step that `cost` prices, with `chunks` of (new tokens, tokens already in KV) and `decodes`
    sequences that have `kv_tokens` in KV together. Behind windows as if all were equally long."""
    gpu, way = prices.gpu, layout.all2all(decoding=not chunks)
    new = sum(q for q, _ in chunks)
    rows = {"tokens": decodes + new, "samples": decodes + len(chunks)}
    rows |= {"chunk_keys": new + sum(context for _, context in chunks), "decodes": decodes}
    rows["chunk_context"] = rows["chunk_keys"] - new
    operators = step_operators(model, way)
    seconds = _seconds(operators, way, engine, prices, rows, bool(chunks))
    attention_s = _attention_s(cost, engine, model, chunks, decodes, kv_tokens)
    beside = attention_operators(model, layout)
    parts = []
    for name in ("weights", "experts", "attention", "elementwise", "communication"):
        among = beside if name == "attention" else [op for op in operators if _part(op) == name]
        flops, moved, compute_s = _work(among, rows, gpu)
        if name == "attention":
            works = [prefill_attention(model, layout, q, context) for q, context in chunks]
            works += [decode_attention(model, layout, decodes, kv_tokens)] if decodes else []
            flops += sum(work.flops for work in works)
            moved += sum(work.hbm_bytes for work in works)
            compute_s += sum(work.flops for work in works) / gpu.flops["bf16"]
        taken = attention_s if name == "attention" else seconds.get(name, 0.0)
        if taken or flops:
            parts.append(Part(name, taken, flops, moved, compute_s, moved / gpu.bandwidth_bytes_per_s))
    total = cost.step_s(chunks, decodes, kv_tokens, _seen(model, decodes, kv_tokens))
    rest = max(0.0, total - sum(part.seconds for part in parts))
    return Step((*parts, Part("host", rest)))


def _part(op: Operator) -> str:
    named = {"gemm": "weights", "moe": "experts", "elementwise": "elementwise"}
    return named.get(op.family, "communication")


def _seconds(
    operators: Sequence[Operator],
    layout: Parallelism,
    engine: EngineSpec,
    prices: Prices,
    rows: dict[str, int],
    chunks: bool,
) -> dict[str, float]:
    """Seconds by part, attention aside; what fusing an all-reduce with its norm saves is taken from communication."""
    import numpy as np

    padded = padded_tokens(engine, np.array([rows["tokens"]]), chunks).astype(np.float64)
    at = {"tokens": padded, "samples": np.array([float(rows["samples"])])}
    factor = longer_by(engine.long_step_factor, rows["tokens"]) if chunks else 1.0

    def taken(among: Sequence[Operator], engine: EngineSpec) -> float:
        found = lookups(among, layout, engine, prices, at)
        return factor * float(found["tokens"][0]) + float(found["samples"][0])

    apart = replace(engine, fuse_allreduce_rms=False)
    names = dict.fromkeys(map(_part, operators))
    seconds = {name: taken([op for op in operators if _part(op) == name], apart) for name in names}
    if "communication" in seconds:
        seconds["communication"] -= sum(seconds.values()) - taken(operators, engine)
    return seconds


def _attention_s(
    cost: CompiledCost,
    engine: EngineSpec,
    model: ModelSpec,
    chunks: Sequence[tuple[int, int]],
    decodes: int,
    kv_tokens: int,
) -> float:
    seen = _seen(model, decodes, kv_tokens)
    if chunks:
        return cost.attention_s(chunks, decodes, kv_tokens, seen)
    a, b, _, _ = cost.decode_line(decodes, kv_tokens)
    lines = zip(cost.window_lines(decodes, seen), seen, strict=True) if seen else ()
    return a - cost.decode_base_s[decodes] + b * kv_tokens + sum(line[0] + line[1] * n for line, n in lines)


def _seen(model: ModelSpec, decodes: int, kv_tokens: int) -> tuple[int, ...]:
    """Of the tokens in KV those that the layers of each window read, where all sequences are equally long."""
    if not decodes or not model.windows:
        return ()
    each = kv_tokens // decodes
    return tuple(decodes * (each % w.size if w.chunked else min(each, w.size)) for w in model.windows)


def _work(operators: Sequence[Operator], rows: dict[str, int], gpu: Gpu) -> tuple[float, float, float]:
    """(FLOPs, bytes of HBM, seconds of the FLOPs at the peaks) of some operators."""
    flops = moved = compute_s = 0.0
    for op in operators:
        if not (count := rows[op.rows]) or op.family not in ("gemm", "moe", "elementwise"):
            continue
        done = op.flops_per_row * count
        share = touched_share(op.shape[2], op.shape[3], count) if op.family == "moe" else 1.0
        flops += done
        moved += op.fixed_bytes * share + op.bytes_per_row * count
        if done:
            peak = gpu.fp32_flops if op.weights == "fp32" else gpu.flops.get(RATES[op.weights], gpu.flops["bf16"])
            compute_s += done / peak
    return flops, moved, compute_s


def main_rate(model: ModelSpec, layout: Parallelism, gpu: Gpu) -> str:
    """The dtype, one of the GPU's rates, in which most FLOPs of the weights are done."""
    flops: dict[str, float] = {}
    for op in step_operators(model, layout):
        if op.family in ("gemm", "moe") and op.rows != "samples" and op.weights in RATES:
            rate = RATES[op.weights] if RATES[op.weights] in gpu.flops else "bf16"
            flops[rate] = flops.get(rate, 0.0) + op.flops_per_row
    return max(flops, key=lambda rate: flops[rate], default="bf16")


MOST = 2**20
"""Sequences beyond which nobody asks."""


def turning_batch(model: ModelSpec, layout: Parallelism, gpu: Gpu, context: int) -> int | None:
    """The smallest batch of decodes, with `context` tokens in KV each, whose FLOPs take longer at the peaks than their
    bytes do: from there on more of them make a step longer in proportion. None where there is none."""

    def bound_by_compute(decodes: int) -> bool:
        rows = {"tokens": decodes, "samples": decodes, "chunk_keys": 0, "chunk_context": 0, "decodes": decodes}
        operators = (*step_operators(model, layout), *attention_operators(model, layout))
        _, moved, compute_s = _work(operators, rows, gpu)
        attention = decode_attention(model, layout, decodes, decodes * context)
        compute_s += attention.flops / gpu.flops["bf16"]
        return compute_s > (moved + attention.hbm_bytes) / gpu.bandwidth_bytes_per_s

    high = 1
    while not bound_by_compute(high):
        high *= 2
        if high > MOST:
            return None
    low = high // 2  # not yet
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_by_compute(middle) else (middle, high)
    return high
