"""One model instance: the loop that turns plans into time.

Between two plans lies a run: one step, or many decode steps in which nothing can change, taken as one event. The
replica owns its clock: step ends are sums of step durations, never SimPy's `now`. It does not know where requests
come from, which policy plans, or what a step costs.

Synchronous engines plan a step when the previous one has ended. Asynchronous ones (`async_scheduling`) plan step
j + 1 when step j begins: that plan cannot know of arrivals during step j nor of requests that end with it. Planning
later with that older knowledge gives the same plan, so both kinds share one loop: an asynchronous replica applies
arrivals (`_incoming`) and the release of finished requests (`_ended`) only after it has planned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simpy import Event

from sim.clock import At, Clock
from sim.gaps import Gaps
from sim.polls import Polls
from sim.quiet import quiet_run, quiet_run_of_windows
from sim.rejection import rejection_of
from sim.request import NEVER, Request
from sim.schedulers import Scheduler
from sim.state import Batch, State
from sim.steplog import CANCELLED, LENGTH, STOP, UNFINISHED, Log

if TYPE_CHECKING:
    from calibrate.cost import StepCost

_NOBODY: list[Request] = []


class Replica:
    """One engine: `submit` requests; `on_finish(request, time)` is called for each finished one, and `on_pull(request,
    found, time)` when the step begins whose plan, made at `time`, gave it the blocks for a prompt of which it has found
    so many tokens, and the KV of the others is to come from elsewhere."""

    def __init__(
        self,
        index: int,
        clock: Clock,
        state: State,
        scheduler: Scheduler,
        cost: StepCost,
        log: Log,
        on_finish: Callable[[Request, float], None],
        *,
        max_model_len: int,
        asynchronous: bool,
        on_pull: Callable[[Request, int, float], None] | None = None,
    ) -> None:
        self.index = index
        self.state = state
        self._clock = clock
        self._scheduler = scheduler
        self._cost = cost
        self._log = log
        self._on_finish = on_finish
        self._on_pull = on_pull
        self._max_model_len = max_model_len
        kv = state.kv
        room = scheduler.room(kv) // kv.tables * kv.block_size
        self._always_fits = min(max_model_len, room, scheduler.longest_prompt)  # tokens of one request
        self._async = asynchronous
        self._overruns = scheduler.overruns
        self._incoming: deque[Request] = deque()  # asynchronous only: arrivals that the next plan cannot see yet
        self._ended: list[Request] = []  # asynchronous only: finished, still holding place and blocks
        self._cancelled: list[Request] = []  # given up since the last plan
        self._prompts: list[Request] = []  # complete since the last step, and not yet kept for others
        self._polls = Polls(2 if asynchronous else 1)
        self._waiting = 0  # requests in the queue once the run in progress was planned
        self.lost_preemptions = 0
        """By plans that left nothing to compute, and so have no row in the log: they go into the next one."""
        self.gaps = Gaps(log)
        self.batch: Batch | None = None
        """The plan of the run in progress; None while idle."""
        self._start_s = 0.0
        self._ends_s: Sequence[float] = ()  # end of each step of the run
        self._surplus = 0  # decodes in the batch that are already finished
        self._interruptible = False
        self._wake: At | None = None

    @property
    def policy(self) -> str:
        """The name of the policy that plans."""
        return str(self._scheduler)

    @property
    def kv_used(self) -> float:
        """The share of its KV blocks that are in use now."""
        kv, free = self.state.kv, self.state.kv.free
        if len(self._ends_s) > 1 and self.batch is not None:
            decodes = self.state.decodes
            free -= decodes.demand_over(decodes.step + 1, bisect_right(self._ends_s, self._clock.now))
        return (kv.usable - free) / kv.usable

    @property
    def in_flight(self) -> int:
        """Requests that are waiting or running."""
        state = self.state
        queues = (state.waiting, state.swapped, self._incoming, state.running, state.pulling)
        return sum(map(len, queues)) - len(self._ended) - len(self._cancelled)

    def submit(self, request: Request) -> None:
        """A request gets to the engine now. One that can never be served is rejected: logged, with the reason."""
        request.replica = self.index
        if request.prompt_tokens + request.max_tokens > self._always_fits and (
            rejection := rejection_of(request, self.state.kv, self._scheduler, self._max_model_len)
        ):
            request.outcome = rejection
            self._log.record(self.index, request, request.output_tokens)
            # By an event of its own: a client whose requests are all rejected would otherwise recurse.
            self._clock.call_at(request.entered_s, lambda _: self._on_finish(request, request.entered_s))
        elif self.batch is None:
            self.state.enqueue(request)
            self._wake_up(request.entered_s)
        else:
            (self._incoming.append if self._async else self.state.enqueue)(request)
            if self._interruptible:
                self._interrupt(request.entered_s)

    def transferred(self, request: Request, now: float) -> None:
        """The KV that `request` pulls is here, or what was kept of it is needed no more."""
        self._polls.ended(request)
        if self.batch is None:
            self._wake_up(now)
        else:
            self._cut(bisect_left(self._ends_s, now))

    def _wake_up(self, now: float) -> None:
        if self._wake is None:
            self._wake = self._clock.call_at(now, self._on_wake)

    def cancel(self, request: Request, now: float) -> None:
        """The client of an unfinished request has given up; the engine drops it when it plans next."""
        done = 0  # steps of the run in progress that have ended by now
        if request.id in self.state.pulling:
            pass  # its blocks are freed once what is on its way is there
        elif self.batch is None:
            self.state.withdraw(request)
        else:
            done = bisect_right(self._ends_s, now)
            self._cancelled.append(request)
            self._cut(done)
        received = self._received(request, done)
        request.outcome = CANCELLED
        request.finish_s = now
        self._log.record(self.index, request, received)
        self._on_finish(request, now)

    def record_unfinished(self, now: float) -> None:
        """The run is stopped at `now`: log the requests that are still waiting or running."""
        done = bisect_right(self._ends_s, now) if self.batch is not None else 0
        for request in self._unfinished():
            if not request.over:
                received = self._received(request, done)
                request.outcome = UNFINISHED
                self._log.record(self.index, request, received)

    def _unfinished(self) -> tuple[Request, ...]:
        state = self.state
        queues = (state.waiting, state.swapped, self._incoming)
        return (*state.running.values(), *(request for queue in queues for request in queue), *state.pulling.values())

    def _received(self, request: Request, done: int) -> int:
        """Output tokens of an unfinished request, once `done` steps of the run in progress have ended."""
        if not request.decoding:
            return request.emitted
        assert self.batch is not None
        if self.batch.paused:
            done = 0
        next_step = self.state.decodes.step + done + (request in self.batch.skipped)
        return request.output_tokens - (request.finish_step - next_step + 1)

    def start_run(self, now: float) -> bool:
        """Plan at `now` and begin the next step or run of steps. False: there is nothing to do, the replica is idle."""
        state = self.state
        planned_s = now
        if self._async and self.batch is not None:  # when the last step began
            planned_s = self._ends_s[-2] if len(self._ends_s) > 1 else self._start_s
        batch, single = self._plan(planned_s)
        lost, copied = list[Request](), 0
        while batch.empty and (single or batch.preempted):  # an empty step takes no time
            lost += batch.preempted
            copied += batch.copied_blocks
            if state.windows is not None:
                state.land()
            batch, single = self._plan(now)
        batch.preempted[:0] = lost
        copied += batch.copied_blocks
        self.gaps.behind += batch.swapped_in
        single = single or self.gaps.open
        if batch.preempted or batch.skipped or batch.paused:
            self.gaps.begin(batch, now)
            single = True
        decodes = batch.decodes
        if batch.chunks:
            chunks = []
            for request, tokens, context in batch.chunks:
                chunks.append((tokens, context))
                if request.scheduled_s != request.scheduled_s:
                    request.scheduled_s = now
            line = None
        elif decodes:
            chunks = []
            line = None if single else self._cost.decode_line(decodes, batch.kv_tokens)
        else:
            self.batch = None
            self.lost_preemptions += len(batch.preempted)
            return False
        self.batch = batch
        self._start_s = now
        self._waiting = len(state.waiting) + len(state.swapped)
        if line is None:
            step_s = self._cost.step_s(chunks, decodes, batch.kv_tokens, batch.seen)
            swap_s = self._cost.swap_block_s * copied if copied else 0.0  # on the stream of the kernels, before them
            self._ends_s = (now + (step_s + swap_s),)
            self._interruptible = False
        else:
            if batch.seen:
                lines = (line, *self._cost.window_lines(decodes, batch.seen))
                self._ends_s = quiet_run_of_windows(state, batch, now, lines)
            else:
                self._ends_s = quiet_run(state, batch, now, line)
            self._interruptible = len(self._ends_s) > 1 and self._scheduler.arrival_matters(state)
        return True

    def _plan(self, planned_s: float) -> tuple[Batch, bool]:
        """The next batch, planned at `planned_s`; and whether the next plan knows more than this one did."""
        state, polls = self.state, self._polls
        if polls and not self._async:
            self._hear()
        batch = self._scheduler.plan(state)
        if batch.pulls and self._on_pull is not None:
            for request, found in batch.pulls:
                self._on_pull(request, found, planned_s)
        more = False
        if self._ended or self._incoming or self._cancelled or self._prompts:
            more = self._catch_up(batch)
        if polls:
            if self._async:
                more = self._hear() or more
            polls.launch()
            more = more or bool(polls)
        self._left_out(batch)
        return batch, more

    def _hear(self) -> bool:
        """The scheduler learns which transfers are over; whether there are any."""
        heard = self._polls.hear()
        for request in heard:
            (self.state.pulled if self.state.pulling.get(request.id) is request else self.state.give_back)(request)
        return bool(heard)

    def finish_run(self) -> list[Request]:
        """The run in progress has ended: give out its tokens. Returns the requests that finished."""
        batch, ends, state = self.batch, self._ends_s, self.state
        assert batch is not None
        chunks, decodes, kv = batch.chunks, state.decodes, state.kv
        steps, now, first_step = len(ends), ends[-1], state.step
        blocks = kv.usable - kv.free
        blocks_end = blocks
        if steps > 1:
            kv.decode(decodes, decodes.step + 1, steps - 1)
            blocks_end = kv.usable - kv.free
        state.step = first_step + steps
        gaps = batch.decodes - batch.padding
        if self._surplus:
            gaps -= self._surplus
            self._surplus = 0
        output_tokens = gaps * steps
        if not batch.paused:
            decodes.advance(steps)
            if batch.skipped or self.gaps.open:
                decodes.left_out(batch.skipped)
                gaps = self.gaps.end(batch, now, gaps)
        prefill_tokens = 0
        for request, tokens, _ in chunks:
            prefill_tokens += tokens
            if request.computed == request.target:
                output_tokens += request.streams and not request.over
                self._first_token(request, now, batch)
                if kv.keeps_computed:
                    self._prompts.append(request)
        rows = self._log.steps
        rows.extend(
            rows.pack(
                self.index,
                first_step,
                self._start_s,
                now,
                steps,
                ends[0] - self._start_s,
                len(chunks),
                prefill_tokens,
                batch.decodes,
                batch.kv_tokens,
                output_tokens,
                gaps,
                len(state.running) - len(self._ended),
                self._waiting,
                blocks,
                blocks_end,
                len(batch.preempted) + self.lost_preemptions,
            )
        )
        self.lost_preemptions = 0
        last = decodes.step - 1
        finished = decodes.finished(last) if decodes.next_finish == last else _NOBODY
        for request in finished:
            if not request.over:
                request.finish_s = now
                request.last_step = state.step - 1
                request.outcome = LENGTH if request.output_tokens == request.max_tokens else STOP
            # A request that reaches its cap is known to end and not planned again; one that stops before it is, if the
            # next plan was made before the stop was seen.
            if request.decoding and not (
                self._async and (self._overruns or request.output_tokens < request.max_tokens)
            ):
                decodes.leave(request, decodes.step)
        if self._async:
            self._ended += finished
        else:
            if self._cancelled:
                self._drop_cancelled(None)
            self._give_back(finished)
            for request in finished:
                if request.outcome != CANCELLED:
                    self._log.record(self.index, request, request.output_tokens)
        if steps > 1 and self._incoming:  # what arrived before the last step began is known to the plan made there
            seen = ends[-2]
            while self._incoming and self._incoming[0].entered_s <= seen:
                self.state.enqueue(self._incoming.popleft())
        return finished

    def _on_wake(self, event: Event) -> None:
        wake = self._wake
        if event is not wake:
            return  # the run was cut short since
        assert wake is not None
        if self.batch is None:
            finished, now = _NOBODY, self._clock.now
            if self._async:
                self._polls.launch()  # the first two steps are launched at once
        else:
            now = self._ends_s[-1]
            finished = self.finish_run()
        self._wake = self._clock.call_again(self._ends_s[-1], wake, self._on_wake) if self.start_run(now) else None
        for request in finished:
            if request.outcome != CANCELLED:
                self._on_finish(request, now)

    def _interrupt(self, now: float) -> None:
        """An arrival matters: end the run where the first plan that can know of it is made."""
        self._interruptible = False
        self._cut(bisect_left(self._ends_s, now) + (1 if self._async else 0))

    def _cut(self, last: int) -> None:
        """End the run in progress with its step `last`, if it is longer."""
        if last + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: last + 1]
            self._wake = self._clock.call_at(self._ends_s[-1], self._on_wake)

    def _catch_up(self, batch: Batch) -> bool:
        """After an asynchronous plan: release what ended and let in what arrived. True if the next plan may differ."""
        state, ended, incoming = self.state, self._ended, self._incoming
        # The head of the queue is who it was, whatever arrives, and waits for no others.
        unmoved = bool(state.waiting) and not state.by_priority and batch.most_steps == NEVER
        surplus = 0
        for request in ended:
            if request.outcome != CANCELLED:
                self._log.record(self.index, request, request.output_tokens)
            if request.ticket not in state.running:
                continue  # preempted by this very plan
            if request.decoding:
                skipped = request in batch.skipped
                in_batch = not skipped and not batch.paused
                state.decodes.leave(request, state.decodes.step + (skipped and not batch.empty), in_batch)
                surplus += in_batch
        released = bool(ended)
        if self._cancelled:
            surplus += self._drop_cancelled(batch)
            released = True
        self._give_back(ended)
        ended.clear()
        again = surplus > 0
        if incoming:
            for request in incoming:
                state.enqueue(request)
            incoming.clear()
            again = again or not unmoved
        self._surplus = surplus
        return again or (released and bool(state.waiting))

    def _give_back(self, ended: list[Request]) -> None:
        """What the last step has computed is known: prompts are kept for others, those that ended are released."""
        state = self.state
        for request in (*self._prompts, *ended):
            if request.ticket not in state.running:
                continue  # preempted by the plan just made, given up, or a prompt that ended at once
            if request.finished:
                state.release(request, request.prompt_tokens + request.output_tokens - 1)
            elif not request.over:
                state.kv.keep(request, request.target)
        self._prompts.clear()

    def _drop_cancelled(self, batch: Batch | None) -> int:
        """Take cancelled requests out of queue, batch and KV; `batch` is the plan just made with them, if it was.

        Returns how many of that plan's decodes are in vain. Those that would have finished meanwhile are among them.
        """
        state, surplus, last = self.state, 0, self.state.step - 1
        for request in self._cancelled:
            if request.ticket not in state.running:
                if request in self._incoming:
                    self._incoming.remove(request)
                elif request in state.swapped:
                    state.swapped.remove(request)
                elif request in state.waiting:
                    state.withdraw(request)
                continue
            if request.decoding:
                skipped = batch is not None and request in batch.skipped
                late = batch is not None and skipped and not batch.empty
                in_batch = batch is not None and not skipped and not batch.paused
                state.decodes.leave(request, state.decodes.step + late, in_batch)
                state.decodes.give_up(request)
                surplus += in_batch
                state.release(request, request.registered(request.computed, last + in_batch))
            else:
                state.prefilling.pop(request.ticket, None)
                known = request.prompt_tokens + request.output_tokens - 1
                state.release(request, min(request.registered(request.computed, last), known))
        self._cancelled.clear()
        return surplus

    def _first_token(self, request: Request, now: float, batch: Batch) -> None:
        """A prompt is complete, so its step yields a token: the first, or the next one after a preemption."""
        decodes, step = self.state.decodes, self.state.step - 1
        if request.over:
            if not self._async or request.ticket not in self.state.running:
                return
            # Given up during this step: the next plan of an asynchronous engine was made before that, and decodes it.
        else:
            if request.first_step < 0:
                request.first_token_s = now
                request.first_step = step
            if batch.paused or request.gap_from_s == request.gap_from_s:
                self.gaps.token(request, now, batch)
        if self._async:
            request.lag_step = step + 1
        remaining = request.output_tokens - request.emitted
        decodes.will_finish(request, decodes.step + remaining - 2)
        if remaining > 1 or (self._async and (self._overruns or request.output_tokens < request.max_tokens)):
            decodes.join(request, decodes.step)

    def _left_out(self, batch: Batch) -> None:
        """Whom an asynchronous plan leaves out has no token in flight when it decodes again: its cache catches up."""
        if batch.skipped and self._async:
            for request in batch.skipped:
                request.lag_step = self.state.step + (1 if batch.empty else 2)
