"""What steps cost that verify drafts and make the next ones: the target's kernels with several tokens a sequence, and
the draft model's.

The target computes a sequence's own token and its drafts at once, and the logits of all. The draft model then runs over
the tokens of the whole step, prompts too, since it has a KV cache of its own to fill; that gives the first draft of
every sequence, and one pass more each of the others, with one token a sequence. An asynchronous engine's host does its
part for them while the GPU works. n-gram lookup has no kernels.

Attention to a sequence's KV is priced as that of so many times the query heads: kernels read a KV head once for all
query rows that meet it, of several heads or several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.cost import CompiledCost, longer_by, own_cost
from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.reads import Line, sum_of_lines
from calibrate.speculation import Draft, draft_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.prices import Prices
    from calibrate.reads import Lines

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Pieces = list[tuple[Floats, Floats, Floats]]


@dataclass(frozen=True, slots=True, eq=False)
class SpeculativeCost:
    """A `StepCost` of an engine that drafts `tokens` tokens a sequence. `plain` is its cost without drafts, `target`
    that of verifying; `draft` has the lines of the first pass, `passes` those of the others.

    A step has at most `budget` tokens, `slots` of which nobody computes for each of its sequences. By its tokens:
    `mixed_s` (with prompts), `verify_s` (of decodes alone, with the logits of all); by sampled positions `positions_s`;
    by sequences `later_s`, what the passes after the first take but for attention, `after_s` and `floor_s` of the host,
    to which `launch_s` adds by tokens. `reads` are the lines of the attention of all passes of steps of decodes alone.
    """

    tokens: int
    budget: int
    slots: int
    plain: CompiledCost
    target: CompiledCost
    draft: CompiledCost | None
    passes: CompiledCost | None
    reads: Lines
    mixed_s: Floats
    verify_s: Floats
    positions_s: Floats
    later_s: Floats
    after_s: Floats
    floor_s: Floats
    launch_s: Floats
    decode_launch_s: Floats
    provenance: Mapping[str, object]
    swap_block_s: float = 0.0

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        decodes: int,
        kv_tokens: int,
        seen: Sequence[int] = (),
        drafts: int = 0,
    ) -> float:
        """Seconds of one step; see `StepCost`. `drafts` are verified in it besides."""
        if not chunks:
            at = decodes + drafts
            a, b = next((a, b) for upto, a, b in self.reads[decodes] if kv_tokens <= upto)
            base, floor = self._besides(decodes)
            return max(self.verify_s.item(at) + base + (a + b * kv_tokens), self.decode_launch_s.item(at) + floor)
        tokens = decodes + drafts + sum(q for q, _ in chunks)
        sequences = decodes + len(chunks)
        attention = self.target.attention_s(chunks, decodes, kv_tokens)
        if self.draft is not None and self.passes is not None:
            attention += self.draft.attention_s(chunks, decodes, kv_tokens)
            held = kv_tokens + sum(q + context for q, context in chunks)
            attention += (self.tokens - 1) * self.passes.attention_s((), sequences, held)
        step = self.mixed_s[tokens] + self.positions_s[sequences + drafts] + self.later_s[sequences] + attention
        floor = self.floor_s[sequences] + self.launch_s[tokens]
        return float(max(step + self.after_s[sequences], floor))

    def verified_s(self, decodes: int, kv_tokens: Ints, drafts: Ints) -> Floats:
        """float64[steps]: seconds of steps without prompts, in which `decodes` sequences with `kv_tokens` tokens in KV
        verify so many `drafts` (int64[steps] each)."""
        at = decodes + drafts
        base, floor = self._besides(decodes)
        attention = _on_line(self.reads[decodes], kv_tokens)
        seconds: Floats = np.maximum(self.verify_s[at] + base + attention, self.decode_launch_s[at] + floor)
        return seconds

    def _besides(self, decodes: int) -> tuple[float, float]:
        """Of a step of decodes alone, what depends on their number: (what is added, the host's least)."""
        return self.later_s.item(decodes) + self.after_s.item(decodes), self.floor_s.item(decodes)

    def slowed(self, factor: float) -> SpeculativeCost:
        """See `CompiledCost`."""
        longer = np.array([longer_by(factor, tokens) for tokens in range(len(self.mixed_s))])
        return replace(
            self,
            plain=self.plain.slowed(factor),
            target=self.target.slowed(factor),
            draft=None if self.draft is None else self.draft.slowed(factor),
            mixed_s=longer * self.mixed_s,
        )

    def decode_line(self, decodes: int, kv_tokens: int) -> Line | None:
        """None: steps are asked for."""

    def window_lines(self, decodes: int, seen: Sequence[int]) -> Sequence[Line]:
        """None: models with windows are not served so."""
        return ()


def speculative_cost(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, plain: CompiledCost
) -> SpeculativeCost:
    """The cost of every step of an engine that speculates; `plain` is what `compile_cost` says of it without
    drafts. Raises
    `ServecastError` as that does, and where it is not known what drafts."""
    assert engine.speculation is not None
    tokens = engine.speculation.tokens
    target = own_cost(model, layout, engine, prices, queries=1 + tokens)
    made = draft_of(model, engine)
    sequences = np.arange(engine.max_num_seqs + 1)
    draft = passes = None
    mixed, decoding = np.array(target.tokens_s), np.array(target.decode_tokens_s)
    launch, decode_launch, floor = (np.array(x) for x in (target.launch_s, target.decode_launch_s, target.floor_s))
    later = np.zeros(len(sequences))
    if made is not None:
        draft = own_cost(made.model, layout, engine, prices, queries=1 + tokens)
        passes = own_cost(made.model, layout, engine, prices)
        fusing, again = _fusing_s(made, layout, prices, np.arange(len(mixed), dtype=np.float64))
        mixed = mixed + draft.tokens_s + fusing
        decoding = decoding + draft.decode_tokens_s + fusing[: len(decoding)]
        once = np.array(passes.samples_s)[sequences]
        each = np.array(passes.decode_tokens_s)[sequences] + again[sequences] + once
        later = once + (tokens - 1) * each
        launch, decode_launch = launch + draft.launch_s, decode_launch + draft.decode_launch_s
        floor = floor + (tokens - 1) * np.array(passes.decode_launch_s)[sequences]
    host_s = engine.host.draft_step_s + tokens * engine.host.draft_pass_s * (made is not None)
    after = np.array(target.after_s) + (0.0 if engine.async_scheduling else host_s)
    reads = [(1, target.decode)]
    if draft is not None and passes is not None:
        reads += [(1, draft.decode), (tokens - 1, passes.decode)]
    positions = np.array(target.samples_s)
    return SpeculativeCost(
        tokens=tokens,
        budget=int(engine.policy["max_num_batched_tokens"]),
        slots=int(engine.policy["draft_slots"]),
        plain=plain,
        target=target,
        draft=draft,
        passes=passes,
        reads=sum_of_lines(reads),
        mixed_s=mixed,
        verify_s=decoding + positions[: len(decoding)],
        positions_s=positions,
        later_s=later,
        after_s=after,
        floor_s=floor + host_s,
        launch_s=launch,
        decode_launch_s=decode_launch,
        provenance=plain.provenance,
        swap_block_s=plain.swap_block_s,
    )


def _fusing_s(draft: Draft, layout: Parallelism, prices: Prices, tokens: Floats) -> tuple[Floats, Floats]:
    """Seconds of what puts hidden states and embeddings together, by tokens: in the first pass, and in each other."""
    hidden, weights = draft.model.hidden, draft.model.plain.weights

    def taken(outputs: int, inputs: int) -> Floats:
        if not outputs or not inputs:
            return np.zeros_like(tokens)
        return np.where(tokens > 0, prices.gemm_s(weights, np.maximum(tokens, 1.0), outputs, inputs), 0.0)

    fused, beside = taken(hidden, draft.fused * hidden), taken(draft.outputs_beside(layout.tp), hidden)
    return fused + beside, beside if draft.beside else fused


def _on_line(pieces: Sequence[tuple[float, float, float]], kv_tokens: Ints) -> Floats:
    """The values of a line in pieces at KV tokens that do not fall."""
    parts: list[NDArray[Any]] = []
    at, last = 0, kv_tokens.item(-1)
    for upto, a, b in pieces:
        if kv_tokens.item(at) > upto:
            continue
        end = len(kv_tokens) if last <= upto else int(kv_tokens.searchsorted(upto, side="right"))
        parts.append(a + b * kv_tokens[at:end])
        at = end
        if at == len(kv_tokens):
            break
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
