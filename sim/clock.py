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


class Clock(simpy.Environment):
    """A SimPy environment in seconds."""

    def at(self, time: float, priority: int = ARRIVAL) -> simpy.Event:
        """An event that fires at `time` (seconds, not before now); a process can yield it."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (time, priority, next(self._eid), event))  # type: ignore[misc]
        return event

    def call_at(self, time: float, call: Callable[[simpy.Event], None], priority: int = STEP_END) -> simpy.Event:
        """Call `call(event)` at `time`, without the cost of a process."""
        event = self.at(time, priority)
        event.callbacks.append(call)
        return event
