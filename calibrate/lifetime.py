"""The memory of one request from its first chunk to its last token, and how many like it the KV pool takes at once.

The engine's own terms (weights, the reserved pool) do not move; what moves is how much of the pool the request holds,
and the activations of the step that works on it. Prefix caching is not looked at: nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from calibrate.activations import profile_peaks
from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec

POINTS = 500
"""Decode steps that are kept at most: enough for a picture."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A step of the request: `tokens` of it are computed when the step ends, `blocks` are held and `activation_bytes`
    used while it runs. `prefill`: the step works on the prompt."""

    tokens: int
    blocks: int
    activation_bytes: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Life:
    """A request of `prompt` and `output` tokens. `most_blocks` it holds at its fullest; `at_once` like it run to their
    end together, once their prompts are computed; one more, and the pool is full when each has `full_at` output tokens
    (None: before that).

    `last` is the last output token that it can have alone, whatever it wants: where the pool or `max_model_len` ends.
    `end` is the one with which it is over, if the pool lets it: the last that it wants, or where `max_model_len` ends.
    """

    prompt: int
    output: int
    moments: tuple[Moment, ...]
    most_blocks: int
    at_once: int
    full_at: int | None
    last: int
    end: int
    stopped_by: str


def request_life(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, plan: MemoryPlan, prompt: int, output: int
) -> Life:
    """The life of a request of `prompt` + `output` tokens under a plan that starts."""
    usable = plan.usable_blocks
    longest = min(plan.pool.longest(usable, 2 * plan.max_model_len), plan.max_model_len)
    last = max(0, longest - prompt)
    by_length = longest == plan.max_model_len
    end = min(output, last) if by_length else output
    at_once = min(usable // max(_held(plan, prompt, n) for n in _sampled(end)), engine.max_num_seqs) if last else 0
    crowd = at_once + 1
    low, high = 0, end + 1  # the first output token that `crowd` requests cannot all have
    while low < high:
        middle = (low + high) // 2
        fits = max(_held(plan, prompt, n) for n in _sampled(middle)) * crowd <= usable
        low, high = (middle + 1, high) if fits else (low, middle)
    full_at = low - 1 if low > 0 else None
    moments = tuple(_moments(model, layout, engine, plan, prompt, output))
    stopped_by = engine.name_of("max_model_len") if by_length else "the KV pool"
    most = max(moment.blocks for moment in moments)
    return Life(prompt, output, moments, most, at_once, full_at, last, end, stopped_by)


def _moments(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, plan: MemoryPlan, prompt: int, output: int
) -> Iterator[Moment]:
    def activations(tokens: int) -> int:
        step = replace(engine, max_num_batched_tokens=tokens, max_num_seqs=1)
        return profile_peaks(model, layout, step).total

    done = 0
    while done < prompt:
        chunk = min(engine.max_num_batched_tokens, prompt - done)
        blocks = sum(group.held_blocks(done, done + chunk) for group in plan.pool.groups)
        done += chunk
        yield Moment(done, blocks, activations(chunk), True)
    decode = activations(1)
    for n in _sampled(output)[1:]:
        yield Moment(prompt + n, _held(plan, prompt, n), decode, False)


def _held(plan: MemoryPlan, prompt: int, output: int) -> int:
    """Blocks while the step runs that computes output token `output` (0: the prompt's last chunk)."""
    tokens = prompt + output
    return plan.pool.held_blocks(max(0, tokens - 1), tokens)


def _sampled(output: int) -> list[int]:
    """At most POINTS output tokens, the first and the last among them."""
    every = max(1, output // POINTS)
    return sorted({*range(0, output + 1, every), output})
