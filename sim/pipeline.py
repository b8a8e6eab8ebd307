"""A replica whose layers lie on several pipeline stages, with a batch in flight for each of them.

vLLM's V1 engine (`step_with_batch_queue` of `v1/engine/core.py`): it plans as long as its queue of batches has room,
else it waits for the oldest batch. A request is in one batch at a time, but the chunks of a prompt may follow each
other. So those that decode form cohorts, one for each batch in flight, and a cohort is planned again when its batch is
back; a batch without work takes its turn in the queue, and no time. A stage starts a batch when it has it and is free.

Synchronous engines plan a cohort when its batch is back. Asynchronous ones (vLLM's V2 model runner) have one batch more
in the queue: they plan it when the batch before that is back, and whoever decodes waits for its last token on the first
stage. As in `sim.engine` that plan is made later here, with the older knowledge.

Unlike vLLM, nobody is preempted while his next token is in flight; vLLM may do that, and computes him twice then. And
while batches are in flight whose requests have all been given up, plans are made as ever; vLLM makes none then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from simpy import Event

from sim.batch import Batch
from sim.clock import Clock
from sim.decodes import Decodes
from sim.gaps import Gaps
from sim.replica import Replica
from sim.request import Request
from sim.schedulers import Scheduler
from sim.state import State
from sim.steplog import CANCELLED, Log


class PipelineCost(Protocol):
    """What the batches of a pipeline take (`calibrate.pipeline`)."""

    @property
    def depth(self) -> int:
        """How many stages there are."""

    @property
    def host_s(self) -> Sequence[float]:
        """Seconds that the engine's own process needs for a batch, by its sampled sequences: one after the other."""

    def stages_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int
    ) -> Sequence[tuple[float, float]]:
        """(seconds of computing, seconds until the next stage has its activations) of each stage; see
        `calibrate.cost.StepCost`."""


class Cohort(Decodes):
    """Requests that decode together, and their batch while it is in flight: planned with `waiting` requests in the
    queue, from `start_s` until it is back at `end_s`. `surplus` of its decodes are for nobody."""

    __slots__ = ("batch", "chunks", "end_s", "gaps", "start_s", "surplus", "waiting")

    def __init__(self, block_size: int, grows: bool, log: Log) -> None:
        super().__init__(block_size, grows)
        self.gaps = CohortGaps(log)
        self.batch: Batch | None = None
        self.chunks: list[tuple[int, int]] = []
        self.start_s = self.end_s = 0.0
        self.surplus = self.waiting = 0


class CohortGaps(Gaps):
    """All gaps go into the log of gaps: a row of the step log is as long as the pipeline needs for one batch more, and
    tokens come as often as batches of their cohort."""

    __slots__ = ("_last_s",)

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._last_s = 0.0  # when the last batch was back

    @property
    def open(self) -> bool:
        """Always."""
        return True

    def end(self, batch: Batch, now: float, tokens: int) -> int:
        """A batch is back at `now`, with `tokens` tokens of decoding requests."""
        tokens = super().end(batch, now, tokens)
        if tokens:
            self._log.gap(self._last_s, now, tokens)
        self._last_s = now
        return 0


