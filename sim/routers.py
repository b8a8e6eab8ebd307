"""Which replica gets a request. A router is a function of the replicas that returns what submits a request to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

from sim.frontend import FrontEnd
from sim.source import Submit


def round_robin(replicas: Sequence[FrontEnd]) -> Submit:
    """One after the other."""
    if len(replicas) == 1:
        return replicas[0].submit
    order = cycle([replica.submit for replica in replicas])
    return lambda request: next(order)(request)


ROUTERS: dict[str, Callable[[Sequence[FrontEnd]], Submit]] = {"round-robin": round_robin}
"""Router name -> function."""
