"""SGLang's scheduler where prefill and decode are apart (`--disaggregation-mode`).

Semantics as in `disaggregation/prefill.py` and `decode.py` (SGLang 0.5.9). The prefill side plans prompts only, by the
rules of `sim.schedulers.sglang`; a prompt whose KV is still on its way out keeps its slot. The decode side gives a
request blocks for its prompt (`DecodePreallocQueue`) if `num_reserved_decode_tokens` are left for each that it has, and
if each could come to its `max_tokens` were all others retracted. Who has got the KV joins those that decode in a batch
of its own, which computes nothing: the prefill side has the first token. Who is retracted goes to the memory of the
host, and nobody new gets blocks before all of those are back.

Not modelled: polling less often than every iteration; that a token in flight is lost with a retraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.batch import Batch
from sim.request import Request
from sim.schedulers.sglang import CLIP, Sglang
from sim.state import State

READY = -1
"""The ticket of those whose KV has come and was looked for: they go before all whose KV has come since."""
FEW = 32
"""Up to so many running requests there are slots for twice as many others (`pre_alloc_size`)."""


@dataclass(slots=True)
class SglangPrefill(Sglang):
    """The side that reads."""

    overruns = False

    def plan(self, state: State) -> Batch:
        """The next step's batch, of prompts only; takes its blocks."""
        batch = Batch()
        self._full = False
        for request in state.prefilling.values():
            state.kv.keep(request, request.computed)
        if state.prefilling or state.waiting:
            self._prefill(state, batch)
        self._check_room(state)
        return batch

    def _places(self, state: State) -> int:
        """Slots that nobody has; a prompt that goes on counts as if it needed another one."""
        return self.max_running_requests - len(state.running) - state.kept