class Pipeline(Replica):
    """Its policy is one that asks `State.in_flight` (vLLM V1's); layers see all tokens, and KV comes from nowhere else.

    Rows of its step log do not overlap: each begins when the batch before it is back, or when the batch itself begins
    on the first stage if that is later. `busy_s`: seconds that each stage has computed. `fills`: batches without work
    fill the queue (vLLM from 0.32); else, after one, it waits for the oldest.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        state: State,
        scheduler: Scheduler,
        cost: PipelineCost,
        log: Log,
        on_finish: Callable[[Request, float], None],
        *,
        fills: bool,
        **options: Any,
    ) -> None:
        super().__init__(index, clock, state, scheduler, None, log, on_finish, **options)
        self._stages = cost
        kv, self._depth, self._fills = state.kv, cost.depth, fills
        self._spare = [Cohort(kv.block_size, kv.grows, log) for _ in range(self._depth)]  # nobody is in them
        self._queue: deque[Cohort | None] = deque()  # in flight, the oldest first; None: a batch without work
        self._cohort = state.decodes = self._spare[0]
        self._left: list[tuple[Request, int]] = []  # left out of the last plan, with the tokens that they have to come
        self._back_s = 0.0  # when the last batch was back
        self._free_s = [0.0] * cost.depth
        self._host_free_s = 0.0
        self.busy_s = [0.0] * cost.depth

    def _on_wake(self, event: Event) -> None:
        if event is not self._wake:
            return
        queue, now, finished = self._queue, self._clock.now, list[Request]()
        cohort: Cohort | None = None  # whose batch has just come back
        planned_s, in_vain, waits = now, 0, bool(queue)
        while in_vain <= self._depth:
            if not waits:
                cohort = cohort or self._spare.pop()
                batch, more = self._plan_cohort(cohort, planned_s, now)
                queue.append(cohort if batch else None)
                if not batch:
                    self._spare.append(cohort)
                cohort, planned_s, in_vain = None, now, 0 if batch or more else in_vain + 1
                waits = len(queue) == self._depth or not (self._fills or (batch and not self._over(queue[0], now)))
                continue
            if not self._over(queue[0], now):
                break
            cohort, waits = queue.popleft(), False
            if cohort is not None:
                planned_s = self._back_s if self._async else now
                finished += self._come_back(cohort)
        else:
            queue.clear()
        self.batch, self._ends_s, self._wake = None, (), None
        if queue and (first := queue[0]) is not None:
            self.batch, self._wake = first.batch, self._clock.call_at(first.end_s, self._on_wake)
        for request in finished:
            if request.outcome != CANCELLED:
                self._on_finish(request, now)

    @staticmethod
    def _over(cohort: Cohort | None, now: float) -> bool:
        """Whether its batch is back, or is none."""
        return cohort is None or cohort.end_s <= now

    def _turn_to(self, cohort: Cohort) -> None:
        self._cohort = self.state.decodes = cohort
        self.gaps = cohort.gaps

    def _come_back(self, cohort: Cohort) -> list[Request]:
        """Its batch is back. Returns the requests that finished."""
        self._turn_to(cohort)
        self.batch, self.chunks = cohort.batch, cohort.chunks
        self._waiting, self._surplus = cohort.waiting, cohort.surplus
        self._start_s, self._ends_s = max(cohort.start_s, self._back_s), (cohort.end_s,)
        finished = self.finish_run()
        cohort.batch, self._back_s = None, cohort.end_s
        return finished

    def _plan_cohort(self, cohort: Cohort, planned_s: float, now: float) -> tuple[bool, bool]:
        """Plan its next batch with what was known at `planned_s`: whether there is one, else whether the next plan
        knows more."""
        self._turn_to(cohort)
        for request, tokens in self._left:
            cohort.join(request, cohort.step)
            cohort.will_finish(request, cohort.step + tokens - 1)
            cohort.gaps.behind.append(request)
        left = [request for request, _ in self._left]
        self._left.clear()
        self._surplus = 0
        batch, more = self._plan(planned_s)
        # Whoever was left out has had his last token since the last plan was made.
        late = sum(request.decoding and request not in batch.skipped for request in left)
        if batch.preempted or batch.skipped:
            cohort.gaps.begin(batch, now)
            self._leave_out(batch)
        if batch.empty:
            self.lost_preemptions += len(batch.preempted)
            return False, more or bool(batch.preempted)
        cohort.batch, cohort.chunks = batch, [(tokens, before) for _, tokens, before in batch.chunks]
        cohort.surplus, cohort.waiting = self._surplus, len(self.state.waiting)
        tokens_s = now if batch.decodes > late else planned_s
        cohort.start_s, cohort.end_s = self._price(cohort.chunks, batch, planned_s, tokens_s)
        for request, tokens, _ in batch.chunks:
            if request.outcome == CANCELLED:
                self._log.in_vain += tokens
            request.read += tokens
            if request.scheduled_s != request.scheduled_s:
                request.scheduled_s = cohort.start_s
        return True, False

    def _leave_out(self, batch: Batch) -> None:
        """Whom the plan leaves out may be in the next one, whose cohort it joins."""
        cohort = self._cohort
        step = cohort.step + (not batch.empty)
        for request in batch.skipped:
            if request.decoding:
                tokens = request.finish_step - step + 1
                cohort.leave(request, step)
                cohort.give_up(request)
                request.emitted = request.output_tokens - tokens
                self._left.append((request, tokens))
        batch.skipped = []

    def _price(
        self, chunks: list[tuple[int, int]], batch: Batch, planned_s: float, tokens_s: float
    ) -> tuple[float, float]:
        """When a batch begins on the first stage whose decodes have their last tokens at `tokens_s`, and when it is
        back (seconds)."""
        samples = batch.decodes + len(chunks)
        ready = planned_s
        if self._async:
            ready = self._host_free_s = max(planned_s, self._host_free_s) + self._stages.host_s[samples]
            ready = max(ready, tokens_s)
        begin = None
        free, busy = self._free_s, self.busy_s
        for i, (busy_s, send_s) in enumerate(self._stages.stages_s(chunks, batch.decodes, batch.kv_tokens)):
            start = ready if ready > free[i] else free[i]
            begin = start if begin is None else begin
            free[i] = end = start + busy_s
            busy[i] += busy_s
            ready = end + send_s
        assert begin is not None
        if not self._async:
            end = self._host_free_s = max(end, self._host_free_s) + self._stages.host_s[samples]
        return begin, end

    def record_stages(self) -> None:
        """Log how long each stage has computed."""
        for stage, busy_s in enumerate(self.busy_s):
            self._log.stage(self.index, stage, busy_s)

    def _drop_cancelled(self, batch: Batch | None) -> int:
        """Those in flight with other cohorts leave at once, and their tokens are for nobody."""
        state, left = self.state, dict(self._left)
        for request in list(self._cancelled):
            cohort = request.cohort
            if request in left:
                self._left = [each for each in self._left if each[0] is not request]
            if request.decoding and isinstance(cohort, Cohort) and cohort is not self._cohort:
                self._cancelled.remove(request)
                cohort.leave(request, cohort.step, planned=True)
                cohort.give_up(request)
                cohort.surplus += 1
                state.release(request, request.registered(request.computed, state.step))
        return super()._drop_cancelled(batch)

    def _received(self, request: Request, done: int) -> int:
        """Output tokens of an unfinished request."""
        if not request.decoding:
            return request.emitted
        assert request.cohort is not None
        return request.output_tokens - (request.finish_step - request.cohort.step + 1)
