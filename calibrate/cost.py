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
from calibrate.kernel_times import fusion_saves, head_shapes, layer_launches, operator_s, with_keys
from calibrate.layout import Parallelism, check_nodes
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.operators import attention_groups, attention_operators, step_operators
from calibrate.reads import Line, Reads, of_fullest, of_parts, reads_of, riding
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calibrate.kernels.chunks import Chunks
    from calibrate.prices import Prices

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Lines = list[list[tuple[float, float, float]]]  # of KvLines


MANY_CHUNKS = 64
"""Prompt chunks in one step beyond which more of them fill the GPU no better."""
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


class DraftCost(StepCost, Protocol):
    """Prices steps of an engine that drafts (`calibrate.speculative_cost`)."""

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        decodes: int,
        kv_tokens: int,
        seen: Sequence[int] = (),
        drafts: int = 0,
    ) -> float:
        """See `StepCost`; `drafts` are verified in it besides."""

    def verified_s(self, decodes: int, kv_tokens: Ints, drafts: Ints) -> Floats:
        """float64[steps]: seconds of steps without prompts, in which `decodes` sequences with `kv_tokens` tokens in KV
        verify so many `drafts` (int64[steps] each; the former do not fall)."""


@dataclass(frozen=True, slots=True)
class CompiledCost:
    """A model under a layout on one kind of GPU with one engine; built by `compile_cost`.

    Lists are indexed by the step's tokens (`tokens_s`, `decode_tokens_s` in steps of decodes alone) or sampled
    sequences (`samples_s`, `after_s`, `floor_s`); all entries are seconds. `decode` are decode attention's lines, to
    which `decode_base_s` adds what else a step of so many decodes takes; `joint` is what they take in one kernel with
    chunks (seconds, and seconds a KV token), and `joint_read` the least that it takes (seconds to read a KV token, to
    read it again for all other heads, and how many the cache holds): both of layers that see everything, `windows` is
    the same of the others. `prefill` are the groups of layers with equal attention: (layers, chunk prices). Host time:
    `after_s` is added to the GPU time, and a step takes at least `floor_s` and, by its tokens, `launch_s` where it has
    chunks, `decode_launch_s` where not: then `decode_floor_s`, by its decodes.
    """

    tokens_s: list[float]
    samples_s: list[float]
    after_s: list[float]
    floor_s: list[float]
    launch_s: list[float]
    decode_launch_s: list[float]
    decode_floor_s: list[float]
    decode_tokens_s: list[float]
    decode_base_s: list[float]
    decode: Lines
    joint: list[tuple[float, float]]
    joint_read: tuple[float, float, float]
    prefill: tuple[tuple[int, Chunks], ...]
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
        samples = decodes + len(chunks)
        attention = self.attention_s(chunks, decodes, kv_tokens, seen)
        step = self.tokens_s[tokens] + self.samples_s[samples] + attention + self.after_s[samples]
        floor = self.floor_s[samples] + self.launch_s[tokens]
        return step if step > floor else floor

    def attention_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds of the attention of a step with prompt chunks, its own or another rank's; see `step_s`."""
        attention = 0.0
        if chunks:
            for layers, group in self.prefill:
                attention += layers * group.together(chunks)
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
            attention += max(alone, joint, read) if chunks else alone
        return attention

    def decode_line(self, decodes: int, kv_tokens: int) -> tuple[float, float, float, float]:
        """See `StepCost`."""
        for upto, a, b in self.decode[decodes]:
            if kv_tokens <= upto:
                return self.decode_base_s[decodes] + a, b, self.decode_floor_s[decodes], upto
        raise AssertionError("the last piece has no end")

    def window_lines(self, decodes: int, seen: Sequence[int]) -> list[Line]:
        """See `StepCost`."""
        return [reads.line(decodes, tokens) for reads, tokens in zip(self.windows, seen, strict=True)]

    def slowed(self, factor: float, ranks: int = 1) -> CompiledCost:
        """This cost with kernels of long steps `factor` times as long (see `EngineSpec.long_step_factor`), where so
        many ranks share the tokens of a step."""
        if factor == 1.0:
            return self
        longer = [longer_by(factor, tokens / ranks) * s for tokens, s in enumerate(self.tokens_s)]
        prefill = tuple((layers, chunks.times(factor)) for layers, chunks in self.prefill)
        return replace(self, tokens_s=longer, prefill=prefill)


def longer_by(factor: float, tokens: float) -> float:
    """How many times as long kernels take in a step of so many tokens, up to `factor` times."""
    return 1 + (factor - 1) * min(tokens / LONG_STEP, 1.0)


