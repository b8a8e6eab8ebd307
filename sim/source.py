"""Who submits requests: traces with fixed arrival times, sessions and clients that wait for their answers.

A source knows the simulated clock and nothing of replicas: it hands requests to a `Desk`, which also takes them back
when a client gives up, and hears of requests that are done, rejected or given up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from simpy import Event

from sim.clients import Clients
from sim.clock import ARRIVAL, Clock
from sim.request import Request

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]
Submit = Callable[[Request], None]
CHUNK = 65_536
"""Rows that become Python numbers at a time: a long trace stays in its arrays."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where clients hand in requests (`submit`), and take them back unanswered (`cancel`)."""

    submit: Submit
    cancel: Submit


class Source(Protocol):
    """Where requests come from.

    `total`: requests that will be submitted in all, as far as is known. `unsent`: those that will not be, since the
    session to which they belong has ended early.
    """

    total: int
    unsent: int

    def start(self, clock: Clock, desk: Desk) -> Generator[Event, None, None]:
        """A SimPy process that submits requests at their times."""
        ...

    def on_finish(self, request: Request, now: float) -> None:
        """`request` is done, rejected or given up at `now` (seconds); a source may submit its next one from here."""
        ...


@dataclass(frozen=True, slots=True)
class Requests:
    """What is to be submitted: n requests as columns of shape (n,).

    `patience_s`, `first_token_s`: seconds after which a client gives up, and does without a first token (inf: never);
    None when none ever does. `retries`: int64[n], how often it then sends the request again, first `backoff_s` later.
    `network_s`: of the way to the gateway and back, half of it each. `hold_s`: how long the KV of each stays for its
    `next_turn` (int64[n], -1: there is none) when it has ended.
    `priority`: int64[n], the least goes first where the scheduler looks at it; None when all are equal.
    `samples`: int64[n] samples of each prompt; None where all ask for one.
    """

    prompt_tokens: Tokens
    output_tokens: Tokens
    max_tokens: Tokens
    patience_s: Floats | None = None
    priority: Tokens | None = None
    samples: Tokens | None = None
    first_token_s: Floats | None = None
    retries: Tokens | None = None
    backoff_s: Floats | None = None
    network_s: Floats | None = None
    hold_s: Floats | None = None
    next_turn: Tokens | None = None

    @property
    def plain(self) -> bool:
        """Nobody gives up, all are where they are sent, and nothing is held for others."""
        return all(each is None for each in (self.patience_s, self.first_token_s, self.network_s, self.hold_s))

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def _rows(*columns: npt.NDArray[np.generic]) -> Iterator[tuple[float, ...]]:
    for start in range(0, len(columns[0]), CHUNK):
        yield from zip(*(column[start : start + CHUNK].tolist() for column in columns), strict=True)


class OpenLoop(Clients):
    """Requests at given times (`arrival_s` float64[n], ascending), whatever the replicas do."""

    def __init__(self, arrival_s: Floats, requests: Requests) -> None:
        super().__init__(requests)
        self._arrival_s = arrival_s

    def start(self, clock: Clock, desk: Desk) -> Generator[Event, None, None]:
        """One event an arrival time."""
        self._open(clock, desk)
        r = self._requests
        hand_in = desk.submit if r.plain else self._hand_in
        now = -1.0
        columns = [self._arrival_s, r.prompt_tokens, r.output_tokens, r.max_tokens]
        if r.priority is not None or r.samples is not None:
            columns.append(np.zeros(len(r), dtype=np.int64) if r.priority is None else r.priority)
        if r.samples is not None:
            columns.append(r.samples)
        for id, (arrival_s, *sent) in enumerate(_rows(*columns)):
            if arrival_s != now:
                now = arrival_s
                yield clock.at(now)
            hand_in(Request(id, now, *sent))  # type: ignore[arg-type]

    def over(self, request: Request, now: float) -> None:
        """Nobody waits for the answer."""


