"""The plain way to a replica: a router chooses one of a fleet, which then has the request until it is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sim.frontend import FrontEnd
from sim.request import Request
from sim.routers import ROUTERS, Fleet


class Direct:
    """Hands requests to the replicas `numbers` of the cluster's `front_ends`, which are the router's fleet."""

    def __init__(
        self,
        front_ends: Sequence[FrontEnd],
        numbers: Sequence[int],
        fleet: Callable[[Sequence[FrontEnd]], Fleet],
        router: str,
        parameters: Mapping[str, Any],
    ) -> None:
        self._front_ends = front_ends
        self._numbers = numbers
        self._place = {number: place for place, number in enumerate(numbers)}
        self._fleet = fleet([front_ends[number] for number in numbers])
        self._choose = ROUTERS[router](self._fleet, **parameters)

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        place = self._choose(request)
        self._fleet.placed(place, request)
        self._front_ends[self._numbers[place]].submit(request)

    def over(self, request: Request) -> None:
        """One that was submitted here is finished, rejected or given up."""
        self._fleet.over(self._place[request.replica], request)

    def cancel(self, request: Request, now: float) -> None:
        """Its client has given up."""
        self.front_end(request).cancel(request, now)

    def front_end(self, request: Request) -> FrontEnd:
        """Where it is."""
        return self._front_ends[request.replica]