def compile_cost(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, stage: int = 0
) -> CompiledCost:
    """The cost of every step of `model` under `layout` that `engine` can run, at these prices: of one pipeline stage
    of it (`calibrate.pipeline` knows what the host does for all of them). Raises `ServecastError` for a model whose
    kernels have no prices, GPUs that nothing joins, and data parallel ranks that share experts
    (`calibrate.group_cost` has what these cost).
    """
    if layout.dp > 1 and model.experts:
        raise ServecastError(f"dp {layout.dp}: ranks that share the experts of {model.name} step together: group_cost")
    return own_cost(model, layout, engine, prices, stage)


def own_cost(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, stage: int = 0, queries: int = 1
) -> CompiledCost:
    """The same of one data parallel rank, without what the ranks do together. Each decoding sequence computes `queries`
    tokens at once, and samples after each."""
    import numpy as np  # here, so that importing the catalogue stays cheap

    from calibrate.kernels.chunks import DealtChunks, LocalChunks

    if model.dtype == "fp32":
        raise ServecastError(
            f"{model.name}: fp32 is not priced (GPUs' dense fp32 rates are not in the catalogue); leave engine.dtype "
            "out, and it is served in 16 bit, or set it to bfloat16 or float16"
        )
    if problems := check_nodes(layout, prices.gpu):
        raise ServecastError(*problems)
    every = local_tokens(layout, np.arange(engine.max_num_batched_tokens + 1))
    mixed, decoding = (padded_tokens(engine, every, chunks).astype(np.float64) for chunks in (True, False))
    sequences = np.arange(engine.max_num_seqs + 1, dtype=np.float64)
    computed = np.minimum(queries * np.arange(engine.max_num_seqs + 1), engine.max_num_batched_tokens)
    rows = {"samples": np.arange(max(engine.max_num_seqs, int(computed[-1])) + 1, dtype=np.float64)}
    ways = [layout.all2all(decoding=False), layout.all2all(decoding=True)]
    operators = [step_operators(model, way, stage) for way in ways]

    def seconds(way: int, tokens: Floats) -> dict[str, Floats]:
        shared = {"group": layout.pcp * tokens} if layout.pcp > 1 else {}
        found = lookups(operators[way], ways[way], engine, prices, {**rows, "tokens": tokens, **shared})
        return found | ({"tokens": found["tokens"] + found["group"]} if shared else {})

    times = decode_times = seconds(0, mixed)
    if not np.array_equal(mixed, decoding) or ways[0] != ways[1]:
        decode_times = seconds(1, decoding)
    host = engine.host
    if engine.async_scheduling:
        after = np.full_like(sequences, host.bubble_s)
        floor = host.async_base_s + host.async_per_sequence_s * sequences + host.bubble_s
    else:
        after = floor = host.sync_base_s + host.sync_per_sequence_s * sequences
    layers_here = layout.stages(model.layers)[stage]
    kernels = layer_launches(model, layout, engine, stage)
    launch, decode_launch = (layers_here * _launch_s(engine, every, kernels, chunks) for chunks in (True, False))
    if prices.gpu.architecture == "cpu":  # the thread that launches a kernel runs it: nothing overlaps
        times = times | {"tokens": times["tokens"] + launch}
        decode_times = decode_times | {"tokens": decode_times["tokens"] + decode_launch}
        launch, decode_launch = np.zeros_like(launch), np.zeros_like(decode_launch)
    for table in (*times.values(), *decode_times.values(), after, floor):
        table[0] = 0.0  # a step without work costs nothing
    groups = attention_groups(model, layout, stage)
    max_q = min(engine.max_num_batched_tokens, engine.max_model_len)
    prefill: list[tuple[int, Chunks]] = []
    for g in groups:
        chunks = prices.prefill(head_shapes(g)[0], max_q, min(engine.max_num_seqs, MANY_CHUNKS))
        prefill.append((g.layers, LocalChunks(chunks, g.window) if g.chunked else chunks))
    decoding_heads = [head_shapes(g)[1] for g in groups]
    if queries > 1:
        decoding_heads = [replace(shape, heads=queries * shape.heads) for shape in decoding_heads]
    lines = [
        (g.layers, of_parts(prices.decode(shape, engine.max_num_seqs).lines, g.dcp))
        for g, shape in zip(groups, decoding_heads, strict=True)
    ]
    riders = riding(groups, prefill, prices.gpu)
    whole = sum(not g.window for g in groups)  # they come first
    full = reads_of(lines[:whole], riders[:whole], engine.max_num_seqs)
    windows = [reads_of(lines[i : i + 1], riders[i : i + 1], engine.max_num_seqs) for i in range(whole, len(groups))]
    decode = full.lines
    if beside := attention_operators(model, layout, stage):
        prefill = [(layers, with_keys(beside, each, layout, prices)) for layers, each in prefill]
        queried = queries * sequences
        of_decodes = [op.kernels * operator_s(op, queried, layout, prices) for op in beside if op.rows == "decodes"]
        more: Floats = np.sum(of_decodes, axis=0)
        decode = [[(upto, a + x, b) for upto, a, b in row] for row, x in zip(decode, more.tolist(), strict=True)]
    decode[0] = [(np.inf, 0.0, 0.0)]
    if layout.pcp > 1:
        decode = of_fullest(decode, layout.pcp)
        prefill = [(layers, DealtChunks(each, layout.pcp)) for layers, each in prefill]
    base = decode_times["tokens"][computed] + decode_times["samples"][computed] + after
    decode_floor = floor + decode_launch[computed]
    cost = CompiledCost(
        tokens_s=times["tokens"].tolist(),
        samples_s=times["samples"].tolist(),
        after_s=after.tolist(),
        floor_s=floor.tolist(),
        launch_s=launch.tolist(),
        decode_launch_s=decode_launch.tolist(),
        decode_floor_s=decode_floor.tolist(),
        decode_tokens_s=decode_times["tokens"][: len(rows["samples"])].tolist(),
        decode_base_s=base.tolist(),
        decode=decode,
        joint=full.joint,
        joint_read=full.joint_read,
        prefill=tuple(prefill),
        provenance=_provenance(model, layout, engine, prices),
        windows=tuple(windows),
    )
    return cost.slowed(engine.long_step_factor, layout.pcp)


