"""Which replica gets a request. A router is a function of the replicas that returns a function of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

from sim.replica import Replica
from sim.request import Request

Route = Callable[[Request], Replica]


def round_robin(replicas: Sequence[Replica]) -> Route:
    """One after the other."""
    order = cycle(replicas)
    return lambda request: next(order)


ROUTERS: dict[str, Callable[[Sequence[Replica]], Route]] = {"round-robin": round_robin}
"""Router name -> function."""
