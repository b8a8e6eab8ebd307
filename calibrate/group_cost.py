"""What a step of data parallel ranks costs that share experts: they step together, and the slowest says how long.

Each rank has a batch of its own, or a token for show. A rank's own layers are priced like any engine's
(`CompiledCost`), the experts and the traffic to them by the tokens of all ranks. Rules: vllm/v1/worker/dp_utils.py
(0.32). How ranks agree on a step takes host time that nobody published; it is not in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.cost import CompiledCost, longer_by, lookups, own_cost, padded_tokens
from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operators import step_operators
from calibrate.overlap import Attention, Halves, cut
from calibrate.overlap_parts import halves_of
from calibrate.prices import Prices
from calibrate.reads import Line
from servecast.errors import ServecastError


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank computes in a step, as `StepCost.step_s` takes it; nothing: a token for show."""

    chunks: Sequence[tuple[int, int]] = ()
    decodes: int = 0
    kv_tokens: int = 0
    seen: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return self.decodes + sum(q for q, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Prices steps of `ranks` data parallel ranks; `own` is a rank's without what they do together.

    `shared_s` and `decode_shared_s` are that, by the tokens of all ranks, in steps with prompt chunks on any rank and
    in others; `padded` and `decode_padded` are the tokens that a rank computes for so many, which all ranks are padded
    to where all are at most `graph` and `decode_graph`: there the step runs as a captured graph. `halves`: what steps
    take that are computed as two halves, where there are any.
    """

    own: CompiledCost
    ranks: int
    shared_s: array[float]
    decode_shared_s: array[float]
    padded: array[int]
    decode_padded: array[int]
    graph: int
    decode_graph: int
    halves: Halves | None = None

    @property
    def provenance(self) -> Mapping[str, object]:
        """Of a rank's cost."""
        return self.own.provenance

    def step_s(self, steps: Sequence[RankStep]) -> float:
        """Seconds of a step in which the ranks compute these (one each, at least one of which has work)."""
        own, slowest = self.own, 0.0
        prompts = any(step.chunks for step in steps)
        if (prompts or any(step.seen for step in steps)) and (most := self._split(steps)):
            return max(self._in_halves(step, prompts, most, steps) for step in steps)
        if not prompts:
            lines = self.decode_lines([(step.decodes, step.kv_tokens) for step in steps])
            for step, (a, b, floor, _) in zip(steps, lines, strict=True):
                seconds = a + b * step.kv_tokens
                for reads, seen in zip(own.windows, step.seen, strict=True) if step.seen else ():
                    a, b, _, _ = reads.line(step.decodes, seen)
                    seconds += a + b * seen
                slowest = max(slowest, seconds, floor)
            return slowest
        tokens = [step.tokens or 1 for step in steps]
        most = max(tokens)
        if most <= self.graph:
            tokens, shared = [most] * len(steps), self.shared_s[len(steps) * self.padded[most]]
        else:
            shared = self.shared_s[sum(self.padded[n] for n in tokens)]
        for step, n in zip(steps, tokens, strict=True):
            samples = step.decodes + len(step.chunks)
            attention = own.attention_s(step.chunks, step.decodes, step.kv_tokens, step.seen)
            seconds = own.tokens_s[n] + shared + own.samples_s[samples] + attention + own.after_s[samples]
            slowest = max(slowest, seconds, own.floor_s[samples] + own.launch_s[n])
        return slowest

    def decode_lines(self, decoding: Sequence[tuple[int, int]]) -> list[Line]:
        """(a, b, floor, upto) for the (decodes, KV tokens) of every rank in a step without prompt chunks: it takes the
        longest of `max(floor, a + b * kv)`, as long as no rank has more than `upto` KV tokens.

        While nobody joins or leaves, what a rank has grows by its decodes in every step, so a run of steps is the upper
        edge of so many straight lines. Of a model with windows, those of `window_lines` of `own` come to it.
        """
        own, most = self.own, max(1, *(decodes for decodes, _ in decoding))
        if self.halves and (split := self._split([RankStep((), n, kv_tokens) for n, kv_tokens in decoding])):
            least = min(decodes for decodes, _ in decoding)
            return [self._line_of_halves(decodes, kv_tokens, split, least) for decodes, kv_tokens in decoding]
        if most <= self.decode_graph:
            tokens, shared = [most] * self.ranks, self.decode_shared_s[self.ranks * self.decode_padded[most]]
        else:
            tokens = [max(1, decodes) for decodes, _ in decoding]
            shared = self.decode_shared_s[sum(self.decode_padded[n] for n in tokens)]
        found = []
        for (decodes, kv_tokens), n in zip(decoding, tokens, strict=True):
            base = own.decode_tokens_s[n] + shared + own.samples_s[decodes] + own.after_s[decodes]
            a, b, _, upto = own.decode_line(decodes, kv_tokens)
            found.append((base + a - own.decode_base_s[decodes], b, own.decode_floor_s[n], upto))
        return found

    def _split(self, steps: Sequence[RankStep]) -> int:
        """The tokens that every rank computes in two halves, 0 where the step is not split."""
        if self.halves is None:
            return 0
        tokens = [step.tokens or 1 for step in steps]
        prompts = [bool(step.chunks) for step in steps]
        most = (self.padded if any(prompts) else self.decode_padded)[max(tokens)]
        return most if self.halves.splits(tokens, prompts, most) else 0

    def _in_halves(self, step: RankStep, prompts: bool, most: int, steps: Sequence[RankStep]) -> float:
        """Seconds of a rank's step in halves of `most` tokens."""
        own, halves = self.own, self.halves
        assert halves is not None
        each = []
        for chunks, decodes in cut(step.chunks, step.decodes, most // 2):
            share = decodes / step.decodes if decodes else 0.0
            seen = [int(share * tokens) for tokens in step.seen]
            each.append(own.attention_s(chunks, decodes, int(share * step.kv_tokens), seen))
        layers, samples = halves.layers + halves.dense, step.decodes + len(step.chunks)
        seconds = halves.seconds(prompts, most, each[0] / layers, each[1] / layers)
        floor = own.floor_s[samples] + halves.host_s(prompts, min(step.tokens for step in steps), most)
        return max(seconds + own.samples_s[samples] + own.after_s[samples], floor)

    def _line_of_halves(self, decodes: int, kv_tokens: int, most: int, least: int) -> Line:
        """The same of decodes alone, as a line in a rank's KV tokens."""
        own, halves = self.own, self.halves
        assert halves is not None
        layers, each = halves.layers + halves.dense, list[Attention]()
        for _, n in cut((), decodes, most // 2):
            share = n / decodes
            upto, a, b = next(line for line in own.decode[n] if share * kv_tokens <= line[0])
            each.append((a / layers, b * share / layers, upto / share if n else float("inf")))
        a, b, _, until = halves.line(most, kv_tokens, each[0], each[1])
        floor = own.floor_s[decodes] + halves.host_s(False, least, most)
        return a + own.samples_s[decodes] + own.after_s[decodes], b, floor, until


def group_cost(model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, stage: int = 0) -> GroupCost:
    """The cost of every step of a data parallel group, of one pipeline stage of it.

    Raises `ServecastError` as `compile_cost` does, and for a model without experts, whose ranks need not wait for each
    other.
    """
    import numpy as np

    if model.experts is None:
        raise ServecastError(
            f"dp {layout.dp}: {model.name} has no experts, and ranks that share none step on their own: use replicas"
        )
    own = own_cost(model, layout, engine, prices, stage)
    every = np.arange(engine.max_num_batched_tokens + 1)
    shared, padded = [], []
    for decoding, most in ((False, engine.max_num_batched_tokens), (True, engine.max_num_seqs)):
        spread = layout.all2all(decoding)
        operators = step_operators(model, spread, stage)
        mine = padded_tokens(engine, every, not decoding)
        together = np.arange(layout.dp * int(mine[: most + 1].max()) + 1, dtype=np.float64)
        times = lookups(operators, spread, engine, prices, {"group": together}, stage)["group"]
        if not decoding:
            times *= [longer_by(engine.long_step_factor, tokens / layout.dp) for tokens in together]
        shared.append(array("d", times))
        padded.append(array("q", mine[: most + 1]))
    graphs = engine.graphs
    return GroupCost(
        own=own,
        ranks=layout.dp,
        shared_s=shared[0],
        decode_shared_s=shared[1],
        padded=padded[0],
        decode_padded=padded[1],
        graph=max(graphs.mixed, default=0) if graphs.padded else 0,
        decode_graph=max(graphs.decode, default=0) if graphs.padded else 0,
        halves=halves_of(model, layout, engine, prices, padded) if engine.overlap else None,
    )
