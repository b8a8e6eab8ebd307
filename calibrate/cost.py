"""What an engine step costs in seconds: the `StepCost` that the simulation calls, compiled from prices of kernels.

Which kernels a step runs is `operators.py`'s knowledge, what one takes is `prices.py`'s. Here they become look-ups: by
the tokens of a step, by its sampled sequences, by chunk, and lines in the KV tokens for every number of decodes. It
knows nothing of requests or queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operators import AttentionGroup, Operator, attention_groups, attention_operators, step_operators
from calibrate.reads import Line, Reads, reads_of, riding
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calibrate.kernels.chunks import ChunkPrices, LocalChunks
    from calibrate.kernels.heads import HeadShape
    from calibrate.prices import Prices

    Floats = NDArray[np.float64]
    Lines = list[list[tuple[float, float, float]]]  # of KvLines


MANY_CHUNKS = 64
"""Prompt chunks in one step beyond which more of them fill the GPU no better."""
MANY_KEYS = 16384.0
"""Cached tokens of a chunk from which making their keys takes time in proportion to them."""
LONG_STEP = 512
"""Tokens from which a step is long; fewer tokens, less so."""


class StepCost(Protocol):
    """Prices steps. Implementations are deterministic and keep no state that a call changes."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """Where the prices come from, for the manifest."""

    @property
    def swap_block_s(self) -> float:
        """Seconds to copy one KV block to the memory of the host, or back, which the step waits for."""

    def step_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds of one step.

        `chunks` are the prefill chunks as (new tokens, tokens already in KV), `decodes` the sequences that decode one
        token each, `kv_tokens` the sum over those of their tokens in KV before the step, `seen` the same of those that
        the layers of each of the model's windows read.
        """

    def decode_line(self, decodes: int, kv_tokens: int) -> Line | None:
        """(a, b, floor, upto) with `step_s((), decodes, kv) == max(floor, a + b * kv)` bit for bit for all `kv` from
        `kv_tokens` to `upto`, or None if no such. Of a model with windows, what the others do not take: see
        `window_lines`."""

    def window_lines(self, decodes: int, seen: Sequence[int]) -> Sequence[Line]:
        """What the layers of each window take besides, as lines in the tokens that they read, from `seen` on: a step
        without chunks is the sum of all lines, in this order, or the floor of `decode_line`."""


@dataclass(frozen=True, slots=True)
class CompiledCost:
    """A model under a layout on one kind of GPU with one engine; built by `compile_cost`.

    Lists are indexed by the step's tokens (`tokens_s`) or sampled sequences (`samples_s`, `after_s`, `floor_s`); all
    entries are seconds. `decode` are decode attention's lines, to which `decode_base_s` adds what else a step of so
    many decodes takes; `joint` is what they take in one kernel with chunks (seconds, and seconds a KV token), and
    `joint_read` the least that it takes (seconds to read a KV token, to read it again for all other heads, and how many
    the cache holds): both of layers that see everything, `windows` is the same of the others. `prefill` are the groups
    of layers with equal attention: (layers, chunk prices). Host time:
    `after_s` is added to the GPU time, and a step takes at least `floor_s` and, by its tokens, `launch_s` where it has
    chunks, `decode_floor_s` where not.
    """

    tokens_s: list[float]
    samples_s: list[float]
    after_s: list[float]
    floor_s: list[float]
    launch_s: list[float]
    decode_floor_s: list[float]
    decode_base_s: list[float]
    decode: Lines
    joint: list[tuple[float, float]]
    joint_read: tuple[float, float, float]
    prefill: tuple[tuple[int, ChunkPrices | LocalChunks], ...]
    provenance: Mapping[str, object]
    windows: tuple[Reads, ...] = ()
    swap_block_s: float = 0.0

    def step_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds of one step; see `StepCost`. Sequences and tokens must be within the engine's limits."""
        if not chunks:
            a, b, floor, _ = self.decode_line(decodes, kv_tokens)
            step = a + b * kv_tokens
            for reads, tokens in zip(self.windows, seen, strict=True) if seen else ():
                a, b, _, _ = reads.line(decodes, tokens)
                step += a + b * tokens
            return step if step > floor else floor
        tokens = decodes
        for q, _ in chunks:
            tokens += q
        attention = 0.0
        for layers, group in self.prefill:
            attention += layers * group.together(chunks)
        samples = decodes + len(chunks)
        if decodes:
            for upto, a, b in self.decode[decodes]:
                if kv_tokens <= upto:
                    alone = a + b * kv_tokens
                    break
            tiles_s, token_s = self.joint[decodes]
            joint = tiles_s + token_s * kv_tokens
            read_s, again_s, resident = self.joint_read
            read = read_s * kv_tokens
            if kv_tokens > resident:
                read += again_s * min(3.0 * (kv_tokens - resident), kv_tokens)
            for reads, seen_tokens in zip(self.windows, seen, strict=True) if seen else ():
                more = reads.mixed(decodes, seen_tokens)
                alone, joint, read = alone + more[0], joint + more[1], read + more[2]
            attention += max(alone, joint, read)
        step = self.tokens_s[tokens] + self.samples_s[samples] + attention + self.after_s[samples]
        floor = self.floor_s[samples] + self.launch_s[tokens]
        return step if step > floor else floor

    def decode_line(self, decodes: int, kv_tokens: int) -> tuple[float, float, float, float]:
        """See `StepCost`."""
        for upto, a, b in self.decode[decodes]:
            if kv_tokens <= upto:
                return self.decode_base_s[decodes] + a, b, self.decode_floor_s[decodes], upto
        raise AssertionError("the last piece has no end")

    def window_lines(self, decodes: int, seen: Sequence[int]) -> list[Line]:
        """See `StepCost`."""
        return [reads.line(decodes, tokens) for reads, tokens in zip(self.windows, seen, strict=True)]

    def slowed(self, factor: float) -> CompiledCost:
        """This cost with kernels of long steps `factor` times as long (see `EngineSpec.long_step_factor`)."""
        if factor == 1.0:
            return self
        tokens = range(len(self.tokens_s))
        longer = [(1 + (factor - 1) * min(n / LONG_STEP, 1.0)) * s for n, s in zip(tokens, self.tokens_s, strict=True)]
        prefill = tuple((layers, chunks.times(factor)) for layers, chunks in self.prefill)
        return replace(self, tokens_s=longer, prefill=prefill)


