"""All replicas behind a router, and the run itself: from the first arrival until nothing is left to do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from calibrate.cost import StepCost
from calibrate.engine import FrontEndTime
from servecast.errors import ServecastError
from sim.autoscaler import Autoscaler
from sim.bootstrap import BootstrapDesk
from sim.changes import Changes
from sim.clock import Clock
from sim.direct import Direct
from sim.drafts import Drafting
from sim.frontend import FrontEnd
from sim.gateway import Gateway
from sim.handover import HandOver, Split, SplitDesk
from sim.kvcache import KVCache
from sim.lives import Lives
from sim.lockstep import GroupCost, Lockstep, Rank
from sim.offload import TieredCache
from sim.pipeline import Pipeline, PipelineCost
from sim.pushed import PushDesk
from sim.replica import Replica
from sim.request import Request
from sim.routers import Fleet, Known
from sim.schedulers import Scheduler
from sim.source import Desk, Source
from sim.speculative import SpeculativeDecodes
from sim.split_replicas import SIDES, PushSide
from sim.state import State
from sim.steplog import Log
from sim.stuck import why_stuck
from sim.windows import ONE, Tables
from workloads.generate import stream

EVENTS_PER_CHECK = 20_000
"""SimPy events between two questions to `keep_going`, and between two looks at the length of the log."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal replicas: how many (at most), and what each is made of. `num_blocks` KV blocks of `block_size` tokens a
    replica, of which `cache` makes its KV cache, for the block `tables` of the model's layers. `weight` of a replica
    where the router goes by weights; `serves`: which of the fleet's models; `role`: whether it reads prompts, answers,
    or does both. With a `group` cost so many `ranks` after each other step together; with `stages` a replica is a
    pipeline (`fills_queue`: see there). `drafting`: how its engines speculate, which their `cost` has then."""

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
    role: Literal["unified", "prefill", "decode"] = "unified"
    group: GroupCost | None = None
    ranks: int = 1
    stages: PipelineCost | None = None
    fills_queue: bool = False
    drafting: Drafting | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests find a replica: the router's name and parameters, how old its knowledge of loads may be (`stale_s`),
    the seed of its draws, and what it can know of requests. `asks` (int64[n]): which model each request asks for; None
    where there is one. `split`: how pools that read prompts hand over to those that answer."""

    router: str = "round-robin"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    stale_s: float = 0.0
    seed: int = 0
    known: Known = field(default_factory=Known)
    asks: npt.NDArray[np.int64] | None = None
    split: Split | None = None


