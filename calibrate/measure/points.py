"""Which points are measured, the most informative first, and what each one moves and computes. Knows no torch.

Rounds: a coarse grid over everything, then more sizes, then tile edges. In a round the families take turns, and a
family's points come in an order that covers its grid evenly wherever the time runs out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrate.layout import Parallelism
from calibrate.measure.grids import Grid, Round
from calibrate.measurements import FAMILIES
from calibrate.model import ModelSpec
from calibrate.operators import attention_groups, step_operators, step_work

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "fp8_block": 1}
OPS = ("embedding", "norms", "qk_norm", "rope", "activation", "final_norm", "sampling")
"""Elementwise operators that `kernels.py` has."""


@dataclass(frozen=True, slots=True)
class Point:
    """A row to be measured: `values` of the family's columns; `flops` and bytes `moved` of one call, and the bytes of
    random data (`held`) and of results (`made`) that it needs at once."""

    family: str
    values: tuple[Any, ...]
    flops: float
    moved: float
    held: float
    made: float

    def sizes(self) -> dict[str, Any]:
        """Column -> value."""
        return dict(zip(FAMILIES[self.family], self.values, strict=True))


def rounds_of(grid: Grid, models: Sequence[ModelSpec], device: str, dtype: str, gpus: int = 1) -> list[list[Point]]:
    """The points of a grid for `models` on a "cuda" or "cpu" device, each once, in the order in which to measure.

    `dtype` is what GEMMs multiply in; all else is in bf16 beside fp8 weights.
    """
    plain = plain_dtype(dtype)
    known = {model.name: replace(model, dtype=plain) for model in models}
    make = _Maker(grid, known, device, dtype, plain)
    rounds = [list(make.always(gpus))]
    seen: set[tuple[str, tuple[Any, ...]]] = set()
    for number, sizes in enumerate(grid.rounds):
        lists: dict[str, list[Point]] = {}
        for point in make.of(sizes):
            if (point.family, point.values) not in seen:
                seen.add((point.family, point.values))
                lists.setdefault(point.family, []).append(point)
        turns = []
        for family, points in lists.items():
            random.Random(f"{family} {number}").shuffle(points)
            turns += [((place + 0.5) / len(points), point) for place, point in enumerate(points)]
        rounds.append([point for _, point in sorted(turns, key=lambda turn: turn[0])])
    return rounds


@dataclass(frozen=True, slots=True)
class _Maker:
    grid: Grid
    models: Mapping[str, ModelSpec]
    device: str
    dtype: str
    plain: str

    def always(self, gpus: int) -> Iterator[Point]:
        """What bounds everything else, and the host's times: first."""
        size = ITEM_BYTES[self.dtype]
        for n in self.grid.square:
            yield Point(
                "rate", ("matmul", self.dtype, 2 * n**3), 2.0 * n**3, 3.0 * n * n * size, n * n * size, n * n * 4
            )
        for moved in self.grid.copies:
            yield Point("rate", ("read", self.plain, moved), 0, moved, moved, 0)
            yield Point("rate", ("copy", self.plain, 2 * moved), 0, 2 * moved, moved, moved)
        for moved in self.grid.host_copies:
            for op in ("to_device", "to_host"):
                yield Point("rate", (op, self.plain, moved), 0, moved, 0, 2 * moved)
        names = ("launch_eager", "launch_graph", "graph_replay", "sync") if self.device == "cuda" else ("launch_eager",)
        yield from (Point("host", (what, 0), 0, 0, 0, 0) for what in names)
        if self.device == "cuda":
            yield from (
                Point("host", (w, n), 0, 0, 0, 0) for w in ("ids_to_host", "ids_to_device") for n in (1, 64, 1024)
            )
        for n in (n for n in (2, 4, 8) if n <= gpus):
            for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                for moved in self.grid.collectives:
                    yield Point("collective", (op, "nccl", n, moved), 0, moved, 0, 2 * moved)

    def of(self, sizes: Round) -> Iterator[Point]:
        for model in self.models.values():
            for tp in sizes.tps:
                if model.heads % tp == 0 and model.intermediate % tp == 0 and model.padded_vocab % tp == 0:
                    yield from self._linear(model, tp, sizes)
                    yield from self._attention(model, tp, sizes)
        stacked = [model for model in self.models.values() if can_be_stacked(model)]
        for model in stacked:
            yield from self._steps(model, sizes)
        for model in stacked[:1]:
            yield from self._modes(model, sizes)
        for shape in self.grid.experts:
            for tp in sizes.tps:
                yield from self._experts(shape, tp, sizes.moe)

    def _linear(self, model: ModelSpec, tp: int, sizes: Round) -> Iterator[Point]:
        kv = 4 * model.kv_heads_per_rank(tp) * model.head_dim  # keys and values, read and written
        moved = {"kv_cache": (kv, "tokens"), "greedy": (model.padded_vocab, "samples")}
        size, out = ITEM_BYTES[self.dtype], ITEM_BYTES[self.plain]
        for op in step_operators(model, Parallelism(tp=tp)):
            if op.family == "gemm":
                n, k = op.shape
                for m in getattr(sizes, op.rows):
                    read, made = n * k * size, m * k * size + m * n * out
                    yield Point("gemm", (self.dtype, m, n, k), 2.0 * m * n * k, read + made, read, made)
            elif op.family == "elementwise" and op.name in OPS:
                moved[op.name] = (op.shape[0], op.rows)
            elif op.family == "moe":
                yield from self._experts(op.shape, tp, sizes.moe)
        for name, (elements, rows) in moved.items():
            for count in getattr(sizes, rows):
                each = float(count * elements * ITEM_BYTES[self.plain])
                yield Point("elementwise", (name, count, elements), 0, each, 0, 2 * each)

    def _attention(self, model: ModelSpec, tp: int, sizes: Round) -> Iterator[Point]:
        for group in attention_groups(model, Parallelism(tp=tp)):
            if group.kind != "gqa" or group.window:
                continue
            shape = (group.heads, group.kv_heads, group.head_dim, group.head_dim, 0)
            values: tuple[Any, ...]
            for n, q, context in sizes.prefill:
                values = (self.plain, n, q, context, *shape)
                yield self._attending("prefill_attention", values, [(n, context)], q, model)
            for n, context in sizes.decode:
                yield self._attending("decode_attention", (self.plain, n, context, *shape), [(n, context)], 1, model)
            for n, context, longer, far in sizes.skew:
                values = (self.plain, n, context, longer, far, *shape)
                yield self._attending("decode_skew", values, [(n - longer, context), (longer, far)], 1, model)

    def _attending(
        self, family: str, values: tuple[Any, ...], groups: list[tuple[int, int]], q: int, model: ModelSpec
    ) -> Point:
        size = ITEM_BYTES[self.plain]
        heads, kv_heads, dim = values[-4:-1]
        pairs = sum(n * (q * context + q * (q + 1) / 2) for n, context in groups)
        kept = 2.0 * sum(n * (context + q) for n, context in groups) * kv_heads * dim * size
        asked = 2.0 * sum(n for n, _ in groups) * q * heads * dim * size
        masks = sum(q * (context + q) for _, context in groups) if q > 1 else 0
        return Point(family, values, 4.0 * heads * dim * pairs, kept + asked, kept, asked + masks)

    def _steps(self, model: ModelSpec, sizes: Round) -> Iterator[Point]:
        for n, q, context, decodes, each in sizes.steps:
            values = (model.name, 1, n, q, context, decodes, decodes * each)
            yield self._of_work("step", values, model, values[2:], model.layers)

    def _modes(self, model: ModelSpec, sizes: Round) -> Iterator[Point]:
        for n, q, context, decodes, each in sizes.modes:
            batch = (n, q, context, decodes, decodes * each)
            for what, modes in (("attention", ("naive", "fused")), ("layer", ("eager", "graph", "compiled"))):
                for mode in modes:
                    if mode != "graph" or self.device == "cuda":
                        yield self._of_work("mode", (what, mode, model.name, *batch), model, batch, 1)

    def _of_work(
        self, family: str, values: tuple[Any, ...], model: ModelSpec, batch: tuple[Any, ...], layers: int
    ) -> Point:
        n, q, context, decodes, kv_tokens = batch
        work = step_work(replace(model, layers=layers), Parallelism(tp=1), [(q, context)] * n, decodes, kv_tokens)
        tokens, size = n * q + decodes, ITEM_BYTES[self.plain]
        widest = max(3 * model.intermediate, 4 * model.heads * model.head_dim) + 6 * model.hidden
        made = tokens * widest * size + (n + decodes) * model.padded_vocab * 16 + n * q * (context + q)
        one = max(model.padded_vocab, 2 * model.intermediate) * model.hidden * size
        kept = 2.0 * (n * (context + q) + kv_tokens + decodes) * model.kv_heads * model.head_dim * size
        return Point(family, values, work.flops, work.hbm_bytes, max(one, kept), made)

    def _experts(self, shape: tuple[int, ...], tp: int, every: tuple[int, ...]) -> Iterator[Point]:
        hidden, inter, experts, topk = shape
        size = ITEM_BYTES[self.plain]
        one = 3.0 * hidden * inter / tp * size
        for tokens in every:
            rows = tokens * topk
            made = 4.0 * rows * (hidden + 3 * inter // tp) * size
            for skew, touched in (("balanced", experts), ("uniform", experts), (f"touched={topk}", topk)):
                values = (self.plain, tokens, hidden, inter, experts, topk, tp, 1, skew)
                read = one * min(touched, rows) + made
                yield Point("moe", values, 6.0 * rows * hidden * inter / tp, read, one * experts, made)


def plain_dtype(dtype: str) -> str:
    """What everything but GEMMs runs in when those multiply in `dtype`."""
    return dtype if dtype in ("fp32", "bf16") else "bf16"


def can_be_stacked(model: ModelSpec) -> bool:
    """Whether `stack.py` can build it: dense, with full attention and unquantised weights."""
    special = model.experts or model.latent or model.windows or model.quantized or model.norms != 2
    return not special and model.gated_mlp and model.qk_norm in ("", "head")
