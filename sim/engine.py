"""What plans and their ends do to requests, step by step or a run of steps at a time. It knows no clock and no clients.

Between two plans lies a run: one step, or many decode steps in which nothing can change, taken as one event. When its
steps end says who prices it (`sim.replica`).

Synchronous engines plan a step when the previous one has ended. Asynchronous ones (`async_scheduling`) plan step
j + 1 when step j begins: that plan cannot know of arrivals during step j nor of requests that end with it. Planning
later with that older knowledge gives the same plan, so both kinds share one loop: an asynchronous engine applies
arrivals (`_incoming`) and the release of finished requests (`_ended`) only after it has planned.

An engine may also look for arrivals only every so many decode steps (`scheduler_recv_interval`). `_unread` counts those
launched since it looked, and plans of nothing; once batch k is planned it says whether plan k + 1 looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from sim.batch import Batch
from sim.gaps import Gaps
from sim.holding import Holding
from sim.loading import planned
from sim.polls import Polls
from sim.request import NEVER, Hold, Request
from sim.schedulers import Scheduler
from sim.speculative import SpeculativeDecodes, single_rows
from sim.state import State
from sim.steplog import CANCELLED, LENGTH, STOP, Log

if TYPE_CHECKING:
    from sim.offload import TieredCache

NOBODY: list[Request] = []


class Engine:
    """One engine's loop. `on_pull(request, found, time)` is called when the step begins whose plan, made at `time`,
    gave a request the blocks for a prompt of which it has found so many tokens, and the KV of the others is to come
    from elsewhere."""

    def __init__(
        self,
        index: int,
        state: State,
        scheduler: Scheduler,
        log: Log,
        *,
        asynchronous: bool,
        on_pull: Callable[[Request, int, float], None] | None = None,
    ) -> None:
        self.index = index
        self.state = state
        self._tiered = cast("TieredCache", state.kv) if state.kv.loads else None
        self._scheduler = scheduler
        self._log = log
        self._on_pull = on_pull
        self._async = asynchronous
        self._overruns = scheduler.overruns
        self._every = scheduler.scheduler_recv_interval
        self._unread = 0
        self._lets_in = asynchronous or self._every > 1  # some plans do not see who has arrived
        self._incoming: deque[Request] = deque()  # arrivals that the next plan cannot see yet
        self._ended: list[Request] = []  # asynchronous only: finished, still holding place and blocks
        self._cancelled: list[Request] = []  # given up since the last plan
        self._prompts: list[Request] = []  # complete since the last step, and not yet kept for others
        self._polls = Polls(2 if asynchronous else 1)
        self.holding = Holding(index, state, log)
        self._waiting = 0  # requests in the queue once the run in progress was planned
        self.lost_preemptions = 0
        """By plans that left nothing to compute, and so have no row in the log: they go into the next one."""
        self.gaps = Gaps(log)
        self.batch: Batch | None = None
        """The plan of the run in progress; None while idle."""
        self.chunks: list[tuple[int, int]] = []
        """Of that plan: (new tokens, tokens already in KV) of each prompt chunk."""
        self.one_step = False
        """Whether the run is one step in any case: it has chunks, or the next plan knows more than this one did."""
        self._copied_blocks = 0  # to and from the host, before the first step
        self._start_s = 0.0
        self._ends_s: Sequence[float] = ()  # end of each step of the run
        self._surplus = 0  # decodes in the batch that are already finished

    def plan_run(self, now: float) -> bool:
        """Plan the next run, which begins at `now`. False: there is nothing to do, the engine is idle."""
        state = self.state
        planned_s = now
        if self._async and self.batch is not None:  # when the last step began
            planned_s = self._ends_s[-2] if len(self._ends_s) > 1 else self._start_s
        if self._tiered is not None:
            self._tiered.begin_s = now
        batch, single = self._plan(planned_s)
        lost, copied = list[Request](), 0
        # An empty step takes no time.
        while batch.empty and (single or batch.preempted or self._look_again() or self.holding.give_up(now)):
            lost += batch.preempted
            copied += batch.copied_blocks
            if state.windows is not None or state.drafting is not None:
                state.land()
            batch, single = self._plan(now)
        batch.preempted[:0] = lost
        copied += batch.copied_blocks
        self.gaps.behind += batch.swapped_in
        single = single or self.gaps.open
        if batch.preempted or batch.skipped or batch.paused:
            self.gaps.begin(batch, now)
            single = True
        if batch.chunks:
            chunks = []
            for request, tokens, context in batch.chunks:
                chunks.append((tokens, context))
                if request.outcome == CANCELLED:
                    self._log.in_vain += tokens
                request.read += tokens
                if request.scheduled_s != request.scheduled_s:
                    request.scheduled_s = now
            single = True
        elif batch.decodes:
            chunks = []
        else:
            self.batch, self._unread = None, 0
            if self._tiered is not None:
                self._tiered.send(now)
            self.lost_preemptions += len(batch.preempted)
            return False
        self.batch = batch
        self._start_s = now
        self._waiting = len(state.waiting) + len(state.swapped)
        self.chunks, self.one_step, self._copied_blocks = chunks, single, copied
        return True

    def _plan(self, planned_s: float) -> tuple[Batch, bool]:
        """The next batch, planned at `planned_s`; and whether the next plan knows more than this one did."""
        state, polls = self.state, self._polls
        if polls and not self._async:
            self._hear()
        if self.holding.expired:
            self.holding.expire(planned_s)
        if self._tiered is not None:
            self._tiered.fetch_ahead(planned_s)
            self._tiered.now_s = planned_s
        batch = self._scheduler.plan(state)
        if self._tiered is not None:
            for request, end_s in planned(state, batch, self._log, self.index):
                self._fetch(request, end_s)
        if state.resumed:
            self.holding.resumed(planned_s)
        self._unread = 0 if batch.chunks or batch.joins else (self._unread + 1) % self._every
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
        if self._tiered is not None:
            self._tiered.fetch_ahead(self._tiered.begin_s)
        self._left_out(batch)
        return batch, more or bool(self.holding.expired)

    def _held(self, request: Request, hold: Hold) -> None:
        """Its KV is held from now on."""

    def _fetch(self, request: Request, end_s: float) -> None:
        """What `request` loads, and waits for, is there at `end_s`."""
        raise NotImplementedError

    def _hear(self) -> bool:
        """The scheduler learns which transfers are over; whether there are any."""
        heard = self._polls.hear()
        for request in heard:
            (self.state.pulled if request in self.state.pulling else self.state.give_back)(request)
        return bool(heard)

    def finish_run(self) -> list[Request]:
        """The run in progress has ended: give out its tokens. Returns the requests that finished."""
        batch, ends, state = self.batch, self._ends_s, self.state
        assert batch is not None
        chunks, decodes, kv = batch.chunks, state.decodes, state.kv
        steps, now, first_step = len(ends), ends[-1], state.step
        if self._tiered is not None:
            self._tiered.send(now)
            self._tiered.now_s = now
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
        output_tokens, single = gaps * steps, b""
        if isinstance(decodes, SpeculativeDecodes):
            output_tokens = decodes.yields()
            decodes.pad(batch.padded)
            if steps > 1:
                running = len(state.running) - len(self._ended)
                facts = self.index, first_step, batch.decodes, gaps, running, self._waiting, blocks
                single = single_rows(decodes.over(steps), self._start_s, ends, facts)
        if not batch.paused:
            decodes.advance(steps)
            if batch.skipped or self.gaps.open:
                decodes.left_out(batch.skipped)
                gaps = self.gaps.end(batch, now, gaps)
        prefill_tokens = 0
        for request, tokens, before in chunks:
            prefill_tokens += tokens
            if before + tokens == request.target:
                output_tokens += request.streams and not request.over
                self._first_token(request, now, batch)
                if kv.keeps_computed:
                    self._prompts.append(request)
        rows = self._log.steps
        if single:
            rows.extend(single)
        else:
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
                    batch.drafts,
                )
            )
        self.lost_preemptions = 0
        last = decodes.step - 1
        finished = decodes.finished(last) if decodes.next_finish == last else NOBODY
        for request in finished:
            if not request.over:
                request.finish_s = now
                request.last_step = state.step - 1
                request.outcome = LENGTH if request.output_tokens == request.max_tokens else STOP
            # A request that reaches its cap is known to end and not planned again; one that stops before it is, if the
            # next plan was made before the stop was seen.
            if request.decoding and not (
                self._async
                and (self._overruns or request.output_tokens < request.max_tokens or decodes.unsure(request))
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
        if self._lets_in:
            self._look(ends)
        return finished

    def _enter(self, request: Request) -> None:
        """The scheduler has received `request`."""
        self.state.enqueue(request)
        if self._tiered is not None:
            self._tiered.received(request)

    def _look_again(self) -> bool:
        """With nothing to do an engine looks again and again who has come; whether there is somebody."""
        found, self._incoming, self._unread = self._incoming, deque(), 0
        for request in found:
            self._enter(request)
        return bool(found)

    def _look(self, ends: Sequence[float]) -> None:
        """Who arrived in time for the last plan that looked in the run that has ended, with its steps at `ends`."""
        last = len(ends) - 1
        since = (self._unread + last) % self._every
        looked = last - since - self._async  # the step with whose end it did; a run's first plan has looked already
        if looked >= 0:
            while self._incoming and self._incoming[0].entered_s <= ends[looked]:
                self._enter(self._incoming.popleft())
            if self._tiered is not None:
                self._tiered.fetch_ahead(ends[looked])
        self._unread = since

    def _catch_up(self, batch: Batch) -> bool:
        """After a plan: release what ended meanwhile and let in what arrived. True if the next plan may differ."""
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
        if incoming and not self._unread and (self._async or batch.empty):  # else the step comes first
            while incoming:
                self._enter(incoming.popleft())
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
                known = request.prompt_tokens + request.output_tokens - 1
                state.release(request, known if state.drafting is None or self._async else request.landed)
                if request.hold is not None:
                    self._held(request, request.hold)
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
                known = request.registered(request.computed, last + in_batch)
                state.release(request, known if state.drafting is None else request.landed)
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
        decodes.begin(request, remaining - 1)
        if remaining > 1 or (self._async and (self._overruns or request.output_tokens < request.max_tokens)):
            decodes.join(request, decodes.step)

    def _left_out(self, batch: Batch) -> None:
        """Whom an asynchronous plan leaves out has no token in flight when it decodes again: its cache catches up."""
        if batch.skipped and self._async:
            for request in batch.skipped:
                request.lag_step = self.state.step + (1 if batch.empty else 2)
