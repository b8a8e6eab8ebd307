"""Does our scheduler do what the engine did? Replays a record of the engine's steps and compares every plan.

Given only when requests reached the engine's scheduler, when it planned and when its steps were over, our policy plans
each step anew. Compared are chunks with their offsets, decodes, their KV tokens, requests running and waiting, free
blocks, and who was preempted. After a plan that differs our replica is put into the engine's state, so that one
difference is counted once. Where the record does not say enough for that, steps are not compared until the engine is
idle, and counted as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from servecast.conformance.composition import NAMES, Composition, composed, reason, recorded
from servecast.conformance.plans import Plan, Record
from servecast.conformance.replay import Driven, EndError, LostError, Ours, Theirs
from servecast.errors import ServecastError
from sim.batch import Batch
from sim.kvcache import KVCache
from sim.schedulers import Scheduler
from sim.state import State

if TYPE_CHECKING:
    from calibrate.observe.steps import ObservedRun

Cache = Callable[[int, int], KVCache]
"""(blocks, tokens of a block) -> a KV cache."""
FIRST = 5
"""Differences that are kept; all are counted."""
MOST_DIFFERENCES = 2000
"""After so many the rest is not compared: each costs a copy of the replica."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that differs: its number, when it began (seconds of the record), in what, and likely why."""

    step: int
    at_s: float
    fields: tuple[str, ...]
    ours: Composition
    theirs: Composition
    why: str

    def __str__(self) -> str:
        said = [f"{NAMES[f]} {self.theirs.said(f)} (model: {self.ours.said(f)})" for f in self.fields]
        return f"step {self.step:,} at {self.at_s:.3f} s: {', '.join(said)}; {self.why}"


