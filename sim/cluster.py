"""All replicas behind one router, and the run itself: from the first arrival until nothing is left to do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from calibrate.cost import StepCost
from calibrate.engine import FrontEndTime
from servecast.errors import ServecastError
from sim.clock import Clock
from sim.frontend import FrontEnd
from sim.kvcache import KVCache
from sim.replica import Replica
from sim.request import Request
from sim.routers import ROUTERS
from sim.samples import once
from sim.schedulers import Scheduler
from sim.source import Desk, Source
from sim.state import State
from sim.steplog import Log
from sim.windows import ONE, Tables

EVENTS_PER_CHECK = 20_000
"""SimPy events between two questions to `keep_going`, and between two looks at the length of the log."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal replicas: how many, and what each is made of. `num_blocks` KV blocks of `block_size` tokens a replica, of
    which `cache` makes its KV cache, for the block `tables` of the model's layers."""

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


class Cluster:
    """One simulation. `run` it once; `log` holds what happened."""

    def __init__(self, source: Source, pool: Pool, router: str) -> None:
        self.log = Log()
        self._source = source
        self._policy = str(pool.scheduler)
        self._clock = Clock()
        on_finish = once(source.on_finish)
        replicas = [
            Replica(
                index,
                self._clock,
                State(pool.cache(pool.num_blocks, pool.block_size), pool.scheduler.by_priority, pool.tables),
                deepcopy(pool.scheduler),
                pool.cost,
                self.log,
                on_finish,
                max_model_len=pool.max_model_len,
                asynchronous=pool.asynchronous,
            )
            for index in range(pool.replicas)
        ]
        time = pool.front_end
        self.front_ends = [FrontEnd(self._clock, replica, self.log, source.on_finish, time) for replica in replicas]
        self._submit = ROUTERS[router](self.front_ends)

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

    def _cancel(self, request: Request) -> None:
        self.front_ends[request.replica].cancel(request, self._clock.now)

    def _stuck(self) -> str:
        states = "; ".join(
            f"replica {r.index}: {len(r.state.waiting)} waiting, {len(r.state.running)} running, "
            f"{r.state.kv.free} of {r.state.kv.usable} KV blocks free"
            for r in (front_end.replica for front_end in self.front_ends)
            if r.in_flight
        )
        done = len(self.log.requests)
        return (
            f"no progress: {self._policy} plans nothing while work waits, after {done} of {self._source.total} "
            f"requests ({states})"
        )
