"""What a scheduler sees and moves: the queue, the running requests and their KV.

It knows nothing of time: steps are numbered, the replica says when they happen.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING

from sim.batch import Batch
from sim.decodes import Decodes
from sim.drafts import Drafting
from sim.kvcache import KVCache
from sim.loading import begins, has_loaded
from sim.request import NEVER, Request
from sim.speculative import SpeculativeDecodes
from sim.windowdecodes import WindowDecodes
from sim.windows import ONE, Tables

if TYPE_CHECKING:
    pass


class State:
    """One replica's requests before step `step`.

    `waiting` in queue order: as they came, or `by_priority` (the least first, then the earliest); who holds blocks
    since its KV has come is first of all, or (not `pulled_first`) comes after the preempted or by priority; `swapped`,
    whose KV is in the memory of the host, as they went; `running` and `prefilling` (the running ones whose prompt is
    not complete) by ticket, oldest admission first unless `place_first` said otherwise; the decoding ones only as
    aggregates, which are the `windows` where the model has such; `pulling`, those whose KV is on its way, which have
    their blocks and no place, and those who wait for what one of these loads, which have neither; `loading`, those who
    have blocks for what they load and do not run yet; `awaiting`, by one of these, who waits for it (all three by the
    request itself: a client who tries again has two of the same number here); `kept`: how many are over whose blocks
    stay. `holds`: by the number of the request for which it stays, those that are over whose KV is pinned; `resumed`:
    of these, for whom that one has come since the list was emptied. A running request that is neither prefilling nor
    decoding has finished and waits for its release (asynchronous scheduling).
    """

    __slots__ = (
        "_first", "_late", "awaiting", "by_priority", "decodes", "drafting", "holds", "kept", "kv", "loading",
        "prefilling", "pulled_first", "pulling", "resumed", "running", "step", "swapped", "tickets", "waiting",
        "windows",
    )  # fmt: skip

    def __init__(
        self,
        kv: KVCache,
        by_priority: bool = False,
        tables: Tables = ONE,
        pulled_first: bool = False,
        drafting: Drafting | None = None,
    ) -> None:
        self.kv = kv
        self.by_priority = by_priority
        self.pulled_first = pulled_first
        self.windows = WindowDecodes(kv.block_size, tables) if tables.windows else None
        self.drafting = drafting
        self.decodes = self.windows or Decodes(kv.block_size, kv.grows)
        if drafting is not None:
            self.decodes = SpeculativeDecodes(kv.block_size, drafting)
        if self.windows is not None:
            kv.watch(self.windows)
        self._late = tables.late
        self.waiting: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.pulling: dict[Request, None] = {}
        self.loading: dict[Request, None] = {}
        self.awaiting: dict[Request, list[Request]] = {}
        self.kept = 0
        self.holds: dict[int, Request] = {}
        self.resumed: list[Request] = []
        self.step = 0
        self.tickets = 0
        self._first = -1  # no ticket that was given out is below it

    def enqueue(self, request: Request) -> None:
        """`request` takes its place in the queue."""
        waiting = self.waiting
        if self.by_priority:
            insort(waiting, request, key=self._rank)
        elif request.there or request.awaited:
            waiting.insert(self._place(request), request)
        else:
            waiting.append(request)

    def _place(self, request: Request) -> int:
        """Where one belongs whose KV has come, the first to get blocks first, or who was preempted; who waited for the
        load of another comes between these."""
        place = 0
        for other in self.waiting:
            if request.there and other.there:
                ahead = other.ticket < request.ticket
            elif request.awaited and not request.there:
                ahead = other.there or (other.awaited and other.ticket < request.ticket)
            elif other.awaited and not request.there:
                ahead = True
            else:
                ahead = other.there if self.pulled_first else request.there and other.preemptions > 0
            if not ahead:
                break
            place += 1
        return place

    def _rank(self, request: Request) -> tuple[bool, int, float, int]:
        return (not request.there and self.pulled_first, *rank(request))

    def pull(self, batch: Batch, found: int) -> None:
        """The head of the queue gets the blocks for its prompt, of which the lookup just made has `found` some tokens;
        the others are to come, all but the last."""
        request = self.waiting.popleft()
        if found:
            self.kv.claim(request)
        self.kv.hold(request, found, request.target)
        request.pulls = False
        request.computed = request.target - 1
        request.arriving = request.target
        request.ticket = self.tickets
        self.tickets += 1
        self.pulling[request] = None
        batch.pulls.append((request, found))

    def take(self, batch: Batch, found: int) -> None:
        """As `pull` and `resume` in one: what the lookup has not found is at hand."""
        self.pull(batch, found)
        request, _ = batch.pulls.pop()
        del self.pulling[request]
        self.waiting.appendleft(request)
        self.resume(batch)

    def pulled(self, request: Request) -> None:
        """What `request` pulled is there, and it waits for its turn; if it was given up meanwhile, its blocks are
        free."""
        del self.pulling[request]
        if request in self.loading:
            has_loaded(self, request)
        if request.over:
            self.kv.release(request, request.arriving, 0, False)
        else:
            request.there = True
            self.enqueue(request)

    def withdraw(self, request: Request) -> None:
        """A request that waits was given up."""
        self.waiting.remove(request)
        if request.there:
            loaded = request in self.loading
            self.loading.pop(request, None)
            self.kv.release(request, request.arriving, request.arriving if loaded else 0, False)

    def resume(self, batch: Batch, tokens: int = 1) -> None:
        """The head of the queue, whose KV has come, computes the next `tokens` tokens of its prompt."""
        request = self.waiting.popleft()
        self.loading.pop(request, None)
        request.ticket = ticket = self.tickets
        self.tickets = ticket + 1
        self.running[ticket] = request
        before = request.computed
        request.there = False
        request.cohort = self.decodes
        request.computed = after = before + tokens
        self.kv.grow(request, request.arriving, after)
        batch.chunks.append((request, tokens, before))
        if after != request.target:
            self.prefilling[ticket] = request

    def admit(
        self, batch: Batch, tokens: int, found: int = 0, reserve: int = 0, known: int = 0, padding: int = 0
    ) -> None:
        """Move the head of the queue into the batch with its first chunk of `tokens` prompt tokens, after the `found`
        tokens that the lookup just made has found in the cache, or after `known` tokens, of which the step loads the
        others, and before `padding` drafts that nobody made. A cache that reserves gives it blocks for `reserve`
        tokens."""
        request = self.waiting.popleft()
        request.reserved_tokens = reserve
        if found:
            self.kv.claim(request)
            if not request.preemptions:
                request.cached_tokens = found
        if self.kv.loads:
            begins(self, batch, request, found, known)
        request.ticket = ticket = self.tickets
        self.tickets = ticket + 1
        self.running[ticket] = request
        if self.windows is not None:
            request.slid = request.read_from = found
            request.chunk_step = self.step
        known = max(found, min(known, request.target - 1))
        request.computed = after = known + tokens
        request.cohort = self.decodes
        if self.drafting is None:
            self.kv.grow(request, found, after)
        else:
            request.padding = padding
            batch.padded += padding > 0
            reach = after + padding
            self._grow_beyond(request, found, reach + self.drafting.ahead(reach), after)
        batch.chunks.append((request, tokens, known))
        if self.holds and (held := self.holds.get(request.id)) is not None:
            self.let_go(held)
            self.resumed.append(held)
        if after != request.target:
            self.prefilling[ticket] = request

    def prefill(self, batch: Batch, request: Request, tokens: int) -> None:
        """Give a running request the blocks for its next `tokens` prompt tokens and put the chunk into the batch."""
        before = request.computed
        if self.windows is not None:
            self.slide(request)
            request.read_from = before
            request.chunk_step = self.step
        request.computed = after = before + tokens
        request.cohort = self.decodes
        if self.drafting is None:
            self.kv.grow(request, before, after)
        else:
            self._grow_beyond(request, *self.reach(request, after), after)
        batch.chunks.append((request, tokens, before))
        if after == request.target:
            self.prefilling.pop(request.ticket, None)
        else:
            self.prefilling[request.ticket] = request

    def reach(self, request: Request, after: int) -> tuple[int, int]:
        """The tokens that a running request has blocks for, and those that it needs them for to have `after` prompt
        tokens computed."""
        if self.drafting is None:
            return request.computed, after
        reach = min(after + self.drafting.lookahead, self.drafting.max_model_len)
        return request.reach, max(request.reach, reach)

    def _grow_beyond(self, request: Request, before: int, reach: int, computed: int) -> None:
        """A prompt, which has blocks for `before` tokens, gets those for `reach` tokens, `computed` of which the step
        computes or finds."""
        request.reach, request.landed = reach, computed
        self.kv.hold(request, before, reach)
        self.kv.filled(request, computed)

    def in_flight(self, request: Request) -> bool:
        """Whether the next token of a running request is on its way in another batch than the one that is planned next:
        until it is there it can be in none. See `sim.pipeline`."""
        cohort = request.cohort
        if cohort is None or cohort is self.decodes:
            return False
        return request.decoding or request.computed == request.target

    def preempt(self, batch: Batch, request: Request, planned: bool = False) -> None:
        """Take the KV of a running request and put it back into the queue, in front of all equals, to be recomputed.

        `planned`: the step that is being planned had given it tokens, which it loses too.
        """
        ticket, more = request.ticket, 0
        del self.running[ticket]
        batch.preempted.append(request)
        request.preemptions += 1
        if request.decoding:
            more = int(planned)
            self._stop_decoding(request, planned)
        else:
            self.prefilling.pop(ticket, None)
        held = request.computed + more
        known = request.registered(held, self.step - 1 + planned)
        if self.drafting is not None:
            held, known = request.reach, request.landed
        self.kv.preempt(request, held, known, not request.over)
        request.computed = 0
        request.lag_step = NEVER
        if not request.over:  # else it ended while it was still running: nothing to recompute
            request.target = request.prompt_tokens + request.emitted
            if self.by_priority:
                self.enqueue(request)
            else:
                self.waiting.insert(self._place(request), request)

    def swap_out(self, batch: Batch, request: Request) -> None:
        """Move the KV of a decoding request to the memory of the host."""
        del self.running[request.ticket]
        batch.preempted.append(request)
        request.preemptions += 1
        self._stop_decoding(request)
        self.kv.release(request, request.computed, 0, False)
        batch.copied_blocks += self.kv.blocks(request.computed)
        self.swapped.append(request)

    def swap_in(self, batch: Batch) -> None:
        """Who was swapped out first gets its KV back, and a block for its next token if it needs one, and decodes."""
        request, kv, decodes = self.swapped.popleft(), self.kv, self.decodes
        request.ticket = ticket = self.tickets
        self.tickets = ticket + 1
        self.running[ticket] = request
        kv.free -= kv.blocks(request.computed + 1)
        batch.copied_blocks += kv.blocks(request.computed)
        batch.swapped_in.append(request)
        decodes.begin(request, request.output_tokens - request.emitted)
        decodes.join(request, decodes.step)

    def _stop_decoding(self, request: Request, planned: bool = False) -> None:
        """It has `emitted` its tokens, and has those `computed` that it has computed; with drafts, `planned` says
        whether it has blocks for the step that is being planned."""
        decodes = self.decodes
        decodes.leave(request, decodes.step, planned and self.drafting is not None)
        if request.finish_step >= decodes.step:
            request.emitted = request.output_tokens - decodes.left(request, decodes.step)
            decodes.give_up(request)

    def place_first(self, requests: list[Request]) -> None:
        """These running requests go before all others from now on, in this order."""
        for request in reversed(requests):
            del self.running[request.ticket]
            self._first -= 1
            request.ticket = self._first
            self.running[request.ticket] = request

    def slide(self, request: Request) -> None:
        """Before its next tokens get their blocks, `request` gives back what its windows have passed."""
        windows, step = self.windows, self.decodes.step
        assert windows is not None
        if request.decoding:
            if step > request.joined:
                request.slid = max(request.slid, windows.slid(request, step - 1))
            self.kv.slide(request, windows.slid(request, step))
        else:
            in_flight = self._late and request.chunk_step == self.step - 1
            self.kv.slide(request, request.read_from if in_flight else request.computed)

    def land(self) -> None:
        """No step is in flight any more, though the last plan was none: what that step read can be given back, and what
        it accepted of drafts is known."""
        if isinstance(self.decodes, SpeculativeDecodes) and self.drafting is not None and self.drafting.asynchronous:
            for request in self.running.values():
                if request.decoding:
                    self.decodes.land(request)
        if not self._late:
            return
        for request in self.running.values():
            decoding = request.decoding
            if decoding:
                self.decodes.leave(request, self.decodes.step)
            request.read_from = request.computed
            if decoding:
                self.decodes.join(request, self.decodes.step)

    def release(self, request: Request, registered: int) -> None:
        """A request that is over gives back its place and its blocks; a cache may keep those of `registered` tokens.
        One whose KV is `kept`, or held, gives back its place only."""
        del self.running[request.ticket]
        if request.kept:
            self.kept += 1
            self.kv.keep(request, request.computed)
        elif request.hold is not None and request.finished:
            self.holds[request.hold.next] = request
        else:
            held = request.computed if self.drafting is None else request.reach
            self.kv.release(request, held, registered, False)

    def let_go(self, request: Request) -> None:
        """What is held of a request that is over stays no longer than a cache keeps it."""
        assert request.hold is not None
        del self.holds[request.hold.next]
        known = request.prompt_tokens + request.output_tokens - 1
        self.kv.release(request, request.computed, min(request.computed, known), False)

    def give_back(self, request: Request) -> None:
        """What was `kept` of a request that is over is needed no more."""
        self.kept -= request.computed > 0  # else it was preempted with its last token in flight, and nothing stayed
        self.kv.release(request, request.computed, request.computed, False)


def rank(request: Request) -> tuple[int, float, int]:
    """The order of a queue by priority; of requests that arrive at once, the one submitted first goes first."""
    return request.priority, request.arrival_s, request.id
