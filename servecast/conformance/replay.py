"""Our replica in the time of a real engine: requests reach it when they reached the real one, it plans when that one
planned, and its steps are over when the real ones were. What a step costs does not matter then.

`Driven` is the replica. What it asks for plans is a `Feed`, of which there are two: `Ours`, where a policy of ours
plans, and `Theirs`, which does what was recorded. It knows nothing of scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from types import MappingProxyType

from servecast.conformance.plans import OF_ITSELF, Plan, Record
from sim.batch import Batch
from sim.clock import Clock
from sim.kvcache import KVCache
from sim.replica import Replica
from sim.request import Request
from sim.schedulers import Scheduler
from sim.state import State
from sim.steplog import CANCELLED, Log


class EndError(Exception):
    """The record is over."""


class LostError(Exception):
    """The record cannot be what our state says that the engine was in."""


class Feed(Scheduler):
    """A scheduler that makes one plan for each recorded one, with the arrivals and ends that the engine then knew."""

    replica: Driven

    def __init__(self, record: Record, start: int, by_priority: bool) -> None:
        """Begin with plan `start`, before which the engine was idle."""
        self.record, self.next, self._by_priority = record, start, by_priority
        rows = record.requests
        self.requests: dict[int, Request] = {}
        self.arrived = sum(row["plan"] < start for row in rows)
        self.ended = sum(rows[i]["end_plan"] < start for i in record.ends)

    @property
    def by_priority(self) -> bool:
        """As the engine's queue went."""
        return self._by_priority

    def arrival_matters(self, state: State) -> bool:
        """Never asked: every run is one step."""
        return False

    def plan(self, state: State) -> Batch:
        """The batch of the next recorded plan."""
        if self.next == len(self.record.plans):
            raise EndError
        number, rows, order = self.next, self.record.requests, self.record.arrivals
        self.next += 1
        while self.arrived < len(order) and rows[order[self.arrived]]["plan"] <= number:
            index = order[self.arrived]
            self.requests[index] = request = self.record.request(index)
            state.enqueue(request)
            self.arrived += 1
        gone = []
        while self.ended < len(self.record.ends) and rows[self.record.ends[self.ended]]["end_plan"] <= number:
            index = self.record.ends[self.ended]
            ended = self.requests.pop(index, None)
            if ended is not None and rows[index]["status"] not in OF_ITSELF:
                gone.append(ended)
            self.ended += 1
        self.replica.drop(gone)
        return self.decide(state, self.record.plans[number])

    def decide(self, state: State, plan: Plan) -> Batch:
        """Make the plan."""
        raise NotImplementedError


class Ours(Feed):
    """Plans are made by a policy; `seen(state, batch, plan)` is told of each before anything comes of it."""

    def __init__(
        self, record: Record, start: int, policy: Scheduler, seen: Callable[[State, Batch, Plan], None]
    ) -> None:
        super().__init__(record, start, policy.by_priority)
        self._policy, self._seen = policy, seen

    def decide(self, state: State, plan: Plan) -> Batch:
        """What the policy plans."""
        batch = self._policy.plan(state)
        self._seen(state, batch, plan)
        return batch


