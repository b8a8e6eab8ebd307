"""Replicas that start, fail and stop: events at their times, and what becomes of the requests that one had.

Engines that step together do all this together: units are replicas on their own, or all of such a group. Of vLLM's
engines, when one dies its client shuts the others down (`monitor_engine_cores` of `v1/engine/core_client.py`).

A replica exists from its start on and takes requests once it has started; one that is drained takes no more, and is
gone when the last one that it has is over. One that fails is gone at once, with all that it has computed: its requests
begin anew, placed by the router once more, up to a number of times. It comes back as a new one, under its number.

Nothing here is asked while nothing happens. What a request does elsewhere, the desk knows to which it was handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol

from sim.changes import Changes, Event
from sim.clock import CHANGE, Clock
from sim.request import Request
from sim.steplog import DOWN, DRAIN, FAILED, GONE, START, UP, Log
from workloads.generate import stream

if TYPE_CHECKING:
    import numpy as np

    from sim.frontend import FrontEnd


class Desk(Protocol):
    """Where the requests of some replicas are handed in: see `sim.direct` and `sim.handover`."""

    def submit(self, request: Request) -> None: ...

    def came(self, numbers: Sequence[int], now: float) -> None: ...

    def gone(self, number: int) -> None: ...

    def has(self, number: int) -> bool: ...

    def waiting_for(self, number: int) -> int: ...

    def lost(self, number: int, parts: Sequence[tuple[Request, int]], now: float) -> Mapping[Request, int]: ...


class Lives:
    """The replicas `front_ends`, as `changes` has it. `units`: the numbers of each one's replicas; `of`: their pools.

    `desks`: where the requests of each replica are handed in. `renew(numbers)` puts new replicas in the place of a unit
    that is gone. `on_finish(request, now)` hears of requests that have failed; `going()`: there is work left.
    """

    def __init__(
        self,
        changes: Changes,
        clock: Clock,
        log: Log,
        of: Sequence[int],
        units: Sequence[range],
        front_ends: Sequence[FrontEnd],
        desks: Sequence[Desk],
        renew: Callable[[range], None],
        on_finish: Callable[[Request, float], None],
        going: Callable[[], bool],
        seed: int,
    ) -> None:
        self._changes = changes
        self._clock = clock
        self._log = log
        self._front_ends = front_ends
        self._desks = desks
        self._renew = renew
        self._on_finish = on_finish
        self._going = going
        self._seed = seed
        self._of = of
        self._units = units
        self._places = [[u for u, p in enumerate(of) if p == pool] for pool in range(len(changes.initially))]
        self._state = [GONE] * len(of)  # the last of its changes; GONE also before its first one
        self._turn = [0] * len(of)  # how many changes it has had
        self._pending = 0  # things that will happen to replicas of themselves
        self._retries: dict[int, int] = {}  # by a request's number
        self._draws: dict[int, np.random.Generator] = {}
        self.serving = 0
        """How many replicas take requests."""
        self._looks = False  # whether it is about to look who of these has nothing left
        self.leaving: set[int] = set()
        """Units that are drained."""
        for pool, places in enumerate(self._places):
            for place, unit in enumerate(places):
                if place < changes.initially[pool]:
                    self._enter(unit, UP)
                    self._await_failure(unit)
                else:
                    self._take_no_more(unit)
        for event in changes.events:
            clock.call_at(event.at_s, lambda _, event=event: self._happen(event), CHANGE)  # type: ignore[misc]

    def counted(self, pool: int) -> list[int]:
        """The pool's units that take requests, or will once they have started or are repaired; those that a pool can do
        without the best first: not ready, or else with a high number."""
        order = {DOWN: 0, START: 1, UP: 2}
        there = [u for u in self._places[pool] if self._state[u] in order]
        return sorted(there, key=lambda u: (order[self._state[u]], -u))

    def up(self, pool: int) -> list[range]:
        """The numbers of the replicas of each unit that takes requests."""
        return [self._units[u] for u in self._places[pool] if self._state[u] == UP]

    def start(self, pool: int, count: int) -> None:
        """Start so many more, as far as the pool can have them."""
        free = [u for u in self._places[pool] if self._state[u] == GONE]
        for unit in free[:count]:
            self._enter(unit, START)
            self._then(unit, self._changes.cold_start_s[pool], self._come)

    def drain(self, unit: int) -> None:
        """It takes no more requests, and is gone when those that it has are over. One that has not started yet, or has
        failed, is gone at once."""
        if self._state[unit] in (START, DOWN):
            self._leave(unit)
        elif self._state[unit] == UP:
            self._enter(unit, DRAIN)
            self._take_no_more(unit)
            self.leaving.add(unit)
            self.left()

    def _take_no_more(self, unit: int) -> None:
        for number in self._units[unit]:
            self._desks[number].gone(number)

    def left(self) -> None:
        """Something is over: drained replicas that have nothing left are gone, once all that happens now has."""
        if self.leaving and not self._looks:
            self._looks = True
            self._clock.call_at(self._clock.now, self._look, CHANGE)

    def _look(self, _: object) -> None:
        self._looks = False
        for unit in sorted(self.leaving):
            if not self._has(unit):
                self.leaving.discard(unit)
                for number in self._units[unit]:
                    self._front_ends[number].stop(self._clock.now)
                self._leave(unit)

    def _has(self, unit: int) -> bool:
        """Whether it has anything left to do."""
        return any(self._desks[number].has(number) for number in self._units[unit])

    def fail(self, unit: int, repair_s: float) -> None:
        """It is gone at once, and back after `repair_s`, unless it was to go anyway."""
        state, now, numbers = self._state[unit], self._clock.now, self._units[unit]
        if state in (GONE, DOWN):
            return
        if state == UP:
            self._take_no_more(unit)
        self.leaving.discard(unit)
        parts = {number: self._front_ends[number].stop(now) for number in numbers}
        lost = {number: self._desks[number].lost(number, parts[number], now) for number in numbers}
        self._enter(unit, DOWN, [len(lost[number]) for number in numbers])
        self._renew(numbers)
        if state == DRAIN or repair_s == inf:
            self._state[unit] = GONE
        else:
            self._then(unit, repair_s, self._come)
        for number, requests in lost.items():
            for request, tokens in requests.items():
                self._lose(request, number, tokens)

    def _happen(self, event: Event) -> None:
        if not self._going():
            return
        if event.kind == "start":
            self.start(event.pool, event.count)
        else:
            unit = self._places[event.pool][event.replica]
            if event.kind == "drain":
                self.drain(unit)
            else:
                self.fail(unit, event.repair_s)

    def _enter(self, unit: int, state: int, requests: Sequence[int] = ()) -> None:
        numbers = self._units[unit]
        self.serving += len(numbers) * ((state == UP) - (self._state[unit] == UP))
        self._state[unit] = state
        self._turn[unit] += 1
        for place, number in enumerate(numbers):
            self._log.change(self._clock.now, number, state, requests[place] if requests else 0)

    def _then(self, unit: int, after_s: float, call: Callable[[int], None]) -> None:
        """Call `call(unit)` after some seconds, if nothing else becomes of it until then."""
        turn = self._turn[unit]

        def then(now: float) -> None:
            if self._turn[unit] == turn and self.hope():
                call(unit)

        self.later(after_s, then)

    def later(self, after_s: float, call: Callable[[float], None]) -> None:
        """Call `call(now)` after some seconds, if there is work left then."""
        self._pending += 1

        def then(_: object) -> None:
            self._pending -= 1
            if self._going():
                call(self._clock.now)

        self._clock.call_at(self._clock.now + after_s, then, CHANGE)

    def hope(self) -> bool:
        """Whether what replicas do by themselves can still change anything. Else they would fail and come back for ever
        in a run in which requests wait for others."""
        if self._clock.pending > self._pending:
            return True
        return any(
            self._desks[numbers[0]].waiting_for(numbers[0]) > 0
            if state in (START, DOWN)
            else self._of[unit] in self._changes.failures and state != GONE and self._has(unit)
            for unit, (numbers, state) in enumerate(zip(self._units, self._state, strict=True))
        )

    def _come(self, unit: int) -> None:
        numbers = self._units[unit]
        self._enter(unit, UP)
        self._await_failure(unit)
        self._desks[numbers[0]].came(numbers, self._clock.now)

    def _leave(self, unit: int) -> None:
        self._enter(unit, GONE)
        self._renew(self._units[unit])

    def _await_failure(self, unit: int) -> None:
        failures = self._changes.failures.get(self._of[unit])
        if failures is not None:
            if unit not in self._draws:
                self._draws[unit] = stream(self._seed, f"failures {self._units[unit][0]}")
            after_s = float(self._draws[unit].exponential(failures.mtbf_s))
            self._then(unit, after_s, lambda unit: self.fail(unit, failures.repair_s))

    def _lose(self, request: Request, number: int, tokens: int) -> None:
        """A request was lost with a replica, whose client had received `tokens`."""
        now, retries = self._clock.now, self._retries.get(request.id, 0)
        self._log.loss(request.id, number, now, tokens)
        request.restart(now)
        if retries < self._changes.retries:
            self._retries[request.id] = retries + 1
            self._desks[number].submit(request)
        else:
            request.outcome = FAILED
            request.finish_s = now
            self._log.record(number, request, tokens)
            self._on_finish(request, now)