@dataclass(frozen=True, slots=True)
class Conformance:
    """How far engine and model agree: steps of the record, those that were compared, those that agree; in how many each
    part differs; the first that differ; preemptions and finished requests that the model had in common with the
    engine; what was left out and why."""

    steps: int
    compared: int
    agreeing: int
    fields: Mapping[str, int]
    differences: tuple[Difference, ...]
    preemptions: int
    finished: int
    notes: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of the compared steps, those that agree."""
        return self.agreeing / self.compared if self.compared else 0.0

    def text(self) -> str:
        """For a person: the share, in what they differ, the first differences, the notes."""
        if self.agreeing == self.compared == self.steps:
            first = f"Your engine and our model agree on all {self.steps:,} steps"
        else:
            share = min(round(100 * self.share, 1), 99.9) if self.agreeing < self.compared else 100.0
            first = f"Your engine and our model agree on {share:g} % of {self.compared:,} steps"
        lines = [f"{first} ({self.preemptions:,} preemptions, {self.finished:,} requests finished)."]
        if self.fields:
            parts = [f"{NAMES[name]} in {count:,}" for name, count in self.fields.items()]
            lines.append(f"They differ in {self.compared - self.agreeing:,}: {', '.join(parts)}. The first:")
            lines += [f"  {difference}" for difference in self.differences]
        if left := self.steps - self.compared:
            lines.append(f"Not compared: {left:,} steps that follow on a difference.")
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def check_conformance(
    run: ObservedRun, scheduler: Scheduler, num_blocks: int, block_size: int, cache: Cache | None = None
) -> Conformance:
    """Compare `scheduler`, with a KV cache of `num_blocks` blocks of `block_size` tokens, with what was observed.

    `cache` makes that cache where somebody knows what the prompts share, which a record does not say. What it holds
    cannot be corrected after a plan that differs, so steps are compared up to the first of these only.

    Raises ServecastError for runs that our model has no counterpart for: draft tokens, more than two steps in flight
    (pipeline parallelism), pooling models.
    """
    _refuse(run)
    record = Record(run)
    tally = _Tally(record, _comparable_blocks(run) or cache is not None)
    if cache is not None:
        _until_different(record, Driven(Ours(record, 0, scheduler, tally.see), cache(num_blocks, block_size)), tally)
        return tally.result(_notes(run, tally))
    start = 0
    while start < len(record.plans) and tally.differing < MOST_DIFFERENCES:
        start = _follow(record, start, scheduler, num_blocks, block_size, tally)
    return tally.result(_notes(run, tally))


def _until_different(record: Record, ours: Driven, tally: _Tally) -> None:
    """Compare from the first plan to one that differs."""
    with suppress(EndError, _DiffersError):
        while True:
            ours.begin()
            tally.finished += len(ours.finish())


def _follow(record: Record, start: int, scheduler: Scheduler, num_blocks: int, block_size: int, tally: _Tally) -> int:
    """Compare from plan `start`, before which the engine was idle, for as long as it can be followed. Returns the plan
    with which to begin anew."""
    ours = Driven(Ours(record, start, scheduler, tally.see), KVCache(num_blocks, block_size))
    kv = KVCache(num_blocks, block_size)
    theirs = Driven(Theirs(record, start, scheduler.by_priority), kv) if record.named else None
    while tally.differing < MOST_DIFFERENCES:
        differs = False
        try:
            ours.begin()
        except EndError:
            return len(record.plans)
        except _DiffersError:
            differs = True
        try:
            if theirs:
                theirs.begin()
        except EndError:
            return len(record.plans)
        except LostError:
            theirs = None
        if differs:
            if theirs is None:
                return _after_idle(record, ours.feed.next)
            ours = theirs.twin(Ours(record, start, scheduler, tally.see))
        elif theirs is None and record.named:
            theirs = ours.twin(Theirs(record, start, scheduler.by_priority))
        tally.finished += len(ours.finish())
        if theirs:
            theirs.finish()
    return len(record.plans)


def _after_idle(record: Record, start: int) -> int:
    """The first plan from `start` on before which the engine was idle."""
    return next((n + 1 for n in range(start - 1, len(record.plans)) if record.plans[n].idle), len(record.plans))


class _DiffersError(Exception):
    """Our plan differs from theirs."""


@dataclass(slots=True)
class _Tally:
    """What has been compared so far."""

    record: Record
    blocks: bool  # free blocks can be compared
    compared: int = 0
    differing: int = 0
    preemptions: int = 0
    finished: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def see(self, state: State, batch: Batch, plan: Plan) -> None:
        """Compare our plan with theirs. _DiffersError when it is another."""
        self.compared += 1
        theirs, ours = recorded(self.record, plan), composed(self.record, batch, state)
        if not self.blocks:
            ours = ours._replace(free_blocks=theirs.free_blocks)
            state.kv.free = plan.free_blocks
        if theirs.preempted is None:
            ours = ours._replace(preempted=None)
        if ours == theirs:
            self.preemptions += len(batch.preempted)
            return
        self.differing += 1
        fields = ours.differs_in(theirs)
        self.fields.update(fields)
        if len(self.differences) < FIRST:
            why = reason(self.record, plan, ours, theirs, self.blocks)
            self.differences.append(Difference(plan.step, plan.begin_s, fields, ours, theirs, why))
        raise _DiffersError

    def result(self, notes: tuple[str, ...]) -> Conformance:
        """What came of it."""
        return Conformance(
            len(self.record.plans), self.compared, self.compared - self.differing, dict(self.fields.most_common()),
            tuple(self.differences), self.preemptions, self.finished, notes,
        )  # fmt: skip


def _refuse(run: ObservedRun) -> None:
    problems = []
    if drafts := (run.steps["draft_tokens"] > 0).sum():
        problems.append(f"{run.path}: speculative decoding in {drafts:,} steps, which is not modelled")
    if run.most_in_flight > 1:
        problems.append(
            f"{run.path}: up to {run.most_in_flight + 1} steps in flight at once, as with pipeline parallelism, "
            "which is not modelled"
        )
    if pooling := run.requests["kinds"].str.contains("pooling").sum():
        problems.append(f"{run.path}: {pooling:,} requests of a pooling model, which generates nothing: not modelled")
    if problems:
        raise ServecastError(*problems)


def _comparable_blocks(run: ObservedRun) -> bool:
    """Whether blocks are counted as in the model: one group of layers, and none shared."""
    hits = run.steps["prefix_hits"]
    shared = run.facts.get("enable_prefix_caching", False) if hits.null_count() else hits.sum() > 0
    return not shared and run.facts.get("kv_cache_groups", 1) <= 1


def _notes(run: ObservedRun, tally: _Tally) -> tuple[str, ...]:
    notes = list(run.notes)
    if not tally.blocks and (hits := (run.steps["prefix_hits"] > 0).sum()):
        notes.append(
            f"in {hits:,} steps prompts were found in the prefix cache, and nobody knows what they share: they differ"
        )
    if not tally.blocks:
        notes.append("free KV blocks are not compared: blocks are shared, or layers have a pool of their own")
    kinds = Counter(kind for kinds in run.requests["kinds"] for kind in kinds.split())
    notes += [f"{count:,} requests with {kind}, which is not modelled" for kind, count in sorted(kinds.items())]
    if tally.differing >= MOST_DIFFERENCES:
        notes.append(f"the comparison stopped after {MOST_DIFFERENCES:,} differences")
    if not tally.record.named:
        notes.append("the record does not say whose the chunks are: only their sizes and offsets are compared")
    return tuple(notes)
