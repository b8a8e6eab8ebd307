"""A quiet run: decode steps in which nothing can change but how much they read, taken as one event.

It ends with a step that finishes a request, or before one that may not find its blocks, whose cost lies on another
line, or from which on a window reads otherwise. Step ends are the sums of step by step, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.batch import Batch
from sim.request import NEVER
from sim.speculative import SpeculativeDecodes
from sim.state import State

if TYPE_CHECKING:
    from calibrate.cost import DraftCost
    from calibrate.reads import Line

LONG_RUN = 32
"""Steps from which numpy computes a run's ends faster than a loop; both give the same sums, bit for bit."""


def quiet_run(state: State, batch: Batch, now: float, line: Line) -> Sequence[float]:
    """When the steps of the run end that begins with `batch` at `now`; `line`: see `calibrate.cost.StepCost`."""
    base, slope, floor, upto = line
    steps = quiet_steps(state, batch)
    decodes, kv_tokens = batch.decodes, batch.kv_tokens
    if kv_tokens + (steps - 1) * decodes > upto:
        steps = int((upto - kv_tokens) / decodes) + 1
    if floor > base + slope * kv_tokens and slope > 0.0:  # one straight line a row: stop where the floor ends
        steps = min(steps, int(((floor - base) / slope - kv_tokens) / decodes) + 1)
    return ends_of(now, steps, base, slope, kv_tokens, decodes, floor)


def ends_of(
    now: float, steps: int, base: float, slope: float, kv_tokens: int, decodes: int, floor: float = 0.0
) -> Sequence[float]:
    """When steps end that begin at `now` and take `base` + `slope` x KV tokens each, or `floor` if that is longer, the
    tokens growing by `decodes` from step to step."""
    if steps < LONG_RUN:
        ends = []
        for _ in range(steps):
            duration = base + slope * kv_tokens
            now += duration if duration > floor else floor
            ends.append(now)
            kv_tokens += decodes
        return ends
    durations = np.maximum(floor, base + slope * (kv_tokens + decodes * np.arange(steps)))
    durations[0] += now
    long_ends: list[float] = np.add.accumulate(durations).tolist()
    return long_ends


def quiet_run_of_windows(state: State, batch: Batch, now: float, lines: tuple[Line, ...]) -> Sequence[float]:
    """As `quiet_run`: a step takes what the first line says of all tokens and, besides, what the others say of those
    that the layers of each window read; the floor of the first is that of the sum."""
    assert state.windows is not None
    steps, floor = quiet_steps(state, batch), lines[0][2]
    parts = []
    first_s = step_s = 0.0
    reads = zip((batch.kv_tokens, *batch.seen), (batch.decodes, *state.windows.growing), lines, strict=True)
    for tokens, more, (base, slope, _, upto) in reads:
        if more and tokens + (steps - 1) * more > upto:
            steps = int((upto - tokens) / more) + 1
        parts.append((base, slope, tokens, more))
        first_s += base + slope * tokens
        step_s += slope * more
    if floor > first_s and step_s > 0.0:
        steps = min(steps, int((floor - first_s) / step_s) + 1)
    if steps < LONG_RUN:
        ends = []
        for i in range(steps):
            duration = 0.0
            for base, slope, tokens, more in parts:
                duration += base + slope * (tokens + more * i)
            now += duration if duration > floor else floor
            ends.append(now)
        return ends
    at = np.arange(steps)
    durations = np.zeros(steps)
    for base, slope, tokens, more in parts:
        durations += base + slope * (tokens + more * at)
    durations = np.maximum(floor, durations)
    durations[0] += now
    long_ends: list[float] = np.add.accumulate(durations).tolist()
    return long_ends


def verified_run(
    state: State, batch: Batch, now: float, cost: DraftCost, chunks: Sequence[tuple[int, int]], one_step: bool
) -> Sequence[float]:
    """As `quiet_run`, of steps that verify drafts; one, if it is to be `one_step`."""
    steps = 1 if one_step else quiet_steps(state, batch)
    if steps == 1:
        decodes, kv_tokens = batch.decodes, batch.kv_tokens
        if batch.padded == len(chunks):  # every sequence has its token and all drafts: kernels cannot tell who decodes
            decodes, kv_tokens, chunks = decodes + len(chunks), kv_tokens + sum(known for _, known in chunks), ()
        return (now + cost.step_s(chunks, decodes, kv_tokens, drafts=batch.drafts),)
    assert isinstance(state.decodes, SpeculativeDecodes)
    found = state.decodes.over(steps)
    durations = cost.verified_s(batch.decodes, found.kv_tokens, found.drafts)
    durations[0] += now
    ends: list[float] = np.add.accumulate(durations).tolist()
    return ends


def quiet_steps(state: State, batch: Batch) -> int:
    """Steps from the planned one on until one finishes a request, the next may lack blocks, or the policy wants to plan
    again."""
    decodes = state.decodes
    steps = min(decodes.next_finish - decodes.step + 1, batch.most_steps)
    if steps > 1:
        free = state.kv.free - batch.spare_blocks
        steps = 1 if free < 0 else 1 + decodes.steps_within(decodes.step + 1, free, steps - 1, bool(state.waiting))
        if batch.untouched_blocks < NEVER and state.windows is not None:
            steps = 1 + state.windows.steps_taking(decodes.step + 1, batch.untouched_blocks, steps - 1)
    return steps