def compile_cost(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> CompiledCost:
    """The cost of every step of `model` under `layout` that `engine` can run, at these prices.

    Raises `ServecastError` for a model whose kernels have no prices.
    """
    import numpy as np  # here, so that importing the catalogue stays cheap

    from calibrate.kernels.chunks import LocalChunks

    if model.dtype == "fp32":
        raise ServecastError(
            f"{model.name}: fp32 is not priced (GPUs' dense fp32 rates are not in the catalogue); leave engine.dtype "
            "out, and it is served in 16 bit, or set it to bfloat16 or float16"
        )
    every = np.arange(engine.max_num_batched_tokens + 1)
    mixed, decoding = (padded_tokens(engine, every, chunks).astype(np.float64) for chunks in (True, False))
    rows = {"tokens": mixed, "samples": np.arange(engine.max_num_seqs + 1, dtype=np.float64)}
    times = _lookups(model, layout, engine, prices, rows)
    same = np.array_equal(mixed, decoding)
    decode_times = times if same else _lookups(model, layout, engine, prices, rows | {"tokens": decoding})
    host, samples = engine.host, rows["samples"]
    if engine.async_scheduling:
        after = np.full_like(samples, host.bubble_s)
        floor = host.async_base_s + host.async_per_sequence_s * samples + host.bubble_s
    else:
        after = floor = host.sync_base_s + host.sync_per_sequence_s * samples
    launch, decode_launch = (model.layers * _launch_s(engine, every, chunks) for chunks in (True, False))
    if prices.gpu.architecture == "cpu":  # the thread that launches a kernel runs it: nothing overlaps
        times = times | {"tokens": times["tokens"] + launch}
        decode_times = decode_times | {"tokens": decode_times["tokens"] + decode_launch}
        launch, decode_launch = np.zeros_like(launch), np.zeros_like(decode_launch)
    for table in (*times.values(), *decode_times.values(), after, floor):
        table[0] = 0.0  # a step without work costs nothing
    groups = attention_groups(model, layout)
    max_q = min(engine.max_num_batched_tokens, engine.max_model_len)
    prefill: list[tuple[int, ChunkPrices | LocalChunks]] = []
    for g in groups:
        chunks = prices.prefill(head_shapes(g)[0], max_q, min(engine.max_num_seqs, MANY_CHUNKS))
        prefill.append((g.layers, LocalChunks(chunks, g.window) if g.chunked else chunks))
    lines = [(g.layers, prices.decode(head_shapes(g)[1], engine.max_num_seqs).lines) for g in groups]
    riders = riding(groups, prefill, prices.gpu)
    whole = sum(not g.window for g in groups)  # they come first
    full = reads_of(lines[:whole], riders[:whole], engine.max_num_seqs)
    windows = [reads_of(lines[i : i + 1], riders[i : i + 1], engine.max_num_seqs) for i in range(whole, len(groups))]
    decode = full.lines
    if beside := attention_operators(model, layout):
        prefill = [(layers, _with_keys(beside, each, layout, prices)) for layers, each in prefill]
        of_decodes = [op.kernels * operator_s(op, samples, layout, prices) for op in beside if op.rows == "decodes"]
        more: Floats = np.sum(of_decodes, axis=0)
        decode = [[(upto, a + x, b) for upto, a, b in row] for row, x in zip(decode, more.tolist(), strict=True)]
    decode[0] = [(np.inf, 0.0, 0.0)]
    base = decode_times["tokens"][: engine.max_num_seqs + 1] + decode_times["samples"] + after
    decode_floor = floor + decode_launch[: engine.max_num_seqs + 1]
    cost = CompiledCost(
        tokens_s=times["tokens"].tolist(),
        samples_s=times["samples"].tolist(),
        after_s=after.tolist(),
        floor_s=floor.tolist(),
        launch_s=launch.tolist(),
        decode_floor_s=decode_floor.tolist(),
        decode_base_s=base.tolist(),
        decode=decode,
        joint=full.joint,
        joint_read=full.joint_read,
        prefill=tuple(prefill),
        provenance=_provenance(model, layout, engine, prices),
        windows=tuple(windows),
    )
    return cost.slowed(engine.long_step_factor)


def head_shapes(group: AttentionGroup) -> tuple[HeadShape, HeadShape]:
    """The attention kernels of a group of layers: that of prompt chunks, and that of decoding sequences.

    Of latent attention these differ: chunks attend to 16-bit keys and values of every head, made from the latents,
    decoding tokens to the cached latents themselves. Chunked attention runs the kernels of full attention, on each
    chunk of a sequence as if it were one (`make_local_attention_virtual_batches` of vLLM).
    """
    from calibrate.kernels.heads import HeadShape

    window = 0 if group.chunked else group.window
    if (latent := group.latent) is None:
        same = HeadShape(group.kv_dtype, group.heads, group.kv_heads, group.head_dim, group.head_dim, window)
        return same, same
    return (
        HeadShape("bf16", group.heads, group.heads, latent.key, latent.value, window),
        HeadShape(group.kv_dtype, group.heads, 1, latent.cached, latent.kv_rank, window),
    )


def operator_s(op: Operator, rows: Floats, layout: Parallelism, prices: Prices) -> Floats:
    """Seconds of one of the operator's kernels for every number of rows (at least 1 is priced)."""
    import numpy as np

    rows = np.maximum(rows, 1.0)
    if op.family == "gemm":
        return prices.gemm_s(op.weights, rows, *op.shape)
    if op.family == "moe":
        hidden, inter, experts, topk = op.shape
        return prices.moe_s(op.weights, rows, hidden, inter, experts, topk, layout.tp)
    if op.family == "elementwise":
        return prices.elementwise_s(op.name, rows, *op.shape)
    return prices.collective_s(op.family, buffer_bytes(op, rows, layout), layout.tp)


def kernels_s(
    model: ModelSpec,
    layout: Parallelism,
    prices: Prices,
    chunks: Sequence[tuple[int, int]],
    decodes: int,
    kv_tokens: int,
) -> float:
    """Seconds of the kernels of one step, without host, padding or gaps: to compare with measured steps. Behind windows
    as if all decodes were equally long."""
    import numpy as np

    from calibrate.kernels.chunks import LocalChunks

    new, beside = sum(q for q, _ in chunks), attention_operators(model, layout)
    rows = {"tokens": decodes + new, "samples": decodes + len(chunks), "decodes": decodes}
    total = 0.0
    for op in (*step_operators(model, layout), *(op for op in beside if op.rows == "decodes" and decodes)):
        total += op.kernels * float(operator_s(op, np.array([float(rows[op.rows])]), layout, prices)[0])
    for g in attention_groups(model, layout):
        of_chunks, decoding = head_shapes(g)
        if chunks:
            priced = prices.prefill(of_chunks, max(q for q, _ in chunks), len(chunks))
            priced = _with_keys(beside, priced, layout, prices) if beside else priced
            total += g.layers * (LocalChunks(priced, g.window) if g.chunked else priced).together(chunks)
        if decodes:
            total += g.layers * prices.decode(decoding, decodes).seconds(decodes, g.seen(decodes, kv_tokens))
    return total


def buffer_bytes(op: Operator, rows: Floats, layout: Parallelism) -> Floats:
    """Bytes of a collective's whole buffer, as `measurements.py` counts them: what is reduced, or what was gathered."""
    from calibrate.kernels.gemm import ACTIVATION_BYTES

    size: Floats = rows * ACTIVATION_BYTES * op.shape[0] * (layout.tp if op.family == "allgather" else 1)
    return size


def _on_cores(engine: EngineSpec, tokens: Floats) -> NDArray[np.bool_]:
    """Whether a 32-bit router of so many tokens is multiplied on the CUDA cores."""
    return tokens >= (float("inf") if engine.fp32_router_from is None else engine.fp32_router_from)


def _launch_s(engine: EngineSpec, tokens: NDArray[np.int64], chunks: bool) -> Floats:
    """Seconds in which the host launches the kernels of a layer; none where a captured graph runs."""
    import numpy as np

    sizes, host = engine.graphs.mixed if chunks else engine.graphs.decode, engine.host
    beyond = host.compiled_layer_s if engine.graphs.compiled and sizes else host.uncaptured_layer_s
    none = tokens > max(sizes, default=0) if engine.graphs.padded else ~np.isin(tokens, sizes)
    return np.where(none, host.eager_layer_s if engine.enforce_eager else beyond, 0.0)


def padded_tokens(engine: EngineSpec, tokens: NDArray[np.int64], chunks: bool = False) -> NDArray[np.int64]:
    """The tokens that a step of so many computes, with or without prompt `chunks`."""
    import numpy as np

    captured = engine.graphs.mixed if chunks else engine.graphs.decode
    if not (captured and engine.graphs.padded):
        return tokens
    sizes = np.array(captured)
    at = np.searchsorted(sizes, tokens)
    return np.where((at < len(sizes)) & (tokens > 0), sizes[np.minimum(at, len(sizes) - 1)], tokens)


def _lookups(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, rows: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Seconds of everything but attention for every entry of `rows`, by "tokens" and "samples"."""
    import numpy as np

    operators = step_operators(model, layout)
    times = {name: np.zeros(len(values)) for name, values in rows.items()}
    for op in operators:
        seconds = operator_s(op, rows[op.rows], layout, prices)
        if op.name == "router_input":
            seconds = np.where(_on_cores(engine, rows["tokens"]), seconds, 0.0)
        elif op.name == "router" and op.weights == "fp32":
            narrow = operator_s(replace(op, weights="bf16"), rows["tokens"], layout, prices)
            seconds = np.where(_on_cores(engine, rows["tokens"]), seconds, narrow)
        times[op.rows] += op.kernels * seconds
    if layout.tp > 1 and engine.fuse_allreduce_rms:
        reduce, norm = (next(op for op in operators if op.name == name) for name in ("allreduce", "norms"))
        times["tokens"] -= reduce.kernels * fusion_saves(reduce, norm, rows["tokens"], layout, engine, prices)
    return times


def fusion_saves(
    reduce: Operator, norm: Operator, rows: Floats, layout: Parallelism, engine: EngineSpec, prices: Prices
) -> Floats:
    """Seconds that one all-reduce and the norm after it take less in one kernel: the norm's launch, and what the other
    all-reduce takes more. Nothing for buffers beyond the engine's limit."""
    import numpy as np

    limit = engine.fi_allreduce_fusion_max_size_mb or engine.fused_mib.get(layout.tp, 0.0)
    size = buffer_bytes(reduce, np.maximum(rows, 1.0), layout)
    fused = prices.fused_allreduce_s(size, layout.tp)
    if fused is None:
        return np.zeros_like(rows)
    launch = operator_s(norm, np.ones(1), layout, prices)
    saved = operator_s(reduce, rows, layout, prices) + launch - fused
    return np.where(size <= limit * 2**20, np.maximum(saved, 0.0), 0.0)


def _with_keys(
    beside: Sequence[Operator], prices: ChunkPrices | LocalChunks, layout: Parallelism, each: Prices
) -> ChunkPrices:
    """The chunks' prices of one layer with what makes keys and values of their own and of their cached tokens."""
    import numpy as np

    from calibrate.kernels.chunks import ChunkPrices

    assert isinstance(prices, ChunkPrices), "no model has latent and chunked attention"

    def seconds(tokens: Floats) -> Floats:
        parts = [operator_s(op, tokens, layout, each) for op in beside if op.rows == "chunk_keys"]
        total: Floats = np.sum(parts, axis=0)
        return total

    few, many = seconds(np.array([MANY_KEYS, 2.0 * MANY_KEYS]))
    return prices.plus(seconds, float(many - few) / MANY_KEYS)


def _provenance(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> dict[str, Any]:
    sources = prices.provenance.get("sources")
    return {
        **prices.provenance,
        "model": model.name,
        "tp": layout.tp,
        "dtype": model.dtype,
        "long_step_factor": engine.long_step_factor,
        "host": {**asdict(engine.host), **asdict(engine.front_end), "overlapped": engine.async_scheduling},
        "sources": {
            **(sources if isinstance(sources, dict) else {}),
            "host": f"engine-{engine.engine}.yaml, {engine.preset}",
        },
    }
