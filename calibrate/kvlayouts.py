"""How much of the KV cache's memory holds tokens, by how it is laid out: tensors that grow, space reserved, pages.

Over the decoding of requests of given lengths, every step counting alike. Looks at models whose layers keep every token
(other kinds of layers: kvgroups.py), without sharing between requests; knows neither arrivals nor a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec

Ints = NDArray[np.int64]
PAGES = (16, 128, 512)
"""Tokens of a page that are compared, beside the engine's own."""


@dataclass(frozen=True, slots=True)
class LayoutUse:
    """`held_tokens` of memory a request holds on average over its steps, of which `used_tokens` are tokens it keeps;
    `at_once`: requests that fit on average into the plan's KV cache."""

    name: str
    held_tokens: float
    used_tokens: float
    at_once: float

    @property
    def waste(self) -> float:
        """The share of the held memory without tokens."""
        return 1 - self.used_tokens / self.held_tokens


def compare_layouts(
    plan: MemoryPlan, model: ModelSpec, prompt: Ints, output: Ints, max_tokens: Ints, budget: int | None = None
) -> list[LayoutUse]:
    """The layouts on requests of `prompt`, `output` and at most `max_tokens` tokens, each (n,).

    Concatenated: a tensor for the keys and one for the values of each layer, made anew for every token, with old and
    new one there at once (plain Transformers). Reserved: contiguous, for max_model_len (FasterTransformer), for the
    client's max_tokens, or for the length that the answer will have, which nobody knows. Paged: vLLM. `budget`: with
    pages, keeping that many tokens of a sequence at most, whichever they are (H2O; StreamingLLM with its sinks).
    """
    steps = output.sum()
    # token i of the answer is computed with prompt + i tokens held: sums over i = 1..output
    used = prompt * output + output * (output + 1) // 2
    total = float(used.sum())
    rows = [("concatenated", total * (1 + 1 / (2 * model.layers)), total)]
    rows.append(("reserved for max_model_len", float(steps) * plan.max_model_len, total))
    if (max_tokens > output).any():
        rows.append(("reserved for prompt + max_tokens", float((output * (prompt + max_tokens)).sum()), total))
    rows.append(("reserved for the true length", float((output * (prompt + output)).sum()), total))
    pages = ((size, float(_paged(prompt, output, size).sum())) for size in sorted({*PAGES, plan.block_size}))
    rows += [(f"paged, {size} tokens a block", held, total) for size, held in pages]
    if budget is not None:
        size = plan.block_size
        kept, held = _capped(prompt, output, budget, 1), size * _capped(prompt, output, budget, size)
        rows.append((f"paged, at most {budget:,} tokens kept", float(held.sum()), float(kept.sum())))
    room = plan.kv_bytes / plan.kv_bytes_per_token
    return [LayoutUse(name, held / steps, kept / steps, room * steps / held) for name, held, kept in rows]


def _paged(prompt: Ints, output: Ints, size: int) -> Ints:
    """Tokens of the blocks held, summed over the steps of each request."""
    return size * (_block_sum(prompt + output, size) - _block_sum(prompt, size))


def _block_sum(tokens: Ints, size: int) -> Ints:
    """The sum of ceil(t / size) over t = 1..tokens."""
    whole, rest = np.divmod(tokens, size)
    return np.asarray(size * whole * (whole + 1) // 2 + rest * (whole + 1), np.int64)


def _capped(prompt: Ints, output: Ints, budget: int, size: int) -> Ints:
    """The sum over the steps of the blocks of `size` tokens that the newest min(tokens, budget) take."""
    growing = np.clip(budget - prompt, 0, output)  # steps before the budget is reached
    sums = _block_sum(prompt + growing, size) - _block_sum(prompt, size)
    return np.asarray(sums + (output - growing) * -(-budget // size), np.int64)
