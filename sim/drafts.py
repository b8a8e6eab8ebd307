"""Speculative decoding: how many tokens are drafted for a request in each step, and how many of them turn out right.

Both are drawn before a request decodes, from a stream of its own, so that it is known when it ends and runs of steps
stay one event. What drafts cost, and why so many are right, it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workloads.generate import stream

Ints = npt.NDArray[np.int64]
APART = 40
"""A request has so many bits of draws: more than it can use."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How one engine speculates, as vLLM's V1 does.

    tokens: drafted for a sequence in a step. rates: of each position, the share of drafts that is accepted up to and
    with it, as vLLM logs it: within [0, 1], and none above the one before. proposes: the share of steps in which there
    are drafts at all. lookahead: tokens beyond those of a step for which a sequence holds KV blocks, since the draft
    model writes there; `at_admission` also when it is admitted. A sequence holds none beyond `max_model_len` tokens.
    """

    tokens: int
    rates: Sequence[float]
    lookahead: int
    at_admission: bool
    max_model_len: int
    asynchronous: bool
    seed: int = 0
    proposes: float = 1.0
    _rising: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _yields: Ints = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rising", np.array(self.rates[::-1], dtype=np.float64))
        object.__setattr__(self, "_yields", 1 + np.arange(self.tokens, -1, -1))

    @property
    def length(self) -> float:
        """Tokens that a step yields of a sequence on average, where the budget lets all drafts in."""
        return 1 + self.proposes * sum(self.rates)

    def draws(self, request: int, steps: int) -> tuple[Ints, Ints]:
        """int64[steps] each, of the first steps that a request decodes in: tokens drafted, and tokens that the step
        yields, which are the accepted ones and the target's own."""
        rng, begin = _stream(self.seed)
        rng.bit_generator.state = begin
        rng.bit_generator.advance(request << APART)  # type: ignore[attr-defined]
        if self.proposes == 1.0:
            right = self._rising.searchsorted(rng.random(steps), side="right")
            return np.full(steps, self.tokens), self._yields[right]
        draws = rng.random((steps, 2))
        yielded = self._yields[self._rising.searchsorted(draws[:, 0], side="right")]
        there = draws[:, 1] < self.proposes
        return self.tokens * there, np.where(there, yielded, 1)

    def steps(self, request: int, tokens: int) -> int:
        """How many steps a request decodes in until it has so many tokens of them, where it is never preempted and the
        budget lets all drafts in."""
        return int(np.searchsorted(np.cumsum(self.draws(request, tokens)[1]), tokens)) + 1 if tokens else 0

    def ahead(self, tokens: int) -> int:
        """For how many tokens more than `tokens` a request gets blocks that is admitted."""
        return min(self.lookahead, self.max_model_len - tokens) if self.at_admission else 0

    @property
    def slack(self) -> int:
        """The most tokens for which a sequence holds blocks beyond those that it has."""
        return (1 + self.asynchronous) * (1 + self.tokens) + self.lookahead


@lru_cache(maxsize=64)
def _stream(seed: int) -> tuple[np.random.Generator, Mapping[str, Any]]:
    """The stream of a seed, and its beginning. Each request has a part of it: a stream of its own would take longer to
    make than its draws."""
    rng = stream(seed, "drafts")
    return rng, rng.bit_generator.state
