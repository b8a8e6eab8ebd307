"""What the steps of a pipeline cost: each stage's part of them, and handing the activations on to the next stage.

A stage starts a batch when it has it and its own last batch is over; who waits for whom is the simulator's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from calibrate.cost import CompiledCost, compile_cost, local_tokens, lookups, padded_tokens
from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.prices import Prices
from calibrate.reads import Line

HANDED_ON = 2  # hidden states and residual


@dataclass(frozen=True, slots=True)
class StageCost:
    """A `StepCost` of one pipeline stage. `send_tokens_s`: seconds, by a step's tokens, until the next stage has its
    activations, empty for the last stage."""

    cost: CompiledCost
    send_tokens_s: list[float]

    @property
    def provenance(self) -> Mapping[str, object]:
        """Of the cost."""
        return self.cost.provenance

    def step_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds in which the stage is busy with one step; see `StepCost`."""
        return self.cost.step_s(chunks, decodes, kv_tokens, seen)

    def decode_line(self, decodes: int, kv_tokens: int) -> Line:
        """See `StepCost`."""
        return self.cost.decode_line(decodes, kv_tokens)

    def window_lines(self, decodes: int, seen: Sequence[int]) -> list[Line]:
        """See `StepCost`."""
        return self.cost.window_lines(decodes, seen)

    def send_s(self, tokens: int) -> float:
        """Seconds from the end of a step of so many tokens until the next stage can begin it; 0 for the last stage,
        whose sampled tokens reach the engine at once."""
        return self.send_tokens_s[tokens] if self.send_tokens_s else 0.0


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """What batches take that follow each other through the stages; see `sim.pipeline`. `host_s`: seconds of the
    engine's own process, by a batch's sampled sequences."""

    stages: tuple[StageCost, ...]
    host_s: list[float]

    @property
    def depth(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    def stages_s(self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int) -> list[tuple[float, float]]:
        """(seconds of computing, seconds until the next stage has it) of a batch on each stage; see `StepCost`."""
        tokens = decodes + sum(q for q, _ in chunks)
        return [(stage.step_s(chunks, decodes, kv_tokens), stage.send_s(tokens)) for stage in self.stages]


@dataclass(frozen=True, slots=True)
class InSeries:
    """A `StepCost` of stages of which only one works at a time: the step after begins on the first when the last has
    ended. `bubble_s` and `floor_s` (by sampled sequences): what the host adds, and the least that it takes."""

    stages: tuple[StageCost, ...]
    bubble_s: float
    floor_s: list[float]
    swap_block_s: float = 0.0

    @property
    def provenance(self) -> Mapping[str, object]:
        """Of the first stage."""
        return self.stages[0].provenance

    def step_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds of one step; see `StepCost`."""
        if not chunks:
            a, b, floor, _ = self.decode_line(decodes, kv_tokens)
            return max(floor, a + b * kv_tokens)
        tokens = decodes + sum(q for q, _ in chunks)
        seconds = self.bubble_s
        for stage in self.stages:
            seconds += stage.step_s(chunks, decodes, kv_tokens, seen) + stage.send_s(tokens)
        return max(seconds, self.floor_s[decodes + len(chunks)])

    def decode_line(self, decodes: int, kv_tokens: int) -> Line:
        """See `StepCost`. A stage that is bound by the launch of its kernels adds no slope, up to where it is not."""
        base, slope, upto = self.bubble_s, 0.0, float("inf")
        for stage in self.stages:
            a, b, floor, end = stage.decode_line(decodes, kv_tokens)
            if a + b * kv_tokens < floor:
                end = min(end, (floor - a) / b - 1.0 if b else end)
                a, b = floor, 0.0
                end = max(end, kv_tokens)
            base, slope, upto = base + a + stage.send_s(decodes), slope + b, min(upto, end)
        return base, slope, self.floor_s[decodes], upto

    def window_lines(self, decodes: int, seen: Sequence[int]) -> list[Line]:
        """None: models whose layers have windows are not cut into stages here."""
        return []


def pipeline_cost(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> PipelineCost | InSeries:
    """What a pipeline's batches take in this engine: one after the other through all stages, or side by side.

    A synchronous engine's host has every batch, when its last stage has ended, before it is planned anew; that of an
    asynchronous one plans ahead and only bounds how many batches there are. Where several are under way its bubble is
    one of every stage, whose worker has to prepare each batch. Raises `ServecastError` as `compile_cost` does.
    """
    host, samples = engine.host, range(engine.max_num_seqs + 1)
    if engine.pipeline == "serial":
        stages = stage_costs(model, layout, _without_host(engine, 0.0), prices)
        floor = [host.async_base_s + host.async_per_sequence_s * n + host.bubble_s for n in samples]
        return InSeries(stages, host.bubble_s, floor)
    base_s, each_s, bubble_s = host.sync_base_s, host.sync_per_sequence_s, 0.0
    if engine.pipeline == "staggered":
        base_s, each_s, bubble_s = host.async_base_s, host.async_per_sequence_s, host.bubble_s
    stages = stage_costs(model, layout, _without_host(engine, bubble_s), prices)
    return PipelineCost(stages, [base_s + each_s * n for n in samples])


def _without_host(engine: EngineSpec, bubble_s: float) -> EngineSpec:
    """The engine with a host that only launches kernels, and leaves a bubble."""
    free = replace(
        engine.host, sync_base_s=0.0, sync_per_sequence_s=0.0, async_base_s=0.0, async_per_sequence_s=0.0,
        bubble_s=bubble_s,
    )  # fmt: skip
    return replace(engine, host=free)


def stage_costs(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> tuple[StageCost, ...]:
    """The cost of every stage, in order, each with the times of the engine's host. With `pp` 1 it is the one of
    `compile_cost`, which says what is raised."""
    return tuple(
        StageCost(compile_cost(model, layout, engine, prices, stage), send_costs(model, layout, engine, prices, stage))
        for stage in range(layout.pp)
    )


def send_costs(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, stage: int) -> list[float]:
    """Seconds to hand the activations of a step on, by its tokens; empty for the last stage."""
    import numpy as np

    if stage == layout.pp - 1:
        return []
    every = local_tokens(layout, np.arange(engine.max_num_batched_tokens + 1))
    tokens = padded_tokens(engine, every).astype(np.float64)
    seconds = lookups(send_operators(model, layout), layout, engine, prices, {"tokens": tokens}, stage)["tokens"]
    seconds[0] = 0.0
    return list(seconds.tolist())


def send_operators(model: ModelSpec, layout: Parallelism) -> tuple[Operator, ...]:
    """What hands a step's activations on. A GPU sends its share of the tensor parallel group's, which all have, and
    the receiving group puts the shares together (`send_tensor_dict` of vllm/distributed/parallel_state.py)."""
    tp, hidden = layout.tp, model.hidden
    whole = HANDED_ON * hidden * model.dtype_bytes
    send = Operator("activations", "sendrecv", "tokens", HANDED_ON, (hidden // tp,), 0, 0, whole / tp, group="stage")
    if tp == 1:
        return (send,)
    gather = Operator("activations_allgather", "allgather", "tokens", HANDED_ON, (hidden,), 0, 0, whole * (tp - 1) / tp)
    return send, gather