def local_tokens(layout: Parallelism, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of so many tokens of a step those of the prefill context parallel rank that has the most."""
    return -(-tokens // layout.pcp)


def _on_cores(engine: EngineSpec, tokens: Floats) -> NDArray[np.bool_]:
    """Whether a 32-bit router of so many tokens is multiplied on the CUDA cores."""
    return tokens >= (float("inf") if engine.fp32_router_from is None else engine.fp32_router_from)


def _launch_s(engine: EngineSpec, tokens: NDArray[np.int64], kernels: float, chunks: bool) -> Floats:
    """Seconds in which the host launches the `kernels` of a layer; none where a captured graph runs."""
    import numpy as np

    sizes = engine.graphs.mixed if chunks else engine.graphs.decode
    none = tokens > max(sizes, default=0) if engine.graphs.padded else ~np.isin(tokens, sizes)
    compiled = engine.graphs.compiled and bool(sizes)
    return np.where(none, engine.host.launching_s(engine.enforce_eager, compiled, kernels), 0.0)


def padded_tokens(engine: EngineSpec, tokens: NDArray[np.int64], chunks: bool = False) -> NDArray[np.int64]:
    """The tokens that a step of so many computes, with or without prompt `chunks`."""
    import numpy as np

    captured = engine.graphs.mixed if chunks else engine.graphs.decode
    if not (captured and engine.graphs.padded):
        return tokens
    sizes = np.array(captured)
    at = np.searchsorted(sizes, tokens)
    return np.where((at < len(sizes)) & (tokens > 0), sizes[np.minimum(at, len(sizes) - 1)], tokens)


def lookups(
    operators: Sequence[Operator],
    layout: Parallelism,
    engine: EngineSpec,
    prices: Prices,
    rows: Mapping[str, Floats],
    stage: int = 0,
) -> dict[str, Floats]:
    """Seconds of the operators for every entry of `rows`, by what their rows are; of those whose rows are named."""
    import numpy as np

    times = {name: np.zeros(len(values)) for name, values in rows.items()}
    for op in operators:
        if op.rows not in rows:
            continue
        seconds = operator_s(op, rows[op.rows], layout, prices, stage)
        if op.name == "router_input":
            seconds = np.where(_on_cores(engine, rows["tokens"]), seconds, 0.0)
        elif op.name == "router" and op.weights == "fp32":
            narrow = operator_s(replace(op, weights="bf16"), rows["tokens"], layout, prices)
            seconds = np.where(_on_cores(engine, rows["tokens"]), seconds, narrow)
        times[op.rows] += op.kernels * seconds
    named = {op.name: op for op in operators}
    if "allreduce" in named and engine.fuse_allreduce_rms and "tokens" in rows:
        reduce, norm = named["allreduce"], named["norms"]
        times["tokens"] -= reduce.kernels * fusion_saves(reduce, norm, rows["tokens"], layout, engine, prices)
    return times


def _provenance(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> dict[str, Any]:
    sources = prices.provenance.get("sources")
    return {
        **prices.provenance,
        "model": model.name,
        "tp": layout.tp,
        **({} if layout == Parallelism(layout.tp) else {"layout": asdict(layout)}),
        "dtype": model.dtype,
        "long_step_factor": engine.long_step_factor,
        "host": {**asdict(engine.host), **asdict(engine.front_end), "overlapped": engine.async_scheduling},
        "sources": {
            **(sources if isinstance(sources, dict) else {}),
            "host": f"engine-{engine.engine}.yaml, {engine.preset}",
        },
    }
