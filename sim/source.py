"""Who submits requests: traces with fixed arrival times, and clients that wait for their answers.

A source knows the simulated clock and nothing of replicas: it hands requests to `submit`, and hears of finished ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
from simpy import Event

from sim.clock import Clock
from sim.request import Request

Submit = Callable[[Request], None]
CHUNK = 65_536
"""Rows that become Python numbers at a time: a long trace stays in its arrays."""


class Source(Protocol):
    """Where requests come from: `start` is a SimPy process, `on_finish` hears of each request done or rejected."""

    total: int

    def start(self, clock: Clock, submit: Submit) -> Generator[Event, None, None]:
        """Submit requests at their times."""
        ...

    def on_finish(self, request: Request, now: float) -> None:
        """`request` is done at `now` (seconds); a source may submit its next one from here."""
        ...


Tokens = npt.NDArray[np.int64]


def _rows(*columns: npt.NDArray[np.generic]) -> Iterator[tuple[float, ...]]:
    for start in range(0, len(columns[0]), CHUNK):
        yield from zip(*(column[start : start + CHUNK].tolist() for column in columns), strict=True)


class OpenLoop:
    """Requests at given times, whatever the replicas do.

    `arrival_s` float64[n], ascending; `prompt_tokens`, `output_tokens`, `max_tokens` int64[n].
    """

    def __init__(
        self, arrival_s: npt.NDArray[np.float64], prompt_tokens: Tokens, output_tokens: Tokens, max_tokens: Tokens
    ) -> None:
        self.total = len(arrival_s)
        self._columns = (arrival_s, prompt_tokens, output_tokens, max_tokens)

    def start(self, clock: Clock, submit: Submit) -> Generator[Event, None, None]:
        """One event an arrival time."""
        now = -1.0
        for id, (arrival_s, prompt, output, cap) in enumerate(_rows(*self._columns)):
            if arrival_s != now:
                now = arrival_s
                yield clock.at(now)
            submit(Request(id, now, prompt, output, cap))  # type: ignore[arg-type]

    def on_finish(self, request: Request, now: float) -> None:
        """Nobody waits for the answer."""


class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when its last one is done.

    The first ones arrive at time 0. `prompt_tokens`, `output_tokens`, `max_tokens` int64[n], taken in order.
    """

    def __init__(self, concurrency: int, prompt_tokens: Tokens, output_tokens: Tokens, max_tokens: Tokens) -> None:
        self.total = len(prompt_tokens)
        self._concurrency = concurrency
        self._rows = enumerate(_rows(prompt_tokens, output_tokens, max_tokens))

    def start(self, clock: Clock, submit: Submit) -> Generator[Event, None, None]:
        """The first request of every client."""
        self._submit = submit
        yield clock.at(0.0)
        for _ in range(self._concurrency):
            self._next(0.0)

    def on_finish(self, request: Request, now: float) -> None:
        """The client whose request this was sends its next one."""
        self._next(now)

    def _next(self, now: float) -> None:
        for id, (prompt, output, cap) in self._rows:
            self._submit(Request(id, now, prompt, output, cap))  # type: ignore[arg-type]
            return
