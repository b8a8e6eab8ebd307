"""All replicas behind a router, and the run itself: from the first arrival until nothing is left to do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.cost import StepCost
from calibrate.engine import FrontEndTime
from servecast.errors import ServecastError, one_of
from sim.clock import Clock
from sim.frontend import FrontEnd
from sim.kvcache import KVCache
from sim.replica import Replica
from sim.request import Request
from sim.routers import ROUTERS, Choose, Fleet, Known
from sim.samples import once
from sim.schedulers import Scheduler
from sim.source import Desk, Source
from sim.state import State
from sim.steplog import Log
from sim.windows import ONE, Tables
from workloads.generate import stream

EVENTS_PER_CHECK = 20_000
"""SimPy events between two questions to `keep_going`, and between two looks at the length of the log."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal replicas: how many, and what each is made of. `num_blocks` KV blocks of `block_size` tokens a replica, of
    which `cache` makes its KV cache, for the block `tables` of the model's layers. `weight` of a replica where the
    router goes by weights; `serves`: which of the fleet's models."""

    replicas: int
    scheduler: Scheduler
    cost: StepCost
    num_blocks: int
    block_size: int
    max_model_len: int
    asynchronous: bool
    front_end: FrontEndTime
    cache: Callable[[int, int], KVCache] = KVCache
    tables: Tables = ONE
    weight: float = 1.0
    serves: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests find a replica: the router's name and parameters, how old its knowledge of loads may be (`stale_s`),
    the seed of its draws, and what it can know of requests. `asks` (int64[n]): which model each request asks for; None
    where there is one."""

    router: str = "round-robin"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    stale_s: float = 0.0
    seed: int = 0
    known: Known = field(default_factory=Known)
    asks: npt.NDArray[np.int64] | None = None


class Cluster:
    """One simulation. `run` it once; `log` holds what happened. Replicas are numbered through all pools, in order."""

    def __init__(self, source: Source, pools: Sequence[Pool], routing: Routing = Routing()) -> None:
        self.log = Log()
        self._source = source
        self._clock = Clock()
        self._asks = routing.asks
        self.front_ends: list[FrontEnd] = []
        for pool in pools:
            for _ in range(pool.replicas):
                self.front_ends.append(self._start(pool, len(self.front_ends)))
        served = [pool.serves for pool in pools for _ in range(pool.replicas)]
        weights = [pool.weight for pool in pools for _ in range(pool.replicas)]
        self._fleets: list[tuple[Fleet, Choose]] = []
        self._place = [0] * len(served)  # of each replica, its index in its fleet
        self._served = served
        for model in range(max(served) + 1):
            mine = [i for i, which in enumerate(served) if which == model]
            for place, i in enumerate(mine):
                self._place[i] = place
            fleet = Fleet(
                [self.front_ends[i] for i in mine],
                [weights[i] for i in mine],
                stream(routing.seed, f"router {model}"),
                self._clock,
                routing.known,
                routing.stale_s,
            )
            self._fleets.append((fleet, ROUTERS[routing.router](fleet, **routing.parameters)))

    def _start(self, pool: Pool, index: int) -> FrontEnd:
        state = State(pool.cache(pool.num_blocks, pool.block_size), pool.scheduler.by_priority, pool.tables)
        replica = Replica(
            index,
            self._clock,
            state,
            deepcopy(pool.scheduler),
            pool.cost,
            self.log,
            once(self._over),
            max_model_len=pool.max_model_len,
            asynchronous=pool.asynchronous,
        )
        return FrontEnd(self._clock, replica, self.log, self._over, pool.front_end)

    def run(self, keep_going: Callable[[int, float], bool] = lambda done, now: True) -> bool:
        """Simulate to the end. `keep_going(requests done, simulated seconds)` is asked now and then; False stops early.

        Returns whether the run came to its end. Raises ServecastError when work is left that no replica can start.
        """
        clock = self._clock
        clock.process(self._source.start(clock, Desk(self._submit, self._cancel)))
        requests = self.log.requests
        gc.freeze()  # the workload is there to stay: do not walk it again and again
        try:
            while clock.steps(EVENTS_PER_CHECK):
                self.log.spill()
                if not keep_going(len(requests), clock.now):
                    for front_end in self.front_ends:
                        front_end.record_unfinished(clock.now)
                    return False
        finally:
            gc.unfreeze()
        if len(requests) != self._source.total:
            raise ServecastError(self._stuck())
        return True

    def _submit(self, request: Request) -> None:
        fleet, choose = self._fleets[0 if self._asks is None else int(self._asks[request.id])]
        index = choose(request)
        fleet.placed(index, request)
        fleet.replicas[index].submit(request)

    def _over(self, request: Request, now: float) -> None:
        """`request` is finished, rejected or given up."""
        replica = request.replica
        self._fleets[self._served[replica]][0].over(self._place[replica], request)
        self._source.on_finish(request, now)

    def _cancel(self, request: Request) -> None:
        self.front_ends[request.replica].cancel(request, self._clock.now)

    def _stuck(self) -> str:
        stuck = [front_end.replica for front_end in self.front_ends if front_end.in_flight]
        states = "; ".join(
            f"replica {r.index}: {len(r.state.waiting)} waiting, {len(r.state.running)} running, "
            f"{r.state.kv.free} of {r.state.kv.usable} KV blocks free"
            for r in stuck
        )
        policies = one_of(dict.fromkeys(r.policy for r in stuck))
        done = len(self.log.requests)
        return (
            f"no progress: {policies} plans nothing while work waits, after {done} of {self._source.total} requests "
            f"({states})"
        )