@dataclass(slots=True)
class SglangDecode(Sglang):
    """The side that answers. `look` is what it does before it plans: an engine that plans ahead looks for the next plan
    when a step begins."""

    more_room = "raise num_reserved_decode_tokens, or lower max_running_requests"
    remedy = "lower num_reserved_decode_tokens"
    _members: list[Request] = field(default_factory=list)  # running_batch.reqs: those of the last step, and who joined
    _joined: list[Request] = field(default_factory=list)  # by the last plan
    unsettled: bool = False  # the last plan, of nothing, was the first that knew of who has ended: the next sees more
    _looked: bool = False
    _copied: int = 0  # blocks that have come back from the host since the last plan

    @property
    def swaps(self) -> bool:
        """Who is retracted keeps what was computed."""
        return True

    @property
    def pulled_first(self) -> bool:
        """Who has got its KV goes before those who have no blocks."""
        return True

    def plan(self, state: State) -> Batch:
        """The next step's batch, or one that computes nothing, of those who join; takes its blocks."""
        batch = Batch()
        self.unsettled = bool(self._members or self._joined)
        if not self._looked:
            self.look(state, batch)
        self._looked = False
        batch.copied_blocks, self._copied = self._copied, 0
        synchronous = self.disable_overlap_schedule
        self._members += [request for request in self._joined if not (synchronous and request.over)]
        self._joined = []
        for request in _there(state)[: max(self.max_running_requests - len(self._members), 0)]:
            if request.ticket != READY:
                break
            self._join(state, batch)
        if batch.joins:
            self._joined, self._last = batch.joins, None
            batch.paused = True
            return batch
        self._decode(state, batch)
        self._check_room(state)
        return batch

    def look_ahead(self, state: State, batch: Batch) -> None:
        """The step of `batch` begins: what the plan after it does first."""
        self.look(state, batch)
        self._looked = True

    def look(self, state: State, batch: Batch) -> None:
        """Blocks for who was retracted and, if that is all of them, for who is new; and who has got its KV."""
        settled = not self._joined and not any(request.over for request in self._members)
        while state.swapped and self._slots(state) > 0:
            request = state.swapped[0]
            needed = request.prompt_tokens + request.emitted + self.num_reserved_decode_tokens
            if needed > self._spare(state) - self._reserved(state):
                break
            self._bring_back(state)
        if state.swapped:
            batch.most_steps = 1
            return
        if state.waiting and not state.waiting[-1].there and not (self._preallocate(state, batch) and settled):
            batch.most_steps = 1
        self._check_room(state)
        for request in _there(state):
            request.ticket = READY
        self._expect(state, batch)

    def wants(self, request: Request) -> int:
        """For its prompt, and what is reserved for its answer."""
        return request.prompt_tokens + self.num_reserved_decode_tokens

    def arrival_matters(self, state: State) -> bool:
        """It cannot while somebody ahead of it has no blocks."""
        return not state.swapped and (not state.waiting or state.waiting[-1].there)

    def _preallocate(self, state: State, batch: Batch) -> bool:
        """Blocks for the prompts of those at the head of the queue. Returns whether nothing can change about those
        behind while all only decode on."""
        kv, reserve, members = state.kv, self.num_reserved_decode_tokens, self._members
        retractable = sum(request.prompt_tokens + _out(state, request) for request in members)
        longest = max((request.prompt_tokens + min(request.max_tokens, CLIP) for request in members), default=0)
        alone, reserved = longest - retractable, self._reserved(state)
        there = _there(state)
        place = len(there)
        moving = len(state.pulling) + sum(request.ticket != READY for request in there)  # each has a metadata buffer
        slots = min(self._slots(state), 2 * self.max_running_requests - moving)
        allocatable = self._spare(state) - max(reserved, alone)
        while len(state.waiting) > place:
            request = state.waiting[place]
            needed = request.prompt_tokens + reserve
            to_the_end = request.prompt_tokens + min(request.max_tokens, CLIP) - retractable
            if slots <= 0 or max(needed, to_the_end) > allocatable:
                return slots <= 0 or (alone <= reserved and needed > allocatable)
            allocatable -= needed
            slots -= 1
            del state.waiting[place]
            kv.hold(request, 0, request.target)
            request.pulls = False
            request.computed = request.arriving = request.target
            request.ticket = state.tickets
            state.tickets += 1
            state.pulling[request] = None
            batch.pulls.append((request, 0))
        return True

    def _slots(self, state: State) -> int:
        """How many more requests it can have, with blocks or without."""
        most = self.max_running_requests
        taken = len(state.running) + len(state.pulling) + len(_there(state))
        return most + 2 * most * (most <= FEW) - taken

    def _reserved(self, state: State) -> int:
        """Tokens for those that it has."""
        return self.num_reserved_decode_tokens * (len(self._members) + len(state.pulling) + len(_there(state)))

    def _spare(self, state: State) -> int:
        """Free tokens, less those for the ones that have just joined."""
        return state.kv.free * state.kv.block_size - self.num_reserved_decode_tokens * len(self._joined)

    def _bring_back(self, state: State) -> None:
        """Who was retracted first has its KV again, and waits for a place."""
        request, kv = state.swapped.popleft(), state.kv
        blocks = kv.blocks(request.computed)
        kv.free -= blocks
        self._copied += blocks
        request.there, request.ticket, request.target = True, READY, request.computed
        state.waiting.insert(sum(each.ticket == READY for each in _there(state)), request)

    def _join(self, state: State, batch: Batch) -> None:
        request = state.waiting.popleft()
        request.there = False
        request.ticket = ticket = state.tickets
        state.tickets = ticket + 1
        state.running[ticket] = request
        batch.joins.append(request)

    def _decode(self, state: State, batch: Batch) -> None:
        decodes, kv = state.decodes, state.kv
        if not decodes.count:
            self._members, self._last = [], None
            return
        self.unsettled = False
        if decodes.demand(decodes.step) > kv.free:
            self._retract(state, batch)
        self._members = list(state.running.values())
        kv.decode(decodes, decodes.step, 1)
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        self._last = batch
        self._expect(state, batch)

    def _expect(self, state: State, batch: Batch) -> None:
        """Whether the next plan lets somebody join."""
        there = _there(state)
        if there and there[0].ticket == READY and len(self._members) < self.max_running_requests:
            batch.most_steps = 1

    def _retract(self, state: State, batch: Batch) -> None:
        """Those with the fewest output tokens, of these the longest prompts, go to the host until the others fit."""
        decodes, kv = state.decodes, state.kv
        order = self._by_output(state)
        while len(order) > 1 and (not batch.preempted or decodes.demand(decodes.step) > kv.free):
            state.swap_out(batch, request := order.pop())
            if request.over:  # with the token in flight
                state.swapped.pop()
        state.place_first(order)


def _there(state: State) -> list[Request]:
    """Those whose KV has come, at the head of the queue."""
    found = []
    for request in state.waiting:
        if not request.there:
            break
        found.append(request)
    return found


def _out(state: State, request: Request) -> int:
    """Output tokens of one that decodes or has ended."""
    if request.decoding:
        return request.output_tokens - (request.finish_step - state.decodes.step + 1)
    return request.output_tokens
