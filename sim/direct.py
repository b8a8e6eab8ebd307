"""The plain way to a replica: a router chooses one of a fleet, which then has the request until it is over.

While there is none, requests wait here; the first one that comes back gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.frontend import FrontEnd
from sim.request import Request
from sim.routers import ROUTERS, Fleet
from sim.samples import Samples
from sim.steplog import CANCELLED, UNFINISHED, Log


class Direct:
    """Hands requests to the replicas `numbers` of the cluster's `front_ends`, which are the router's fleet. `on_finish`
    hears of those that are given up before there was a replica for them."""

    def __init__(
        self,
        front_ends: Sequence[FrontEnd],
        numbers: Sequence[int],
        fleet: Callable[[Sequence[FrontEnd]], Fleet],
        router: str,
        parameters: Mapping[str, Any],
        log: Log,
        on_finish: Callable[[Request, float], None],
    ) -> None:
        self._front_ends = front_ends
        self._place = {number: place for place, number in enumerate(numbers)}
        self._numbers = numbers
        self._fleet = fleet([front_ends[number] for number in numbers])
        self._choose = ROUTERS[router](self._fleet, **parameters)
        self._log = log
        self._on_finish = on_finish
        self.waiting: list[Request] = []
        """Requests for which there is no replica now."""

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        if not self._fleet.up:
            self.waiting.append(request)
            return
        self.hand_to(self.choose(request), request)

    def choose(self, request: Request) -> int:
        """The replica that a request is given from now on."""
        place = self._choose(request)
        self._fleet.placed(place, request)
        return self._numbers[place]

    def hand_to(self, number: int, request: Request) -> None:
        """A request that was given to this replica gets there now."""
        self._front_ends[number].submit(request)

    def over(self, request: Request) -> None:
        """One that was submitted here is finished, rejected or given up."""
        if request.replica >= 0:
            self._fleet.over(self._place[request.replica], request)

    def cancel(self, request: Request, now: float) -> None:
        """Its client has given up."""
        if request.replica >= 0:
            self.front_end(request).cancel(request, now)
            return
        self.waiting.remove(request)
        request.outcome = CANCELLED
        request.finish_s = now
        self._log.record(-1, request, 0)
        self._on_finish(request, now)

    def front_end(self, request: Request) -> FrontEnd:
        """Where it is."""
        return self._front_ends[request.replica]

    def __contains__(self, number: int) -> bool:
        """Whether that replica is one of these."""
        return number in self._place

    @property
    def parts(self) -> list[Request]:
        """What its replicas see of the requests that were handed in here, those that are over and not released yet
        among them, and those for which there is none."""
        return [*self.waiting, *(request for n in self._numbers for request in self._front_ends[n].requests)]

    def came(self, numbers: Sequence[int], now: float) -> None:
        """From now on these replicas take requests: first those for which there was none."""
        for number in numbers:
            self._fleet.came(self._place[number], self._front_ends[number])
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            request.entered_s = now
            self.submit(request)

    def gone(self, number: int) -> None:
        """It takes no more."""
        self._fleet.gone(self._place[number])

    def has(self, number: int) -> bool:
        """Whether it has anything left to do."""
        return bool(self._front_ends[number].unfinished)

    def waiting_for(self, number: int) -> int:
        """How many requests there are that it would get, were it there."""
        return len(self.waiting)

    def lost(self, number: int, parts: Sequence[tuple[Request, int]], now: float) -> dict[Request, int]:
        """It has failed, with `parts`, each with the output tokens that it had: the requests that were handed in here,
        and what their clients have of them."""
        found: dict[Request, int] = {}
        for part, tokens in parts:
            samples = part.of if isinstance(part.of, Samples) else None
            request = part if samples is None else samples.request
            if request not in found:
                found[request] = 0 if samples is None else samples.tokens
            found[request] += tokens
        for request in found:
            self.over(request)
        return found

    def withdraw(self, request: Request, now: float) -> int:
        """It is to begin anew elsewhere. Returns the output tokens that it had."""
        if request.replica < 0:
            self.waiting.remove(request)
            request.outcome = CANCELLED
            return 0
        self.over(request)
        return self.front_end(request).withdraw(request, now)

    def record_unfinished(self) -> None:
        """The run is stopped: log the requests for which there is no replica."""
        for request in self.waiting:
            request.outcome = UNFINISHED
            self._log.record(-1, request, 0)
