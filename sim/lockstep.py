"""Data parallel ranks that share experts step together: one clock for all, and a step as long as the slowest takes.

Each rank is an engine with a queue, a scheduler and a KV cache of its own, as in vLLM (`DPEngineCoreProc` of
`v1/engine/core.py`). While any rank has work all of them step, those without compute a token for show, which the cost
prices and no log has. A run of steps goes on as long as every rank's may, on one straight line of durations: it ends
before another rank becomes the slowest. What it costs the ranks to agree on a step is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from simpy import Event

from sim.clock import At, Clock
from sim.quiet import ends_of, quiet_steps
from sim.replica import Replica
from sim.request import Request
from sim.schedulers import Scheduler
from sim.state import State
from sim.steplog import CANCELLED, Log

if TYPE_CHECKING:
    from calibrate.group_cost import RankStep
    from calibrate.reads import Line


class GroupCost(Protocol):
    """What a group's steps take (`calibrate.group_cost`)."""

    def step_s(self, steps: Sequence[RankStep]) -> float:
        """Seconds of a step in which the ranks compute these, one each."""
        ...

    def decode_lines(self, decoding: Sequence[tuple[int, int]]) -> Sequence[Line]:
        """(a, b, floor, upto) for the (decodes, KV tokens) of every rank in a step without chunks, which takes the
        longest of max(floor, a + b x KV tokens) while no rank has more than `upto`."""
        ...


class Lockstep:
    """The clock of a group; its `ranks` add themselves, in order."""

    def __init__(self, clock: Clock, cost: GroupCost) -> None:
        self.ranks: list[Rank] = []
        self._clock = clock
        self._cost = cost
        self._ends_s: Sequence[float] = ()  # of each step of the run in progress; empty while all are idle
        self._wake: At | None = None

    def wake_up(self, now: float) -> None:
        """A rank without work has some now: it joins at the next step."""
        if not self._ends_s:
            if self._wake is None:
                self._wake = self._clock.call_at(now, self._on_wake)
            return
        step = 0
        while self._ends_s[step] < now:
            step += 1
        self.cut(step)

    def cut(self, last: int) -> None:
        """End the run in progress with its step `last`, if it is longer."""
        if last + 1 < len(self._ends_s):
            self._set(self._ends_s[: last + 1])
            self._wake = self._clock.call_at(self._ends_s[-1], self._on_wake)

    def stop(self) -> None:
        """Nothing goes on from here."""
        self._ends_s, self._wake = (), None

    def _set(self, ends_s: Sequence[float]) -> None:
        self._ends_s = ends_s
        for rank in self.ranks:
            if rank.batch is not None:
                rank.runs_until(ends_s)

    def _on_wake(self, event: Event) -> None:
        if event is not self._wake:
            return  # the run was cut short since
        now = self._ends_s[-1] if self._ends_s else self._clock.now
        finished = [(rank, rank.end_run()) for rank in self.ranks]
        busy = [rank.plan_run(now) for rank in self.ranks]
        if any(busy):
            self._set(self._price(now))
            self._wake = self._clock.call_at(self._ends_s[-1], self._on_wake)
        else:
            self._ends_s, self._wake = (), None
        for rank, requests in finished:
            rank.tell(requests, now)

    def _price(self, now: float) -> Sequence[float]:
        """When the steps of the run that was just planned end."""
        ranks, cost = self.ranks, self._cost
        batches = [rank.batch for rank in ranks]
        work = [(b.decodes, b.kv_tokens) if b is not None else (0, 0) for b in batches]
        if any(b is not None and (rank.one_step or b.seen) for rank, b in zip(ranks, batches, strict=True)):
            return (now + cost.step_s([rank.step() for rank in ranks]),)
        lines = cost.decode_lines(work)
        steps = min(quiet_steps(rank.state, b) for rank, b in zip(ranks, batches, strict=True) if b is not None)
        edges = []
        for (decodes, kv_tokens), (base, slope, floor, upto) in zip(work, lines, strict=True):
            if decodes and kv_tokens + (steps - 1) * decodes > upto:
                steps = int((upto - kv_tokens) / decodes) + 1
            edges.append((base + slope * kv_tokens, slope * decodes, base, slope, kv_tokens, decodes))
            edges.append((floor, 0.0, floor, 0.0, 0, 0))
        first_s, rise_s, base, slope, kv_tokens, decodes = max(edges)  # of equal ones the steepest
        for other_s, other_rise_s, *_ in edges:
            if other_rise_s > rise_s and steps > 1:  # until another rank is the slowest
                steps = min(steps, int((first_s - other_s) / (other_rise_s - rise_s)) + 1)
        return ends_of(now, steps, base, slope, kv_tokens, decodes)


class Rank(Replica):
    """One engine of a `group`."""

    def __init__(
        self,
        group: Lockstep,
        index: int,
        clock: Clock,
        state: State,
        scheduler: Scheduler,
        log: Log,
        on_finish: Callable[[Request, float], None],
        **options: Any,
    ) -> None:
        super().__init__(index, clock, state, scheduler, None, log, on_finish, **options)
        self._group = group
        group.ranks.append(self)

    def step(self) -> RankStep:
        """What it computes in the step that was just planned."""
        from calibrate.group_cost import RankStep

        batch = self.batch
        if batch is None:
            return RankStep()
        return RankStep(self.chunks, batch.decodes, batch.kv_tokens, batch.seen)

    def runs_until(self, ends_s: Sequence[float]) -> None:
        """Its steps end then."""
        self._ends_s = ends_s
        self._interruptible = len(ends_s) > 1 and self._scheduler.arrival_matters(self.state)

    def end_run(self) -> list[Request]:
        """The run in progress has ended, if it was in it. Returns the requests that finished."""
        if self.batch is not None:
            return self.finish_run()
        if self._async:
            self._polls.launch()
        return []

    def tell(self, finished: list[Request], now: float) -> None:
        """The clients of these requests hear that they are finished."""
        for request in finished:
            if request.outcome != CANCELLED:
                self._on_finish(request, now)

    def stop(self, now: float) -> list[tuple[Request, int]]:
        """Nothing goes on from here, in no rank of the group; else as `Replica.stop`."""
        self._group.stop()
        return super().stop(now)

    def _wake_up(self, now: float) -> None:
        self._group.wake_up(now)

    def _cut(self, last: int) -> None:
        self._group.cut(last)
