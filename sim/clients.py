"""What clients do with a request: send it over a network, give it up when its time is over, and send it again.

A time limit is one of a try, counted at the gateway: from when the request gets there until its first token or its last
one leaves (a client's own is longer by the round trip). A client that tries again waits, twice as long each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.clock import ARRIVAL, GIVE_UP, Clock
from sim.request import Hold, Request, Trip

if TYPE_CHECKING:
    from sim.source import Desk, Requests


class Clients:
    """What all sources share: the `requests`, the desk, and clients. `over(request, now)` is for the source: its client
    hears at `now` that a request is done, rejected or given up for good."""

    def __init__(self, requests: Requests) -> None:
        self.total = len(requests)
        self.unsent = 0
        self._requests = requests

    def over(self, request: Request, now: float) -> None:
        """What follows."""
        raise NotImplementedError

    def on_finish(self, request: Request, now: float) -> None:
        """`request` is done, rejected or given up at `now`."""
        trip = request.trip
        if trip is None:
            self.over(request, now)
        elif trip.again:
            self._try_again(request, trip, now + trip.network_s / 2)
        else:
            self.over(request, now + trip.network_s / 2)

    def _open(self, clock: Clock, desk: Desk) -> None:
        self._clock = clock
        self._desk = desk

    def _send(self, id: int, now: float) -> None:
        """Submit request `id` at `now`."""
        r = self._requests
        priority = 0 if r.priority is None else int(r.priority[id])
        samples = 1 if r.samples is None else int(r.samples[id])
        prompt, output, cap = int(r.prompt_tokens[id]), int(r.output_tokens[id]), int(r.max_tokens[id])
        self._hand_in(Request(id, now, prompt, output, cap, priority, samples))

    def _later(self, id: int, at: float) -> None:
        """Submit request `id` at `at`, which may be now."""
        if at > self._clock.now:
            self._clock.call_at(at, lambda _: self._send(id, at), ARRIVAL)
        else:
            self._send(id, at)

    def _hand_in(self, request: Request) -> None:
        """Its client sends it now."""
        r = self._requests
        if r.hold_s is not None and r.next_turn is not None and r.next_turn[request.id] >= 0:
            request.hold = Hold(float(r.hold_s[request.id]), int(r.next_turn[request.id]))
        if r.network_s is None and r.retries is None:
            self._arrive(request)
            return
        network_s = 0.0 if r.network_s is None else float(r.network_s[request.id])
        request.trip = Trip(request.arrival_s, network_s)
        self._travel(request, network_s)

    def _travel(self, request: Request, network_s: float) -> None:
        request.arrival_s = request.entered_s = request.arrival_s + network_s / 2
        if network_s:
            self._clock.call_at(request.arrival_s, lambda _: self._arrive(request), ARRIVAL)
        else:
            self._arrive(request)

    def _arrive(self, request: Request) -> None:
        """It gets to the gateway."""
        self._desk.submit(request)
        r, id = self._requests, request.id
        if r.first_token_s is not None and np.isfinite(r.first_token_s[id]):
            at = request.arrival_s + float(r.first_token_s[id])
            self._clock.call_at(at, lambda _: self._give_up(request, first_token=True), GIVE_UP)
        if r.patience_s is not None and np.isfinite(r.patience_s[id]):
            at = request.arrival_s + float(r.patience_s[id])
            self._clock.call_at(at, lambda _: self._give_up(request), GIVE_UP)

    def _give_up(self, request: Request, first_token: bool = False) -> None:
        if request.over or (first_token and request.begun):
            return
        trip = request.trip
        if trip is not None and self._requests.retries is not None:
            trip.again = trip.tries < self._requests.retries[request.id]
        request.late = first_token
        self._desk.cancel(request)

    def _try_again(self, given_up: Request, trip: Trip, heard_s: float) -> None:
        backoff_s = self._requests.backoff_s
        assert backoff_s is not None
        at = heard_s + float(backoff_s[given_up.id]) * 2.0**trip.tries
        request = Request(
            given_up.id, at, given_up.prompt_tokens, given_up.output_tokens, given_up.max_tokens, given_up.priority,
        )  # fmt: skip
        request.hold = given_up.hold
        request.trip = Trip(trip.since_s, trip.network_s, at - trip.since_s, trip.tries + 1)
        self._clock.call_at(at, lambda _: self._travel(request, trip.network_s), ARRIVAL)
