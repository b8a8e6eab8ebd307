"""The decoding requests of an engine that speculates, as aggregates: what they compute, yield and take in each step.

A request computes its drafts with its own token, keeps those that are right, and computes on from there. How many that
are is drawn beforehand (`sim.drafts`), so all of it is known when it joins: it is added to the lanes of the steps to
come, and nothing is touched per step.

Blocks are taken before it is known how many drafts are right: synchronous engines need room for all of them beyond what
was right until now; asynchronous ones, which plan while a step is in flight, for all of that one's besides. What was
wrong is overwritten: blocks are not given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.decodes import Decodes
from sim.drafts import Drafting, Ints
from sim.request import Request
from sim.steplog import STEP_COLUMNS

GAIN, OUT, LOAD, TAKE = range(4)
"""Lanes, by step: tokens more in KV after it, tokens that clients get, tokens computed, and blocks taken."""
LANES = 4


(STEP, START_S, END_S, DURATION, READ, OUTPUT, BLOCKS, BLOCKS_END, DRAFTS) = (
    STEP_COLUMNS.index(name)
    for name in ("step", "start_s", "end_s", "first_step_s", "kv_tokens", "output_tokens", "kv_blocks",
                 "kv_blocks_end", "draft_tokens")
)  # fmt: skip
"""Columns of the log that differ within a run of steps."""


class Verified(NamedTuple):
    """int64[steps] each: tokens in KV before each step, tokens drafted in it, tokens that clients get of it, and blocks
    that it takes."""

    kv_tokens: Ints
    drafts: Ints
    out: Ints
    taken: Ints


class Stint:
    """What a request does from when it joins until it leaves: `tokens` in KV before each step (one more entry: after
    the last), tokens computed (`load`) and tokens that have blocks (`held`) in each; `lanes` has them as they are added
    up. In flight when its first step is planned is its prompt, where that is `fresh`, with `padding` drafts beside it,
    or nothing."""

    __slots__ = (
        "blocks", "drawn", "due", "fresh", "held", "joined", "landed", "lanes", "load", "padding", "tokens",
    )  # fmt: skip

    joined: int
    drawn: int  # draws used before
    due: int  # output tokens to come
    fresh: bool
    padding: int
    landed: int  # tokens that a prefix cache knew before
    tokens: Ints
    load: Ints
    held: Ints  # the first entry: before the first step
    blocks: Ints  # of `held`
    lanes: Ints

    def left(self, j: int) -> int:
        """Output tokens to come before its step `j`."""
        return max(self.due - int(self.tokens[j] - self.tokens[0]), 0)


class SpeculativeDecodes(Decodes):
    """As `Decodes`; `finish_step` is the step in which a request's last token is among those that turn out right."""

    __slots__ = ("_drafting", "_first", "_lanes", "_verified", "accepted", "drafted", "sequences")

    def __init__(self, block_size: int, drafting: Drafting) -> None:
        super().__init__(block_size)
        self._drafting = drafting
        self._lanes = np.zeros((LANES, 1024), dtype=np.int64)
        self._first = 1  # the step of their first column
        self._verified: Verified | None = None  # of the steps from the next one on, while they are as they were
        self.sequences = self.drafted = self.accepted = 0
        """What there was in all: sequences in steps that decode, tokens drafted for them, and those accepted."""

    def begin(self, request: Request, left: int) -> None:
        """See `Decodes`."""
        request.due = left
        self.will_finish(request, self.step + self._steps(request, left) - 1)

    def _steps(self, request: Request, left: int) -> int:
        """How many steps yield so many tokens."""
        if not hasattr(request, "drafts"):
            request.drafts = self._drafting.draws(request.id, request.output_tokens + 2)
        if left <= 0:
            return 0
        return int(request.drafts[1][request.drawn :].cumsum().searchsorted(left)) + 1

    def join(self, request: Request, step: int, fresh: bool = True) -> None:
        """See `Decodes`. `fresh`: the step before computes the end of its prompt."""
        request.decoding = True
        request.cohort = self
        stint = request.verified = Stint()
        stint.joined, stint.drawn, stint.due, stint.fresh = step, request.drawn, request.due, fresh
        stint.padding = request.padding if fresh and self._drafting.asynchronous else 0
        stint.landed = request.computed if fresh else request.landed
        self._fill(request, stint)
        self._add(stint, step, 1)
        self.count += 1
        self.kv_tokens += request.computed

    def leave(self, request: Request, step: int, planned: bool = False) -> None:
        """See `Decodes`. Besides: `reach`, the tokens that it holds blocks for, with those of the `planned` step;
        `landed`, those that a prefix cache can know; and `due`, the output tokens to come."""
        stint = request.verified
        j = step - stint.joined
        request.decoding = False
        request.computed = int(stint.tokens[j])
        request.due = stint.left(j)
        request.reach = int(stint.held[j + planned])
        request.landed = self._landed(stint, j, planned)
        request.drawn = stint.drawn + j
        if planned:  # it does not compute in that step: if drafts were dropped there, it will have them again
            del request.drafts
        self._add(stint, step, -1)
        self.count -= 1
        self.kv_tokens -= request.computed

    def skip(self, request: Request, step: int) -> None:
        """See `Decodes`."""
        self.leave(request, step)
        if request.finish_step >= step:
            self.give_up(request)
            self.will_finish(request, request.finish_step + 1)
        self.join(request, step + 1, fresh=False)

    def land(self, request: Request) -> None:
        """Nothing of a decoding request is in flight any more when its next step is planned."""
        self.leave(request, self.step)
        self.join(request, self.step, fresh=False)

    def trim(self, request: Request, tokens: int) -> None:
        """In the step that is planned `request` computes no more than so many tokens: the other drafts are dropped."""
        stint, step = request.verified, self.step
        i = stint.drawn + step - stint.joined
        self._add(stint, step, -1)
        drafted, gains = (each.copy() for each in request.drafts)
        drafted[i], gains[i] = tokens - 1, min(int(gains[i]), tokens)
        request.drafts = drafted, gains
        left = stint.left(step - stint.joined)
        if request.finish_step >= step:
            self.give_up(request)
            self.will_finish(request, step + int(np.searchsorted(np.cumsum(gains[i:]), left)))
        request.reach = int(stint.held[0])
        request.computed = int(stint.tokens[0])
        self._fill(request, stint)
        self._add(stint, step, 1)

    def advance(self, steps: int) -> None:
        """See `Decodes`."""
        lanes = self._columns(self.step, steps)
        gain, _, load, _ = lanes[:, 0].tolist() if steps == 1 else np.add.reduce(lanes, 1).tolist()
        drafted = load - steps * self.count
        self.sequences += steps * self.count
        self.drafted += drafted
        self.accepted += gain - steps * self.count
        self.step += steps
        self.kv_tokens += gain
        self._verified = None

    def left_out(self, requests: list[Request]) -> None:
        """See `Decodes`: their lanes begin after that step."""

    def held_tokens(self, request: Request, step: int) -> int:
        """See `Decodes`."""
        return int(request.verified.tokens[step - request.verified.joined])

    def left(self, request: Request, step: int) -> int:
        """See `Decodes`."""
        return request.verified.left(step - request.verified.joined)

    def unsure(self, request: Request) -> bool:
        """See `Decodes`: it is, where the last token is a draft."""
        stint = request.verified
        last = request.finish_step - stint.joined
        return last >= 0 and stint.left(last) > 1

    def computes(self, step: int) -> int:
        """See `Decodes`."""
        column = step - self._first
        return int(self._lanes[LOAD, column]) if column < self._lanes.shape[1] else 0

    def load(self, request: Request) -> int:
        """See `Decodes`."""
        stint = request.verified
        return int(stint.load[self.step - stint.joined])

    def need(self, request: Request, tokens: int) -> int:
        """See `Decodes`."""
        stint, drafting = request.verified, self._drafting
        j = self.step - stint.joined
        before = int(stint.tokens[j - 1] + stint.load[j - 1]) if drafting.asynchronous and j else int(stint.tokens[j])
        before += 0 if j else stint.padding
        held = min(before + tokens + drafting.lookahead, drafting.max_model_len)
        return max(-(-held // self.block_size) - int(stint.blocks[j]), 0)

    def demand(self, step: int) -> int:
        """See `Decodes`."""
        column = step - self._first
        return int(self._lanes[TAKE, column]) if column < self._lanes.shape[1] else 0

    def yields(self) -> int:
        """Tokens that clients get of the next step."""
        column = self.step - self._first
        return int(self._lanes[OUT, column]) if column < self._lanes.shape[1] else 0

    def demand_over(self, step: int, steps: int) -> int:
        """See `Decodes`."""
        return int(self._columns(step, steps)[TAKE].sum()) if steps else 0

    def steps_within(self, step: int, blocks: int, limit: int, waiting: bool) -> int:
        """See `Decodes`."""
        taken = self._columns(step, limit)[TAKE].cumsum()
        return int(taken.searchsorted(blocks, side="right"))

    def pad(self, sequences: int) -> None:
        """The end of so many prompts had drafts beside it that nobody made: vLLM counts them as wrong."""
        self.sequences += sequences
        self.drafted += sequences * self._drafting.tokens

    def over(self, steps: int) -> Verified:
        """What happens in so many steps from the next one on."""
        found = self._verified
        if found is None or len(found.out) < steps:
            gain, out, load, take = self._columns(self.step, steps)
            found = self._verified = Verified(self.kv_tokens + gain.cumsum() - gain, load - self.count, out, take)
        return found if len(found.out) == steps else Verified(*(each[:steps] for each in found))

    def _fill(self, request: Request, stint: Stint) -> None:
        """What the request does, from its draws; it has `computed` and `reach` tokens when it joins."""
        drafting = self._drafting
        steps = request.finish_step - stint.joined + 1 + drafting.asynchronous
        drafted, gains = (each[stint.drawn : stint.drawn + steps] for each in request.drafts)
        stint.tokens = tokens = np.empty(steps + 1, dtype=np.int64)
        tokens[0], tokens[1:] = request.computed, gains
        np.add.accumulate(tokens, out=tokens)
        lanes = stint.lanes = np.empty((LANES, steps), dtype=np.int64)
        lanes[GAIN] = lanes[OUT] = gains
        last = request.finish_step - stint.joined
        if last >= 0:
            lanes[OUT, last] = stint.left(last)
        lanes[OUT, last + 1 :] = 0
        stint.load = load = lanes[LOAD]
        np.add(drafted, 1, out=load)
        held = np.empty(steps + 1, dtype=np.int64)
        held[0] = request.reach
        most = held[1:]
        np.add(tokens[:-1], load, out=most)
        most[:1] += stint.padding
        if drafting.asynchronous:
            most[1:] += load[:-1] - gains[:-1]
        most += drafting.lookahead
        np.minimum(most, drafting.max_model_len, out=most)
        stint.held = np.maximum.accumulate(held, out=held)
        stint.blocks = blocks = (held + (self.block_size - 1)) // self.block_size
        np.subtract(blocks[1:], blocks[:-1], out=lanes[TAKE])

    def _landed(self, stint: Stint, j: int, planned: bool) -> int:
        """Of a request that leaves before its step `j`, the tokens that a prefix cache can know: when a step is
        planned, those of which the outcome is known then; in asynchronous engines also when it has ended."""
        if not self._drafting.asynchronous:
            return int(stint.tokens[j]) + 1 if planned else int(stint.tokens[j - 1]) + 1 if j else stint.landed
        if j:
            return int(stint.tokens[j - 1]) + planned
        return int(stint.tokens[0]) + (planned and not stint.fresh)

    def _add(self, stint: Stint, step: int, sign: int) -> None:
        """Add what a stint holds from `step` on to the lanes, or take it out."""
        left = stint.lanes[:, step - stint.joined :]
        self._verified = None
        if left.shape[1]:
            lanes = self._columns(step, left.shape[1])
            (np.add if sign > 0 else np.subtract)(lanes, left, out=lanes)

    def _columns(self, step: int, steps: int) -> npt.NDArray[np.int64]:
        """The lanes of some steps, a view; those before the next step are forgotten now and then."""
        lanes = self._lanes
        start = step - self._first
        if start + steps > lanes.shape[1]:
            old = self.step - self._first
            kept = lanes[:, old:]
            lanes = np.zeros((LANES, max(2 * (start + steps - old), lanes.shape[1])), dtype=np.int64)
            lanes[:, : kept.shape[1]] = kept
            self._lanes, self._first = lanes, self.step
            start = step - self._first
        return lanes[:, start : start + steps]


def single_rows(
    verified: Verified, start_s: float, ends_s: Sequence[float], facts: tuple[int, int, int, int, int, int, int]
) -> bytes:
    """The rows of the log for a run of steps that verify drafts, one for each, since their durations are on no straight
    line. `facts`: replica, first step, decodes, gaps, running and waiting requests, and blocks in use in the first."""
    replica, first, decodes, gaps, running, waiting, blocks = facts
    rows = np.empty((len(ends_s), len(STEP_COLUMNS)))
    columns = rows.T
    rows[:] = replica, 0, 0, 0, 1, 0, 0, 0, decodes, 0, 0, gaps, running, waiting, 0, 0, 0, 0  # as STEP_COLUMNS
    columns[STEP] = np.arange(first, first + len(ends_s))
    columns[END_S] = ends_s
    columns[START_S, 0], columns[START_S, 1:] = start_s, columns[END_S, :-1]
    columns[DURATION] = columns[END_S] - columns[START_S]
    columns[READ], columns[OUTPUT], columns[DRAFTS] = verified.kv_tokens, verified.out, verified.drafts
    columns[BLOCKS] = blocks + verified.taken.cumsum() - verified.taken[0]
    columns[BLOCKS_END] = columns[BLOCKS]
    return rows.tobytes()
