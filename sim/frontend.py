"""What lies between a client and one replica's engine: the API server, which takes requests in one after the other.

It tokenises in order of arrival, and then a request takes a fixed time to reach the engine (HTTP, validation, the way
to the engine's process and the first token's way back, which is put here). Of several samples of one prompt it makes a
request each, once the prompt is tokenised. It knows no engine. What streaming every token costs the server is not in
it.
"""

from __future__ import annotations

from collections.abc import Callable

from calibrate.engine import FrontEndTime
from sim.clock import ARRIVAL, Clock
from sim.replica import Replica
from sim.request import Request
from sim.samples import Samples
from sim.steplog import CANCELLED, UNFINISHED, Log


class FrontEnd:
    """Hands requests on to `replica`."""

    def __init__(
        self, clock: Clock, replica: Replica, log: Log, on_finish: Callable[[Request, float], None], time: FrontEndTime
    ) -> None:
        self.replica = replica
        self._clock = clock
        self._log = log
        self._on_finish = on_finish
        self._time = time
        self._free_s = 0.0  # when everything that has arrived will be tokenised
        self._held: dict[int, Request] = {}

    @property
    def in_flight(self) -> int:
        """Requests that are here, waiting or running."""
        return len(self._held) + self.replica.in_flight

    @property
    def waiting(self) -> int:
        """Requests that are here and have not begun, or wait again."""
        return len(self._held) + self.replica.waiting

    @property
    def kv_used(self) -> float:
        """The share of the replica's KV blocks that are in use now."""
        return self.replica.kv_used

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        time, arrival_s = self._time, request.entered_s
        start = arrival_s if arrival_s > self._free_s else self._free_s
        self._free_s = start + time.prompt_token_s * request.prompt_tokens
        request.replica = self.replica.index
        request.sent_s = arrival_s
        request.entered_s = self._free_s + time.request_s
        if request.entered_s == arrival_s:
            self._enter(request)
            return
        self._held[request.id] = request
        self._clock.call_at(request.entered_s, lambda _: self._pass_on(request), ARRIVAL)

    def cancel(self, request: Request, now: float) -> None:
        """The client of an unfinished request has given up."""
        if self._held.pop(request.id, None) is None:
            for one in (request,) if request.of is None else request.of.all:
                if not one.over:
                    self.replica.cancel(one, now)
            return
        request.outcome = CANCELLED
        request.finish_s = now
        self._log.record(self.replica.index, request, 0)
        self._on_finish(request, now)

    def withdraw(self, request: Request, now: float) -> int:
        """An unfinished request begins anew elsewhere. Returns the output tokens that it had."""
        if self._held.get(request.id) is not request:
            return self.replica.withdraw(request, now)
        del self._held[request.id]
        return 0

    @property
    def requests(self) -> list[Request]:
        """The requests that are here, those that are over and not released yet among them."""
        return [*self._held.values(), *self.replica.requests]

    @property
    def unfinished(self) -> list[Request]:
        """The requests that are here, waiting or running."""
        return [request for request in self.requests if not request.over]

    def stop(self, now: float) -> list[tuple[Request, int]]:
        """Nothing goes on from here. Returns the requests that are lost, each with the output tokens that it had."""
        lost = [(request, 0) for request in self._held.values()]
        self._held.clear()
        return lost + self.replica.stop(now)

    def record_unfinished(self, now: float) -> None:
        """The run is stopped at `now`: log the requests that are here, waiting or running."""
        self.replica.record_unfinished(now)
        for request in self._held.values():
            request.outcome = UNFINISHED
            self._log.record(self.replica.index, request, 0)

    def _pass_on(self, request: Request) -> None:
        if self._held.get(request.id) is request:
            del self._held[request.id]
            self._enter(request)

    def _enter(self, request: Request) -> None:
        """The engine gets the request: all of its samples, if it asks for several."""
        request.queued_s = request.entered_s
        if request.samples == 1:
            self.replica.submit(request)
            return
        for sample in Samples(request).all:
            self.replica.submit(sample)