class Cluster:
    """One simulation. `run` it once; `log` holds what happened. Replicas are numbered through all pools, in order.
    `changes`: what becomes of them meanwhile; None where nothing does."""

    def __init__(
        self, source: Source, pools: Sequence[Pool], routing: Routing = Routing(), changes: Changes | None = None
    ) -> None:
        self.log = Log()
        self._pools = pools
        self._of = [i for i, pool in enumerate(pools) for _ in range(pool.replicas)]  # each replica's pool
        self._source = source
        self._clock = Clock()
        self._asks = routing.asks
        self._split = routing.split
        self.front_ends: list[FrontEnd] = []
        self._units: list[range] = []  # replicas on their own, or that step together
        for pool in pools:
            for _ in range(pool.replicas // pool.ranks):
                numbers = range(len(self.front_ends), len(self.front_ends) + pool.ranks)
                self._units.append(numbers)
                self.front_ends += self._unit(pool, numbers)
        models = range(1 + max(pool.serves for pool in pools))
        self._desks = [self._desk(pools, routing, model) for model in models]
        self._lives: Lives | None = None
        self._gateway: Gateway | None = None
        self._scalers: list[tuple[Direct | SplitDesk, Autoscaler]] = []
        if changes is not None:
            self._lives = self._live(changes, routing.seed)

    def _live(self, changes: Changes, seed: int) -> Lives:
        """What becomes of the replicas."""

        def renew(numbers: range) -> None:
            for number in numbers:
                self._record_totals(number)
            steps = [self.front_ends[number].replica.state.step for number in numbers]
            made = self._unit(self._pools[self._of[numbers[0]]], numbers)
            self.front_ends[numbers.start : numbers.stop] = made
            for front_end, step in zip(made, steps, strict=True):
                front_end.replica.state.step = step  # steps are numbered on

        desks = [self._desks[self._pools[i].serves] for i in self._of]
        lives = Lives(
            changes, self._clock, self.log, [self._of[unit[0]] for unit in self._units], self._units, self.front_ends,
            desks, renew, self._closed, lambda: len(self.log.requests) < self._source.total, seed,
        )  # fmt: skip
        for desk in self._desks:
            if isinstance(desk, SplitDesk):
                desk.on_free = lives.left
        if changes.limits is not None:
            self._gateway = Gateway(
                changes.limits, self._clock, self.log, self._submit, self._hear, lambda: lives.serving
            )
        for pool, rule in changes.autoscale.items():
            first = self._of.index(pool)
            waiting = partial(desks[first].waiting_for, first)
            self._scalers.append((desks[first], Autoscaler(pool, rule, lives, self.front_ends, waiting)))
        return lives

    def _desk(self, pools: Sequence[Pool], routing: Routing, model: int) -> Direct | SplitDesk:
        """Where requests for a model are handed in."""
        of = self._of

        def direct(role: str, router: str, parameters: Mapping[str, Any]) -> Direct:
            numbers = [n for n, i in enumerate(of) if pools[i].serves == model and pools[i].role == role]
            weights = [pools[of[n]].weight for n in numbers]
            rng = stream(routing.seed, f"router {model}" + f" {role}" * (role != "unified"))
            return Direct(
                self.front_ends,
                numbers,
                lambda mine: Fleet(mine, weights, rng, self._clock, routing.known, routing.stale_s),
                router,
                parameters,
                self.log,
                self._ended,
            )

        split = routing.split
        if split is None or not any(pool.serves == model and pool.role == "prefill" for pool in pools):
            return direct("unified", routing.router, routing.parameters)
        prefill = direct("prefill", routing.router, routing.parameters)
        decode = direct("decode", split.router, split.parameters)
        kind = BootstrapDesk if split.bootstraps else PushDesk if split.layers else SplitDesk
        desk = kind(self._clock, self.log, prefill, decode, split, of)
        for front_end in self.front_ends:
            replica = front_end.replica
            if isinstance(desk, PushDesk) and isinstance(replica, PushSide) and desk.reads(replica.index):
                replica.push = desk.push
        return desk

    def _sort(self, pool: Pool) -> type[Replica]:
        """What a pool's replicas are, where they do not step together."""
        if self._split is not None and self._split.bootstraps:
            return SIDES.get(pool.role, Replica)
        return PushSide if self._split is not None and self._split.layers and pool.role == "prefill" else Replica

    def _unit(self, pool: Pool, numbers: range) -> list[FrontEnd]:
        """New replicas of a pool, which step together if there are several."""
        group = None if pool.group is None else Lockstep(self._clock, pool.group)
        return [self._front_end(pool, number, group) for number in numbers]

    def _front_end(self, pool: Pool, index: int, group: Lockstep | None = None) -> FrontEnd:
        """A new replica of a pool."""
        policy = pool.scheduler
        kv = pool.cache(pool.num_blocks, pool.block_size)
        state = State(kv, policy.by_priority, pool.tables, policy.pulled_first, pool.drafting)
        parts = index, self._clock, state, deepcopy(policy)
        options: dict[str, Any] = {
            "max_model_len": pool.max_model_len, "asynchronous": pool.asynchronous, "on_pull": self._pull
        }  # fmt: skip
        if pool.stages is not None:
            replica: Replica = Pipeline(*parts, pool.stages, self.log, self._ended, fills=pool.fills_queue, **options)
        elif group is None:
            replica = self._sort(pool)(*parts, pool.cost, self.log, self._ended, **options)
        else:
            replica = Rank(group, *parts, self.log, self._ended, **options)
        return FrontEnd(self._clock, replica, self.log, self._ended, pool.front_end)

    def run(self, keep_going: Callable[[int, float], bool] = lambda done, now: True) -> bool:
        """Simulate to the end. `keep_going(requests done, simulated seconds)` is asked now and then; False stops early.

        Returns whether the run came to its end. Raises ServecastError when work is left that no replica can start.
        """
        clock = self._clock
        submit = self._submit if self._gateway is None else self._gateway.submit
        clock.process(self._source.start(clock, Desk(submit, self._cancel)))
        requests = self.log.requests
        gc.freeze()  # the workload is there to stay: do not walk it again and again
        try:
            while clock.steps(EVENTS_PER_CHECK):
                self.log.spill()
                if not keep_going(len(requests), clock.now):
                    for front_end in self.front_ends:
                        front_end.record_unfinished(clock.now)
                    for desk in self._desks:
                        desk.record_unfinished()
                    return False
        finally:
            gc.unfreeze()
            for number in range(len(self.front_ends)):
                self._record_totals(number)
            self._record_tiers()
        if len(requests) != self._source.total:
            replicas = [front_end.replica for front_end in self.front_ends]
            raise ServecastError(why_stuck(replicas, self._desks, len(requests), self._source.total))
        return True

    def _record_totals(self, number: int) -> None:
        replica = self.front_ends[number].replica
        if isinstance(replica, Pipeline):
            replica.record_stages()
        if isinstance(decodes := replica.state.decodes, SpeculativeDecodes):
            self.log.drafted(number, decodes.sequences, decodes.drafted, decodes.accepted)

    def _record_tiers(self) -> None:
        seen: set[int] = set()
        for number, front_end in enumerate(self.front_ends):
            if isinstance(kv := front_end.replica.state.kv, TieredCache):
                for i, tier in enumerate(kv.tiers):
                    if id(tier) not in seen:
                        seen.add(id(tier))
                        self.log.tier(number, i, *kv.did(i))

    def _desk_of(self, request: Request) -> Direct | SplitDesk:
        return self._desks[0 if self._asks is None else int(self._asks[request.id])]

    def _submit(self, request: Request) -> None:
        self._desk_of(request).submit(request)

    def _ended(self, request: Request, now: float) -> None:
        """What a replica had is finished, rejected or given up: a client's request, or a part of one."""
        if request.of is None:
            self._over(request, now)
        else:
            request.of.ended(request, now, self._over)
        if self._lives is not None and self._lives.leaving:
            self._lives.left()

    def _over(self, request: Request, now: float) -> None:
        """A client's request is over."""
        self._desk_of(request).over(request)
        self._closed(request, now)

    def _closed(self, request: Request, now: float) -> None:
        """It had been let in."""
        if self._gateway is not None:
            self._gateway.over()
        self._hear(request, now)

    def _hear(self, request: Request, now: float) -> None:
        """Its client hears of it."""
        for desk, scaler in self._scalers:
            if desk is self._desk_of(request):
                scaler.over(request, now)
        self._source.on_finish(request, now)

    def _cancel(self, request: Request) -> None:
        self._desk_of(request).cancel(request, self._clock.now)

    def _pull(self, request: Request, found: int, now: float) -> None:
        """A decode replica has the blocks for what it pulls."""
        assert isinstance(request.of, HandOver)
        request.of.pull(request, found, now)
