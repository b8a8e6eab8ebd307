"""Replicas that start, fail and stop: events at their times, and what becomes of the requests that one had.

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

    def came(self, number: int, now: float) -> None: ...

    def gone(self, number: int) -> None: ...

    def has(self, number: int) -> bool: ...

    def waiting_for(self, number: int) -> int: ...

    def lost(self, number: int, parts: Sequence[tuple[Request, int]], now: float) -> Mapping[Request, int]: ...


class Lives:
    """The replicas `front_ends` of the pools `of` (a replica each), as `changes` has it.

    `desks`: where the requests of each are handed in. `renew(number)` puts a new replica in the place of one that is
    gone. `on_finish(request, now)` hears of requests that have failed; `going()`: there is work left.
    """

    def __init__(
        self,
        changes: Changes,
        clock: Clock,
        log: Log,
        of: Sequence[int],
        front_ends: Sequence[FrontEnd],
        desks: Sequence[Desk],
        renew: Callable[[int], None],
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
        self._numbers = [[n for n, p in enumerate(of) if p == pool] for pool in range(len(changes.initially))]
        self._state = [GONE] * len(of)  # the last of its changes; GONE also before its first one
        self._turn = [0] * len(of)  # how many changes it has had
        self._pending = 0  # things that will happen to replicas of themselves
        self._retries: dict[int, int] = {}  # by a request's number
        self._draws: dict[int, np.random.Generator] = {}
        self.serving = 0
        """How many replicas take requests."""
        self._looks = False  # whether it is about to look who of these has nothing left
        self.leaving: set[int] = set()
        """Replicas that are drained."""
        for pool, numbers in enumerate(self._numbers):
            for place, number in enumerate(numbers):
                if place < changes.initially[pool]:
                    self._enter(number, UP)
                    self._await_failure(number)
                else:
                    desks[number].gone(number)
        for event in changes.events:
            clock.call_at(event.at_s, lambda _, event=event: self._happen(event), CHANGE)  # type: ignore[misc]

    def counted(self, pool: int) -> list[int]:
        """The numbers of the pool's replicas that take requests, or will once they have started or are repaired; those
        that a pool can do without the best first: not ready, or else with a high number."""
        order = {DOWN: 0, START: 1, UP: 2}
        there = [n for n in self._numbers[pool] if self._state[n] in order]
        return sorted(there, key=lambda n: (order[self._state[n]], -n))

    def up(self, pool: int) -> list[int]:
        """The numbers of those that take requests."""
        return [n for n in self._numbers[pool] if self._state[n] == UP]

    def start(self, pool: int, count: int) -> None:
        """Start so many more, as far as the pool can have them."""
        free = [n for n in self._numbers[pool] if self._state[n] == GONE]
        for number in free[:count]:
            self._enter(number, START)
            self._then(number, self._changes.cold_start_s[pool], self._come)

    def drain(self, number: int) -> None:
        """It takes no more requests, and is gone when those that it has are over. One that has not started yet, or has
        failed, is gone at once."""
        if self._state[number] in (START, DOWN):
            self._leave(number)
        elif self._state[number] == UP:
            self._enter(number, DRAIN)
            self._desks[number].gone(number)
            self.leaving.add(number)
            self.left()

    def left(self) -> None:
        """Something is over: drained replicas that have nothing left are gone, once all that happens now has."""
        if self.leaving and not self._looks:
            self._looks = True
            self._clock.call_at(self._clock.now, self._look, CHANGE)

    def _look(self, _: object) -> None:
        self._looks = False
        for number in sorted(self.leaving):
            if not self._desks[number].has(number):
                self.leaving.discard(number)
                self._front_ends[number].stop(self._clock.now)
                self._leave(number)

    def fail(self, number: int, repair_s: float) -> None:
        """It is gone at once, and back after `repair_s`, unless it was to go anyway."""
        state, now = self._state[number], self._clock.now
        if state in (GONE, DOWN):
            return
        desk = self._desks[number]
        if state == UP:
            desk.gone(number)
        self.leaving.discard(number)
        parts = self._front_ends[number].stop(now)
        lost = desk.lost(number, parts, now)
        self._enter(number, DOWN, len(lost))
        self._renew(number)
        if state == DRAIN or repair_s == inf:
            self._state[number] = GONE
        else:
            self._then(number, repair_s, self._come)
        for request, tokens in lost.items():
            self._lose(request, number, tokens)

    def _happen(self, event: Event) -> None:
        if not self._going():
            return
        if event.kind == "start":
            self.start(event.pool, event.count)
        else:
            number = self._numbers[event.pool][event.replica]
            if event.kind == "drain":
                self.drain(number)
            else:
                self.fail(number, event.repair_s)

    def _enter(self, number: int, state: int, requests: int = 0) -> None:
        self.serving += (state == UP) - (self._state[number] == UP)
        self._state[number] = state
        self._turn[number] += 1
        self._log.change(self._clock.now, number, state, requests)

    def _then(self, number: int, after_s: float, call: Callable[[int], None]) -> None:
        """Call `call(number)` after some seconds, if nothing else becomes of it until then."""
        turn = self._turn[number]

        def then(now: float) -> None:
            if self._turn[number] == turn and self.hope():
                call(number)

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
            self._desks[n].waiting_for(n) > 0
            if state in (START, DOWN)
            else self._of[n] in self._changes.failures and state != GONE and self._desks[n].has(n)
            for n, state in enumerate(self._state)
        )

    def _come(self, number: int) -> None:
        self._enter(number, UP)
        self._await_failure(number)
        self._desks[number].came(number, self._clock.now)

    def _leave(self, number: int) -> None:
        self._enter(number, GONE)
        self._renew(number)

    def _await_failure(self, number: int) -> None:
        failures = self._changes.failures.get(self._of[number])
        if failures is not None:
            if number not in self._draws:
                self._draws[number] = stream(self._seed, f"failures {number}")
            after_s = float(self._draws[number].exponential(failures.mtbf_s))
            self._then(number, after_s, lambda number: self.fail(number, failures.repair_s))

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