class Sessions(Clients):
    """Requests of which some follow the answers of others: turns of sessions.

    `arrival_s` float64[n]: when those that follow nobody arrive. `previous` int64[n]: the request that each one
    follows, or -1; `joins` (int64[k], int64[k]): which requests wait for whom beside that. `think_s` float64[n]:
    seconds from the last token of the last of these. A session ends with a turn that is rejected or given up; what
    waits for it is never sent.
    """

    def __init__(
        self, arrival_s: Floats, requests: Requests, previous: Tokens, think_s: Floats,
        joins: tuple[Tokens, Tokens] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(requests)
        self._first = np.flatnonzero(previous < 0)
        self._first = self._first[np.argsort(arrival_s[self._first], kind="stable")]
        self._arrival_s = arrival_s
        self._think_s = think_s
        waits = np.flatnonzero(previous >= 0)
        whom = previous[waits]
        if joins is not None:
            waits, whom = np.concatenate([waits, joins[0]]), np.concatenate([whom, joins[1]])
        order = np.lexsort((waits, whom))
        self._next = waits[order]  # who waits for each, at its bounds
        self._bounds = np.searchsorted(whom[order], np.arange(len(requests) + 1))
        self._lacks = np.bincount(waits, minlength=len(requests))  # answers that each still waits for; -1: unsent
        self._heard_s = np.zeros(len(requests))  # the last one so far

    def start(self, clock: Clock, desk: Desk) -> Generator[Event, None, None]:
        """The first turn of every session that no other spawned."""
        self._open(clock, desk)
        now = -1.0
        for id, arrival_s in _rows(self._first, self._arrival_s[self._first]):
            if arrival_s != now:
                now = arrival_s
                yield clock.at(now)
            self._send(int(id), now)

    def over(self, request: Request, now: float) -> None:
        """Think, then send what waits for nobody else."""
        for id in self._waiting(request.id):
            if self._lacks[id] < 0:
                continue
            if not request.finished:
                self._leave_out(id)
                continue
            self._lacks[id] -= 1
            self._heard_s[id] = max(self._heard_s[id], now)
            if not self._lacks[id]:
                self._think(id, float(self._heard_s[id] + self._think_s[id]))

    def _waiting(self, id: int) -> list[int]:
        found: list[int] = self._next[self._bounds[id] : self._bounds[id + 1]].tolist()
        return found

    def _think(self, id: int, at: float) -> None:
        self._clock.call_at(at, lambda _: self._send(id, at), ARRIVAL)

    def _leave_out(self, id: int) -> None:
        """It is not sent, nor is what waits for it."""
        unsent = [id]
        while unsent:
            id = unsent.pop()
            if self._lacks[id] >= 0:
                self._lacks[id] = -1
                self.total -= 1
                self.unsent += 1
                unsent += self._waiting(id)


class ClosedLoop(Clients):
    """`concurrency` clients, each of which sends its next request `think_s` (float64[n], or 0) after its last answer.

    The first ones arrive at time 0; requests are taken in order.
    """

    def __init__(self, concurrency: int, requests: Requests, think_s: Floats | None = None) -> None:
        super().__init__(requests)
        self._concurrency = min(concurrency, len(requests))
        self._think_s = think_s
        self._sent = 0

    def start(self, clock: Clock, desk: Desk) -> Generator[Event, None, None]:
        """The first request of every client."""
        self._open(clock, desk)
        yield clock.at(0.0)
        for _ in range(self._concurrency):
            self._send_next(0.0)

    def over(self, request: Request, now: float) -> None:
        """The client whose request this was sends its next one."""
        if self._sent == len(self._requests):
            return
        if self._think_s is None:
            self._send_next(now)
            return
        at = now + float(self._think_s[self._sent])
        id = self._sent
        self._sent += 1
        self._clock.call_at(at, lambda _: self._send(id, at), ARRIVAL)

    def _send_next(self, now: float) -> None:
        self._sent += 1
        self._later(self._sent - 1, now)
