"""What the steps of a pipeline cost: each stage's part of them, and handing the activations on to the next stage.

A stage starts a batch when it has it and its own last batch is over; who waits for whom is the simulator's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.cost import CompiledCost, compile_cost, lookups, padded_tokens
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


def stage_costs(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices) -> tuple[StageCost, ...]:
    """The cost of every stage, in order. With `pp` 1 it is the one of `compile_cost`, which says what is raised."""
    return tuple(
        StageCost(compile_cost(model, layout, engine, prices, stage), send_costs(model, layout, engine, prices, stage))
        for stage in range(layout.pp)
    )


def send_costs(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, stage: int) -> list[float]:
    """Seconds to hand the activations of a step on, by its tokens; empty for the last stage."""
    import numpy as np

    if stage == layout.pp - 1:
        return []
    tokens = padded_tokens(engine, np.arange(engine.max_num_batched_tokens + 1)).astype(np.float64)
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
