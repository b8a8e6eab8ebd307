"""Simulated time: SimPy's environment, plus events at an exact absolute time.

SimPy schedules by delay, and `now + (t - now)` is not always `t`. Arrivals and step ends are given in absolute
seconds and compared with each other, so an event must fire at exactly the time it was asked for. This is the only
place that touches SimPy's event queue.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

import simpy

ARRIVAL = 0
"""Priority of events that bring work: they come before a step end of the very same time, so that the plan made
there sees them."""
STEP_END = 1
"""Priority of step ends and of an idle replica's wake-up."""
GIVE_UP = 2
"""Priority of clients that give up: a token of that very time still reaches them."""
CHANGE = 3
"""Priority of replicas that fail, start or stop: what else happens at that very time is done."""


class At(simpy.Event):
    """An event that is already on its way, like SimPy's Timeout, with the functions to call when it fires."""

    def __init__(self, clock: Clock, calls: list[Callable[[simpy.Event], None]]) -> None:
        self.env = clock
        self.callbacks = calls
        self._value = None
        self._ok = True


class Clock(simpy.Environment):
    """A SimPy environment in seconds."""

    def at(self, time: float) -> At:
        """An event at `time` (seconds, not before now) that brings work; a process yields it."""
        event = At(self, [])
        heappush(self._queue, (time, ARRIVAL, next(self._eid), event))  # type: ignore[misc]
        return event

    def call_at(self, time: float, call: Callable[[simpy.Event], None], priority: int = STEP_END) -> At:
        """Call `call(event)` at `time`, without the cost of a process."""
        event = At(self, [call])
        heappush(self._queue, (time, priority, next(self._eid), event))  # type: ignore[misc]
        return event

    def call_again(self, time: float, event: At, call: Callable[[simpy.Event], None]) -> At:
        """As `call_at`, with an event that has fired and that nothing else holds."""
        event.callbacks = [call]
        heappush(self._queue, (time, STEP_END, next(self._eid), event))  # type: ignore[misc]
        return event

    @property
    def pending(self) -> int:
        """How many events are to come."""
        return len(self._queue)

    def steps(self, events: int) -> bool:
        """Process up to `events` events. False when none is left."""
        step = self.step
        try:
            for _ in range(events):
                step()
        except simpy.core.EmptySchedule:
            return False
        return True
