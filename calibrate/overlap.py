"""Steps of data parallel ranks that are computed as two halves: while one half's tokens are on their way to experts or
back, the other one computes. What that takes follows from the order in which work is queued, layer by layer.

vLLM's dual batch overlap: vllm/v1/worker/ubatching.py, `_prepare` and `_finalize` of
vllm/model_executor/layers/fused_moe/modular_kernel.py, deepep_ht.py and deepep_ll.py beside it; who splits:
vllm/v1/worker/dp_utils.py, vllm/v1/worker/gpu/dp_utils.py (0.15.1 to 0.32.0). It knows halves' parts, no kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from calibrate.engine import Overlap
from calibrate.reads import Line

Term = tuple[float, int, int]
"""Seconds, and how many layers' attention of the first and of the second half come to them."""
Schedule = Sequence[tuple[int, Sequence[Term]]]
"""(how often, terms of which the longest counts), one after the other."""
Attention = tuple[float, float, float]
"""(a, b, upto): a half's attention in one layer, `a + b * kv` seconds for up to `upto` KV tokens of both halves."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of half a step, by its tokens on each rank: `outside` of layers with experts, and of one such layer
    `before` the experts (attention kernels apart), of its `shared` experts, `there`, `experts` and `back`. Every rank
    has as many tokens. `hooks`: traffic that the GPU's kernels do not wait for before they must (DeepEP for low
    latency)."""

    outside: array[float]
    before: array[float]
    shared: array[float]
    there: array[float]
    experts: array[float]
    back: array[float]
    hooks: bool


@dataclass(frozen=True, slots=True)
class Halves:
    """Steps in halves of a model with `layers` layers with experts and `dense` others. `graph`: the decodes of a rank
    up to which a captured graph has both halves; else the host takes `launch_s` to launch them."""

    rule: Overlap
    layers: int
    dense: int
    mixed: Parts
    decode: Parts
    graph: int
    launch_s: float

    def splits(self, tokens: Sequence[int], prompts: Sequence[bool], most: int) -> bool:
        """Whether ranks with so many tokens, of prompts or not, all compute halves of `most` tokens."""
        rule, least = self.rule, min(tokens)
        if rule.by_least:
            return least >= (rule.prefill_tokens if any(prompts) else rule.decode_tokens)
        wished = all(
            n >= (rule.prefill_tokens if reads else rule.decode_tokens)
            for n, reads in zip(tokens, prompts, strict=True)
        )
        return wished and least > most // 2

    def host_s(self, prompts: bool, least: int, most: int) -> float:
        """Seconds in which the host launches both halves of `most` tokens; `least` are the fewest of a rank."""
        captured = not prompts and most <= self.graph and least > most // 2
        return 0.0 if captured else self.launch_s

    def seconds(self, prompts: bool, most: int, first_s: float, second_s: float) -> float:
        """Seconds of all layers of a step of `most` tokens, whose halves' attention takes so long in one layer."""
        return sum(
            times * max(seconds + first * first_s + second * second_s for seconds, first, second in terms)
            for times, terms in self._schedule(prompts, most)
        )

    def line(self, most: int, kv_tokens: float, first: Attention, second: Attention) -> Line:
        """The same of a step of decodes, as a line in its KV tokens from `kv_tokens` on, without a floor."""
        base = slope = 0.0
        upto = min(first[2], second[2])
        for times, terms in self._schedule(False, most):
            lines = [(s + i * first[0] + j * second[0], i * first[1] + j * second[1]) for s, i, j in terms]
            a, b = max(lines, key=lambda line: (line[0] + line[1] * kv_tokens, line[1]))
            base, slope = base + times * a, slope + times * b
            for other, rise in lines:
                if rise > b:
                    upto = min(upto, max(kv_tokens, (a - other) / (rise - b)))
        return base, slope, 0.0, upto

    def _schedule(self, prompts: bool, most: int) -> Schedule:
        parts, half = self.mixed if prompts else self.decode, -(-most // 2)
        outside, before, shared = parts.outside[half], parts.before[half], parts.shared[half]
        there, experts, back = parts.there[half], parts.experts[half], parts.back[half]
        layers, more, till_first = self.layers, self.layers - 1, 1 + self.dense
        begin = (1, [(outside + before, till_first, 0)])
        if not parts.hooks and self.rule.waits_for_all:
            # the other half's work is queued when tokens are sent, which wait for it
            after = [(shared + back, 0, 0), (2 * back, 0, 0)]
            return [
                begin,
                (1, [(outside + before, 0, till_first)]),
                (layers, [(2 * there + 2 * experts, 0, 0)]),
                (more, [(2 * shared + before, 1, 0), (back + before, 1, 0), *after]),
                (more, [(before, 0, 1)]),
                (1, [(2 * shared, 0, 0), *after]),
            ]
        begin_both = [
            begin,
            (1, [(outside + before, 0, till_first), (there, 0, 0)]),
            (more, [(before, 0, 1), (there, 0, 0)]),
            (layers, [(experts, 0, 0), (there, 0, 0)]),
        ]
        if parts.hooks:  # shared experts come before the other half's experts, which wait for what is on its way
            return [
                *begin_both,
                (layers, [(shared + experts, 0, 0), (back, 0, 0)]),
                (more, [(shared + before, 1, 0), (back, 0, 0)]),
                (1, [(shared, 0, 0), (back, 0, 0)]),
            ]
        after = [(experts + back, 0, 0), (2 * back, 0, 0)]
        return [
            *begin_both,
            (more, [(experts + 2 * shared + before, 1, 0), (back + before, 1, 0), *after]),
            (1, [(experts + 2 * shared, 0, 0), *after]),
        ]


def cut(
    chunks: Sequence[tuple[int, int]], decodes: int, tokens: int
) -> tuple[tuple[list[tuple[int, int]], int], tuple[list[tuple[int, int]], int]]:
    """A batch as its first `tokens` tokens and the rest, each as (chunks, decodes): decodes come first, then the chunks
    in order, of which one may lie in both."""
    early = min(decodes, tokens)
    room = tokens - early
    halves: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    for q, context in chunks:
        part = min(q, room)
        room -= part
        if part:
            halves[0].append((part, context))
        if q > part:
            halves[1].append((q - part, context + part))
    return (halves[0], early), (halves[1], decodes - early)