class Theirs(Feed):
    """Plans are the recorded ones. LostError when they cannot be made from the state."""

    def decide(self, state: State, plan: Plan) -> Batch:
        """What the engine planned."""
        batch = Batch()
        for victim in reversed(plan.preempted or ()):  # the newest first, as it was done
            state.preempt(batch, self._named(victim, state.running.values()))
        for index, tokens, cached in plan.chunks:
            assert index is not None
            self._chunk(state, batch, index, tokens, cached)
        self._decode(state, batch, plan)
        state.kv.free = plan.free_blocks
        waiting = len(state.waiting) + sum(request.over for request in batch.preempted)
        if (len(state.running), waiting) != (plan.running, plan.waiting):
            raise LostError
        return batch

    def _named(self, index: int, among: Iterable[Request]) -> Request:
        for request in among:
            if request.id == index:
                return request
        raise LostError

    def _chunk(self, state: State, batch: Batch, index: int, tokens: int, cached: int) -> None:
        request = self.requests.get(index)
        if request is None or request.over or request.decoding or cached + tokens > request.target:
            raise LostError
        if state.running.get(request.ticket) is request:
            request.computed = cached
        else:
            state.waiting.remove(self._named(index, state.waiting))
            request.ticket, request.computed = state.tickets, cached
            state.running[state.tickets] = state.prefilling[state.tickets] = request
            state.tickets += 1
        state.prefill(batch, request, tokens)

    def _decode(self, state: State, batch: Batch, plan: Plan) -> None:
        """The rest of the batch: all that decode, less those that were left out, which the record tells by sums only.

        A single token that is recomputed looks like a decode there.
        """
        decodes, step = state.decodes, state.decodes.step
        named = {chunk[0] for chunk in plan.chunks}
        singles = [r for r in state.prefilling.values() if r.target - r.computed == 1 and r.id not in named]
        for single in (singles, []) if singles else ([],):
            kv = decodes.kv_tokens + sum(r.computed for r in single)
            skipped = self._skipped(state, decodes.count + len(single) - plan.decodes, kv - plan.kv_tokens)
            if skipped is not None:
                break
        else:
            raise LostError
        if plan.chunks or plan.decodes:
            for request in skipped:
                decodes.skip(request, step)
        for request in single:
            state.prefill(batch, request, 1)
        batch.skipped = skipped
        batch.decodes = plan.decodes - len(single)
        batch.kv_tokens = plan.kv_tokens - sum(r.computed - 1 for r in single)

    def _skipped(self, state: State, count: int, kv_tokens: int) -> list[Request] | None:
        """The `count` decoding requests with `kv_tokens` tokens in KV that were left out: the last ones, or the one
        that it can have been. None when there are none."""
        if count == 0:
            return [] if kv_tokens == 0 else None
        held = {r: r.kv_offset + state.decodes.step for r in state.running.values() if r.decoding}
        last = list(held)[-count:] if 0 < count <= len(held) else []
        if last and sum(held[r] for r in last) == kv_tokens:
            return last
        alone = [[r] for r, tokens in held.items() if tokens == kv_tokens] if count == 1 else []
        return alone[-1] if alone else None


class _NoTime:
    """A step cost of nothing."""

    provenance: Mapping[str, object] = MappingProxyType({})
    swap_block_s = 0.0

    def decode_line(self, decodes: int, kv_tokens: int) -> None:
        return None

    def window_lines(self, decodes: int, seen: object) -> tuple[()]:
        return ()

    def step_s(self, chunks: object, decodes: int, kv_tokens: int, seen: object = ()) -> float:
        return 0.0


class Driven(Replica):
    """A replica that goes from plan to plan of its feed.

    Whether a plan is made before or after the step before it has been processed is what the record says, plan by plan:
    so synchronous and asynchronous engines are driven alike.
    """

    def __init__(self, feed: Feed, kv: KVCache) -> None:
        state = State(kv, feed.by_priority)
        super().__init__(
            0, Clock(), state, feed, _NoTime(), Log(), lambda request, now: None, max_model_len=1, asynchronous=True
        )
        self.feed = feed
        feed.replica = self

    def begin(self) -> None:
        """The next plan, or, while they are empty, plans. EndError when there is none."""
        plans = self.feed.record.plans
        self.start_run(plans[min(self.feed.next, len(plans) - 1)].begin_s)

    def finish(self) -> list[Request]:
        """The step is over, if there is one. Returns the requests that finished."""
        if self.batch is None:
            return []
        plans, after = self.feed.record.plans, self.feed.next
        self._async = after < len(plans) and plans[after].updates < after
        rows = self.feed.record.requests
        return [r for r in self.finish_run() if r.finished and rows[r.id]["status"] in OF_ITSELF]

    def drop(self, requests: list[Request]) -> None:
        """Take requests out that ended from outside, those whose last token is on its way included."""
        for request in requests:
            if not request.over:
                request.outcome = CANCELLED
                self._cancelled.append(request)
            elif request in self._ended:
                self._ended.remove(request)
                self.state.release(request, request.registered(request.computed, self.state.step - 1))
        if self._cancelled:
            self._drop_cancelled(None)

    def twin(self, feed: Feed) -> Driven:
        """A copy of this replica as it stands, which asks `feed` for plans from the next one on."""
        state, mine = self.state, self.feed
        known = [*state.running.values(), *state.waiting, *self._ended, *self.gaps.behind, *mine.requests.values()]
        memo: dict[int, object] = {id(request): copy(request) for request in known}
        memo |= {id(shared): shared for shared in (self._clock, self._log, self._cost)} | {id(mine): feed}
        twin = deepcopy(self, memo)
        for request in known:
            if request.cohort is state.decodes:
                memo[id(request)].cohort = twin.state.decodes  # type: ignore[attr-defined]
        feed.next, feed.arrived, feed.ended, feed.replica = mine.next, mine.arrived, mine.ended, twin
        feed.requests = {index: memo[id(request)] for index, request in mine.requests.items()}  # type: ignore[misc]
        return twin
