"""Several samples of one prompt: one request to its client, to its engine as many requests as samples.

As in vLLM, whose front end makes them (`ParentRequest` in `v1/engine/parallel_sampling.py`; in 0.6
`ParallelSampleSequenceGroup` in `sequence.py`): they enter the engine together, each with its own place and KV, and
have in common what a prefix cache finds. The request is over when the last of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sim.request import Request
from sim.steplog import CANCELLED, UNFINISHED

if TYPE_CHECKING:
    from sim.prefixcache import Path
    from sim.source import Tokens

STRIDE = 2**40
"""Sample k of request i is number i + k x STRIDE: a number of its own, which is the request's for the first."""
PROMPTS = 2**60
"""PROMPTS + i is the content of what only the samples of request i have in common; those of a trace are below."""


class Samples:
    """The samples of `request`, all of its length, and what becomes of it."""

    __slots__ = ("_told", "_waiting_for", "all", "request", "tokens")

    def __init__(self, request: Request) -> None:
        r = self.request = request
        self.all = [
            Request(r.id + k * STRIDE, r.arrival_s, r.prompt_tokens, r.output_tokens, r.max_tokens, r.priority)
            for k in range(r.samples)
        ]
        for sample in self.all:
            sample.entered_s = r.entered_s
            sample.of = self
        r.of = self
        self._waiting_for = self._told = r.samples
        self.tokens = 0
        """What the client has of those that are over."""

    @property
    def begun(self) -> bool:
        """The client has a token of one of them."""
        return any(sample.first_token_s == sample.first_token_s for sample in self.all)

    def record(self, sample: Request, tokens: int) -> int:
        """One more sample is over, whose client received so many `tokens`. Returns those of all when it was the last,
        and `request` is over too; else -1."""
        self.tokens += tokens
        self._waiting_for -= 1
        if self._waiting_for:
            return -1
        whole, samples = self.request, self.all
        outcomes = {sample.outcome for sample in samples}
        whole.outcome = next((o for o in (UNFINISHED, CANCELLED) if o in outcomes), samples[0].outcome)
        whole.preemptions = sum(sample.preemptions for sample in samples)
        whole.cached_tokens = sum(sample.cached_tokens for sample in samples)
        whole.read = sum(sample.read for sample in samples)
        if begun := [sample for sample in samples if sample.scheduled_s == sample.scheduled_s]:
            whole.scheduled_s = min(sample.scheduled_s for sample in begun)
        if answered := [sample for sample in begun if sample.first_step >= 0]:
            first = min(answered, key=lambda sample: sample.first_step)
            whole.first_token_s, whole.first_step = first.first_token_s, first.first_step
        if whole.outcome != UNFINISHED:
            last = max(samples, key=lambda sample: sample.last_step)
            whole.last_step = last.last_step if whole.finished else -1
            whole.finish_s = max(sample.finish_s for sample in samples)
        return self.tokens

    def ended(self, sample: Request, now: float, over: Callable[[Request, float], None]) -> None:
        """The client would be told of one more sample that is over; `over` says it once, of the request."""
        self._told -= 1
        if not self._told:
            over(self.request, now)


def shared_prompts(
    paths: Callable[[int], Path] | None, prompt_tokens: Tokens, samples: Tokens, block_size: int
) -> Callable[[int], Path]:
    """What each prompt begins with (`paths`, by the number of a request), and that the samples of one request (int64[n]
    of them) have all of their prompt of `prompt_tokens` (int64[n]) in common."""

    def path(number: int) -> Path:
        number %= STRIDE
        known: Sequence[tuple[int, int]] = () if paths is None else paths(number)
        end = int(prompt_tokens[number]) // block_size
        if samples[number] == 1 or (known and known[-1][1] >= end):
            return known
        return [*known, (PROMPTS + number, end)]

    return path
