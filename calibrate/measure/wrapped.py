"""What the libraries' wrappers in `attention`, `layers` and `vllm_cpu` have in common: what they give, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from calibrate.measure.kit import Kit

EPS = 1e-6  # of norms


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of (sequences, cached tokens), each sequence with `q` new tokens after them."""

    groups: tuple[tuple[int, int], ...]
    q: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def lengths(self) -> list[int]:
        """Keys of every sequence, the new tokens' included."""
        return [context + self.q for sequences, context in self.groups for _ in range(sequences)]


@dataclass(frozen=True, slots=True)
class Attention:
    """`run(query, cache)`: [tokens, heads, dim] -> the same shape; `caches` are sets of keys and values in the pool."""

    kernel: str
    caches: list[Any]
    run: Callable[[Any, Any], Any]


def pages(kit: Kit, batch: Batch, page: int) -> tuple[int, Any, Any]:
    """How many pages of so many tokens the batch has, those of every sequence in a row, and the lengths."""
    used = [-(-length // page) for length in batch.lengths]
    starts = [0, *accumulate(used)]
    # sequences with fewer pages than the longest repeat their first, which is never read
    rows = [[first + (i if i < mine else 0) for i in range(max(used))] for first, mine in zip(starts, used)]  # noqa: B905
    table = kit.whole([number for row in rows for number in row]).view(len(used), -1)
    return sum(used), table, kit.whole(batch.lengths)


@dataclass(frozen=True, slots=True)
class Rope:
    """Positions of a step's tokens, all positions' cosines and sines side by side (in fp32 and in the activations'
    dtype), and those of the tokens."""

    positions: Any
    exact: Any
    table: Any
    cos: Any
    sin: Any


@dataclass(frozen=True, slots=True)
class Functions:
    """What a layer calls. `add_norm(x, residual, weight)` gives (normed sum, sum); `rope(heads, state)` rotates
    [tokens, heads, dim]; `activate(x)` halves the last axis: silu(gate) * up. They may write to their inputs.
    `library` is a key of `Kit.failed`."""

    kernel: str
    library: str | None
    add_norm: Callable[[Any, Any, Any], tuple[Any, Any]]
    rope: Callable[[Any, Rope], Any]
    activate: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiplications: `bind(weight, bias)`, of [out, in] and [out] or None, gives the call x -> x W^T + bias.
    `library` is a key of `Kit.failed`."""

    kernel: str
    library: str | None
    bind: Callable[..., Callable[[Any], Any]]
