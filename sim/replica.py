"""One model instance with its clients and its clock: requests in, runs priced, wake-ups.

It owns its clock: step ends are sums of step durations, never SimPy's `now`. It does not know where requests come from,
which policy plans, or what a step costs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from simpy import Event

from sim.clock import ARRIVAL, At, Clock
from sim.engine import NOBODY, Engine
from sim.quiet import quiet_run, quiet_run_of_windows, verified_run
from sim.rejection import rejection_of
from sim.request import Hold, Request
from sim.schedulers import Scheduler
from sim.state import State
from sim.steplog import CANCELLED, GIVEN_UP, UNFINISHED, Log

if TYPE_CHECKING:
    from calibrate.cost import DraftCost, StepCost
    from sim.offload import TieredCache


class Replica(Engine):
    """`submit` requests; `on_finish(request, time)` is called for each finished one. `on_pull`: see `Engine`."""

    def __init__(
        self,
        index: int,
        clock: Clock,
        state: State,
        scheduler: Scheduler,
        cost: StepCost | None,
        log: Log,
        on_finish: Callable[[Request, float], None],
        *,
        max_model_len: int,
        asynchronous: bool,
        on_pull: Callable[[Request, int, float], None] | None = None,
    ) -> None:
        super().__init__(index, state, scheduler, log, asynchronous=asynchronous, on_pull=on_pull)
        self._clock = clock
        self._cost = cost
        self._on_finish = on_finish
        self._max_model_len = max_model_len
        kv = state.kv
        room = scheduler.room(kv) // kv.tables * kv.block_size
        if state.drafting is not None:
            room -= state.drafting.slack
        self._always_fits = min(max_model_len, room, scheduler.longest_prompt)  # tokens of one request
        self._loads_first = kv.loads == "sync"  # a step begins to compute once all that it loads is there
        self._interruptible = False
        self._wake: At | None = None

    @property
    def policy(self) -> str:
        """The name of the policy that plans."""
        return str(self._scheduler)

    @property
    def remedy(self) -> str:
        """What its policy's options can do about a lack of blocks."""
        return self._scheduler.remedy

    def wants(self, request: Request) -> int:
        """For how many tokens there must be blocks before a waiting request gets any."""
        return self._scheduler.wants(request)

    @property
    def kv_used(self) -> float:
        """The share of its KV blocks that are in use now."""
        kv, free = self.state.kv, self.state.kv.free
        if len(self._ends_s) > 1 and self.batch is not None:
            decodes = self.state.decodes
            free -= decodes.demand_over(decodes.step + 1, bisect_right(self._ends_s, self._clock.now))
        return (kv.usable - free) / kv.usable

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.state.waiting) + len(self._incoming)

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
            rejection := rejection_of(request, self.state.kv, self._scheduler, self._max_model_len, self.state.drafting)
        ):
            request.outcome = rejection
            self._log.record(self.index, request, request.output_tokens)
            # By an event of its own: a client whose requests are all rejected would otherwise recurse.
            self._clock.call_at(request.entered_s, lambda _: self._on_finish(request, request.entered_s))
        else:
            self._take(request)

    def _take(self, request: Request) -> None:
        """`request` is here from now on."""
        if self.batch is None:
            self._enter(request)
            self._wake_up(request.entered_s)
        else:
            (self._incoming.append if self._lets_in else self._enter)(request)
            if self._interruptible:
                self._interrupt(request.entered_s)

    def transferred(self, request: Request, now: float) -> None:
        """The KV that `request` pulls is here, or what was kept of it is needed no more."""
        self._polls.ended(request)
        if self.batch is None:
            self._wake_up(now)
        else:
            self._cut(bisect_left(self._ends_s, now))

    def _fetch(self, request: Request, end_s: float) -> None:
        def there(event: Event) -> None:
            if request in self.state.pulling:
                self.transferred(request, end_s)

        self._clock.call_at(end_s, there, ARRIVAL)

    def _held(self, request: Request, hold: Hold) -> None:
        self._clock.call_at(request.hold_ends_s, lambda _: self._hold_ends(request), ARRIVAL)

    def _hold_ends(self, request: Request) -> None:
        """The next plan that can know of it lets it go."""
        self.holding.expired.append(request)
        if self.batch is None:
            self.holding.expire(request.hold_ends_s)
        else:
            self._cut(self._seen_after(request.hold_ends_s))

    def _wake_up(self, now: float) -> None:
        if self._wake is None:
            self._wake = self._clock.call_at(now, self._on_wake)

    def cancel(self, request: Request, now: float) -> None:
        """The client of an unfinished request has given up."""
        received = self.withdraw(request, now)
        request.finish_s = now
        self._log.record(self.index, request, received)
        self._on_finish(request, now)

    def withdraw(self, request: Request, now: float) -> int:
        """An unfinished request is not wanted here any more; the engine drops it when it plans next. Returns the output
        tokens that it had."""
        done = 0  # steps of the run in progress that have ended by now
        if request in self.state.pulling:
            pass  # its blocks are freed once what is on its way is there
        elif self.batch is None:
            self.state.withdraw(request)
        else:
            done = bisect_right(self._ends_s, now)
            self._cancelled.append(request)
            self._cut(done)
        received = self._received(request, done)
        request.outcome = CANCELLED
        return received

    def stop(self, now: float) -> list[tuple[Request, int]]:
        """Nothing goes on from here; a step that has not ended leaves no trace. Returns the unfinished requests, each
        with the output tokens that it had."""
        done = bisect_right(self._ends_s, now) if self.batch is not None else 0
        if done:
            self._ends_s = self._ends_s[:done]
            self.finish_run()
        for held in list(self.state.holds.values()):
            self.holding.let_go(held, now, GIVEN_UP)
        lost = [(request, self._received(request, 0)) for request in self.requests if not request.over]
        self.batch = self._wake = None
        return lost

    def lose_pull(self, request: Request, now: float) -> None:
        """What `request`, which is not wanted any more, pulls will never come: its blocks are free."""
        if request not in self.state.pulling:
            return
        self.state.pulled(request)
        if self.batch is None:
            self._wake_up(now)
        else:
            self._cut(bisect_left(self._ends_s, now))

    def record_unfinished(self, now: float) -> None:
        """The run is stopped at `now`: log the requests that are still waiting or running."""
        done = bisect_right(self._ends_s, now) if self.batch is not None else 0
        for request in self.requests:
            if not request.over:
                received = self._received(request, done)
                request.outcome = UNFINISHED
                self._log.record(self.index, request, received)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Whom it has, those among them that are over and not released yet."""
        state = self.state
        queues = (state.waiting, state.swapped, self._incoming)
        return (*state.running.values(), *(request for queue in queues for request in queue), *state.pulling)

    def _received(self, request: Request, done: int) -> int:
        """Output tokens of an unfinished request, once `done` steps of the run in progress have ended."""
        if not request.decoding:
            return request.emitted
        assert self.batch is not None
        if self.batch.paused:
            done = 0
        next_step = self.state.decodes.step + done + (request in self.batch.skipped)
        return request.output_tokens - self.state.decodes.left(request, next_step)

    def start_run(self, now: float) -> bool:
        """Plan at `now` and begin the next step or run of steps. False: there is nothing to do, the replica is idle."""
        if not self.plan_run(now):
            return False
        batch, state, cost = self.batch, self.state, self._cost
        assert batch is not None
        assert cost is not None
        decodes = batch.decodes
        if state.drafting is not None:
            self._ends_s = verified_run(state, batch, now, cast("DraftCost", cost), self.chunks, self.one_step)
            return self._begin_run()
        line = None if self.one_step else cost.decode_line(decodes, batch.kv_tokens)
        if line is None:
            step_s, copied = cost.step_s(self.chunks, decodes, batch.kv_tokens, batch.seen), self._copied_blocks
            swap_s = cost.swap_block_s * copied if copied else 0.0  # on the stream of the kernels, before them
            begin = max([now, *(row.end_s for _, rows in batch.loads for row in rows)]) if self._loads_first else now
            self._ends_s = (begin + (step_s + swap_s),)
            self._interruptible = False
            return True
        if batch.seen:
            lines = (line, *cost.window_lines(decodes, batch.seen))
            self._ends_s = quiet_run_of_windows(state, batch, now, lines)
        else:
            self._ends_s = quiet_run(state, batch, now, line)
        if self._tiered is not None and self._tiered.sends:
            first = self._ends_s[0]
            self._clock.call_at(first, lambda _: cast("TieredCache", state.kv).send(first), ARRIVAL)
        return self._begin_run()

    def _begin_run(self) -> bool:
        """The run has begun of which `_ends_s` are the ends: an arrival may cut it short, or has done so already."""
        matters = self.state.kv.prefetches or self._scheduler.arrival_matters(self.state)
        self._interruptible = len(self._ends_s) > 1 and matters
        if self._interruptible and self._incoming:
            self._ends_s = self._ends_s[: self._seen_after(self._start_s) + 1]
            self._interruptible = False
        return True

    def _on_wake(self, event: Event) -> None:
        wake = self._wake
        if event is not wake:
            return  # the run was cut short since
        assert wake is not None
        if self.batch is None:
            finished, now = NOBODY, self._clock.now
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
        self._cut(self._seen_after(now))

    def _seen_after(self, now: float) -> int:
        """The step of the run in progress after which comes the first plan that can know of an arrival at `now`."""
        step = bisect_left(self._ends_s, now) + self._async
        return step + -(self._unread + step) % self._every

    def _cut(self, last: int) -> None:
        """End the run in progress with its step `last`, if it is longer."""
        if last + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: last + 1]
            self._wake = self._clock.call_at(self._ends_s[-1], self._on_wake)
