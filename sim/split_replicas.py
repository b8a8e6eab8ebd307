"""Replicas that read, and replicas that answer: what each waits for of the other side.

SGLang's look for what is new before each plan (`Polls`). On the prefill side a prompt waits in the bootstrap queue
until the decode side has its blocks, and its KV is sent with each chunk. On the decode side who has got it joins those
that decode (`disaggregation/{prefill,decode}.py`, 0.5.9); its first token goes out when it joins, in an engine that
plans ahead once the step has ended that is in progress when it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpy import Event

from sim.batch import Batch
from sim.bootstrap import Bootstrapped
from sim.polls import Polls
from sim.pushed import Pushed
from sim.replica import Replica
from sim.request import Request
from sim.schedulers.sglang_split import SglangDecode
from sim.steplog import CANCELLED, LENGTH, STOP


class PrefillSide(Replica):
    """Reads prompts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._polls = Polls(0)
        self._bootstrapping: dict[int, Request] = {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return super().waiting + len(self._bootstrapping)

    @property
    def in_flight(self) -> int:
        """Requests that are waiting or running."""
        return super().in_flight + len(self._bootstrapping)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Whom it has, those among them that are over and not released yet."""
        return (*super().requests, *self._bootstrapping.values())

    def _enter(self, request: Request) -> None:
        self._bootstrapping[request.id] = request
        if _hand_over(request).ready:
            self._polls.ended(request)

    def ready(self, request: Request, now: float) -> None:
        """The decode side has its blocks for `request`."""
        if self._bootstrapping.get(request.id) is request:
            self.transferred(request, now)

    def withdraw(self, request: Request, now: float) -> int:
        """See `Replica`."""
        if self._bootstrapping.get(request.id) is not request:
            return super().withdraw(request, now)
        del self._bootstrapping[request.id]
        request.outcome = CANCELLED
        return 0

    def _hear(self) -> bool:
        """Who is ready takes a place in the queue, in order of arrival; what has moved is needed no more."""
        heard = set(self._polls.hear())
        for request in [each for each in self._bootstrapping.values() if each in heard]:
            del self._bootstrapping[request.id]
            self.state.enqueue(request)
        for request in sorted((each for each in heard if each.finished), key=_ticket):
            self.state.give_back(request)
        return bool(heard)

    def finish_run(self) -> list[Request]:
        """The step in progress has ended: what it has computed can be sent."""
        batch, now = self.batch, self._ends_s[-1]
        assert batch is not None
        finished = super().finish_run()
        for request, tokens, before in batch.chunks:
            if request.kept:  # else it was given up
                _hand_over(request).computed(before + tokens, now)
        return finished


class PushSide(Replica):
    """Reads prompts, and sends their KV layer by layer, as vLLM's P2pNcclConnector does: see `sim.pushed`."""

    push: Callable[[Sequence[Request], float, float], float]
    """Of those whose prompts a step ends, and when it begins and ends: when their KV is there."""

    def start_run(self, now: float) -> bool:
        """See `Replica`. A step is not over before all that it sends has arrived."""
        if not super().start_run(now):
            return False
        assert self.batch is not None
        ended = [r for r, *_ in self.batch.chunks if isinstance(r.of, Pushed) and r.of.goes_on and not r.over
                 and r.computed == r.target]  # fmt: skip
        if ended:
            end_s = self._ends_s[-1]
            self._ends_s = (max(end_s, self.push(ended, now, end_s)),)
        return True


class DecodeSide(Replica):
    """Answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._polls = Polls(0)
        self._now = 0.0  # when the run that is planned begins
        self._quick: list[Request] = []  # finished as they joined, and their clients have not heard of it

    def plan_run(self, now: float) -> bool:
        """See `Engine`. An engine that plans ahead looks at once what it can do for those who wait."""
        self._now = now
        if not super().plan_run(now):
            return False
        self.one_step = self.one_step or self._copied_blocks > 0
        if self._async:
            batch, policy = self.batch, self._scheduler
            assert batch is not None
            assert isinstance(policy, SglangDecode)
            known = len(batch.pulls)
            policy.look_ahead(self.state, batch)
            for request, found in batch.pulls[known:]:
                _hand_over(request).pull(request, found, now)
        return True

    def _plan(self, planned_s: float) -> tuple[Batch, bool]:
        batch, more = super()._plan(planned_s)
        for request in batch.joins:
            if not request.over:  # else it was given up after this was planned
                self._join(request)
        assert isinstance(self._scheduler, SglangDecode)
        return batch, more or bool(batch.joins) or self._scheduler.unsettled

    def _join(self, request: Request) -> None:
        """`request` decodes from the next step on, if it is not over with its first token."""
        state, decodes = self.state, self.state.decodes
        if request.first_step < 0:
            request.first_token_s, request.first_step = self._now, state.step
            request.emitted = 1
        else:  # it was retracted
            self.gaps.behind.append(request)
        left = request.output_tokens - request.emitted
        if left:
            decodes.will_finish(request, decodes.step + left - 1)
            decodes.join(request, decodes.step)
            return
        request.finish_s, request.last_step = self._now, state.step
        request.outcome = LENGTH if request.output_tokens == request.max_tokens else STOP
        self._quick.append(request)
        if self._async:  # which is seen once the next step has begun
            request.finish_step = decodes.step - 1
            decodes.join(request, decodes.step)
            self._ended.append(request)
        else:
            state.release(request, 0)
            self._log.record(self.index, request, request.output_tokens)

    def _on_wake(self, event: Event) -> None:
        super()._on_wake(event)
        quick, self._quick = self._quick, []
        for request in quick:
            if request.outcome != CANCELLED:
                self._on_finish(request, request.finish_s)

    def _hear(self) -> bool:
        heard = self._polls.hear()
        for request in sorted(heard, key=_ticket):
            if request in self.state.pulling:
                self.state.pulled(request)
        return bool(heard)

    def _seen_after(self, now: float) -> int:
        """See `Replica`. What an arrival wants is looked at before anything is planned with it."""
        return super()._seen_after(now) - self._async


def _hand_over(request: Request) -> Bootstrapped:
    assert isinstance(request.of, Bootstrapped)
    return request.of


def _ticket(request: Request) -> int:
    return request.ticket


SIDES: Mapping[str, type[Replica]] = {"prefill": PrefillSide, "decode": DecodeSide}
"""SGLang's, by a pool's role."""
