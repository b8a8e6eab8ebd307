"""One replica reads a prompt, another answers: who hands over to whom, and what it waits for on the way.

As in vLLM with a pulling connector (`kv_connector/v1/nixl`): the prefill side computes one token; its blocks stay until
the decode side has them, which it reserves before it pulls; with a pushing one the same, but for whose host posts. The
decode side computes the prompt's last token again, and streams the first token, unless that comes from the prefill side
(`first_token`). A transfer waits for the host that posts it, and for the links of both replicas, one after the other.
What a transfer costs it is told; a time limit on what is kept it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sim.clock import ARRIVAL, Clock
from sim.request import Request
from sim.steplog import CANCELLED, LENGTH, REJECTED, STOP, Log
from sim.wires import Transfer, Wires

if TYPE_CHECKING:
    from sim.direct import Direct


@dataclass(frozen=True, slots=True)
class Split:
    """How prefill hands over to decode.

    `transfers`: what moving KV costs, by the numbers of the prefill and the decode pool. `pull`: the decode side's host
    posts transfers, else the prefill side's; `posts_first`: before links are busy. `first_token`: which side streams
    it. `local_tokens`: prompts up to so long are read by the decode side itself. `router` and `parameters`: who of the
    decode side gets a request; the prefill side's are the cluster's. `bootstraps`: the decode side has its blocks
    before the prompt is read, and KV is sent with every chunk (`sim.bootstrap`). `layers`: in so many pieces KV is sent
    while the last chunk is computed (`sim.pushed`); 0: not before that is over.
    """

    transfers: Mapping[tuple[int, int], Transfer]
    router: str = "round-robin"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    pull: bool = True
    posts_first: bool = False
    first_token: Literal["decode", "prefill"] = "decode"
    local_tokens: int = 0
    bootstraps: bool = False
    layers: int = 0


class HandOver:
    """A client's `request`, and the two that the replicas see: `reading` and, once that is done, `answering`."""

    __slots__ = ("_desk", "answering", "reading", "request")

    def __init__(self, request: Request, desk: SplitDesk) -> None:
        self._desk = desk
        self.request = request
        reading = Request(request.id, request.arrival_s, request.prompt_tokens, 1, 1, request.priority)
        reading.of, request.of = self, self
        reading.streams = desk.split.first_token == "prefill"
        reading.kept = request.output_tokens > 1 or not reading.streams
        self.reading = reading
        self.answering: Request | None = None

    @property
    def all(self) -> tuple[Request]:
        """The one that a replica has now."""
        return (self.answering or self.reading,)

    @property
    def begun(self) -> bool:
        """The client has its first token."""
        part = self.reading if self._desk.split.first_token == "prefill" else self.answering
        return part is not None and part.first_token_s == part.first_token_s

    def record(self, part: Request, tokens: int) -> int:
        """A part is over, which yielded `tokens`. Returns what the client received if the request is over, else -1."""
        if part is self.reading and part.finished and part.kept:
            return -1
        whole, reading = self.request, self.reading
        if part is reading:
            reading.kept = False  # nobody will pull it
        whole.outcome = part.outcome
        if part.finished:
            whole.outcome = LENGTH if whole.output_tokens == whole.max_tokens else STOP
        whole.replica = part.replica
        whole.finish_s, whole.first_step, whole.last_step = part.finish_s, part.first_step, part.last_step
        whole.sent_s, whole.queued_s = reading.sent_s, reading.queued_s
        whole.scheduled_s, whole.cached_tokens = reading.scheduled_s, reading.cached_tokens
        whole.read = reading.read + (part.read if part is not reading else 0)
        whole.preemptions = reading.preemptions + (part.preemptions if part is not reading else 0)
        early = self._desk.split.first_token == "prefill"
        whole.first_token_s = (reading if early else part).first_token_s
        if part.outcome in REJECTED:
            return whole.output_tokens
        return tokens + (early and part is not reading)

    def pull(self, part: Request, found: int, reserved_s: float) -> None:
        """Its decode replica has the blocks since `reserved_s`, and has found `found` tokens of them."""
        self._desk.pull(self, part, found, reserved_s)

    def ended(self, part: Request, now: float, over: Callable[[Request, float], None]) -> None:
        """A part is over, and `over` says so of the whole once it is."""
        self._desk.ended(self, part, now, over)


class SplitDesk:
    """Takes requests for one model whose replicas read or answer: `prefill` and `decode` choose among them."""

    def __init__(
        self, clock: Clock, log: Log, prefill: Direct, decode: Direct, split: Split, pools: Sequence[int]
    ) -> None:
        self.split = split
        self._clock = clock
        self._log = log
        self._prefill = prefill
        self._decode = decode
        self._pools = pools  # of each replica
        self.on_free: Callable[[], None] = lambda: None
        """Called when a prefill replica need no longer keep what it did."""
        self._wires = Wires(len(pools), split.pull, split.posts_first)

    def submit(self, request: Request) -> None:
        """A client's request arrives now."""
        if request.prompt_tokens <= self.split.local_tokens:
            self._decode.submit(request)
        else:
            reading = HandOver(request, self).reading
            reading.entered_s = request.entered_s
            self._prefill.submit(reading)

    def cancel(self, request: Request, now: float) -> None:
        """Its client has given up."""
        hand_over = request.of
        if not isinstance(hand_over, HandOver):
            self._decode.cancel(request, now)
        elif hand_over.answering is None:
            self._prefill.cancel(hand_over.reading, now)
        else:
            self._decode.cancel(hand_over.answering, now)

    def over(self, request: Request) -> None:
        """A client's request is over."""
        if request.of is None:  # the decode side has read it itself
            self._decode.over(request)

    def ended(self, hand_over: HandOver, part: Request, now: float, over: Callable[[Request, float], None]) -> None:
        """One of the two requests is over."""
        whole, reading = hand_over.request, hand_over.reading
        if part is reading:
            self._prefill.over(part)
            if part.finished and part.kept:
                self._answer(hand_over, now)
                return
        else:
            self._decode.over(part)
            if part.outcome in (CANCELLED, *REJECTED) and part.pulls:
                self._give_back(reading, now)
        over(whole, now)

    def _answer(self, hand_over: HandOver, now: float) -> None:
        whole, reading = hand_over.request, hand_over.reading
        early = int(self.split.first_token == "prefill")
        answering = Request(
            whole.id, now, whole.prompt_tokens + early, whole.output_tokens - early, whole.max_tokens - early,
            whole.priority,
        )  # fmt: skip
        answering.of = hand_over
        answering.pulls = True
        if early:
            answering.gap_from_s = reading.first_token_s
        hand_over.answering = answering
        self._decode.submit(answering)

    def pull(self, hand_over: HandOver, request: Request, found: int, reserved_s: float) -> None:
        """The decode side has the blocks for `request` since `reserved_s`: what it has not found of the prompt moves.

        An asynchronous engine says so when the step begins that it has planned with it, one step late: transfers of
        other replicas that were posted meanwhile come first.
        """
        if hand_over.request.of is not hand_over:  # lost with its prefill replica after this was planned
            self._decode.front_end(request).replica.state.pulled(request)
            return
        if not hand_over.reading.kept:  # it was given up after this was planned
            self._decode.front_end(request).replica.transferred(request, self._clock.now)
            return
        source, to = hand_over.reading.replica, request.replica
        tokens = hand_over.request.prompt_tokens - found
        cost = self.split.transfers[self._pools[source], self._pools[to]]
        start_s, end = self._wires.send(cost, tokens, source, to, reserved_s + cost.fixed_s)
        read_s, moved_bytes = hand_over.reading.finish_s, cost.moved_bytes(tokens)
        self._log.transfer(hand_over.request.id, source, to, tokens, moved_bytes, read_s, reserved_s, start_s, end)
        if end > self._clock.now:
            self._clock.call_at(end, lambda _: self._moved(hand_over, request), ARRIVAL)
        else:
            self._moved(hand_over, request)

    def _moved(self, hand_over: HandOver, request: Request) -> None:
        now, replica = self._clock.now, self._decode.front_end(request).replica
        if hand_over.request.of is not hand_over:
            return  # lost since with one of the two replicas
        self._give_back(hand_over.reading, now)
        if request in replica.state.pulling:  # else the decode replica has failed since
            replica.transferred(request, now)

    def _give_back(self, reading: Request, now: float) -> None:
        if reading.kept:  # else the prefill replica has failed since
            reading.kept = False
            self._prefill.front_end(reading).replica.transferred(reading, now)
            self.on_free()

    def came(self, numbers: Sequence[int], now: float) -> None:
        """From now on these replicas of one pool take requests."""
        self._side(numbers[0]).came(numbers, now)

    def gone(self, number: int) -> None:
        """It takes no more."""
        self._side(number).gone(number)

    def has(self, number: int) -> bool:
        """Whether it has anything left to do, or KV that somebody is going to pull."""
        return self._side(number).has(number) or bool(self._kept_by(number))

    def lost(self, number: int, parts: Sequence[tuple[Request, int]], now: float) -> dict[Request, int]:
        """It has failed, with `parts`: the clients' requests that are lost, and what their clients have of them. A
        prefill replica loses what it keeps, too: who was to pull that is taken back from the decode side."""
        found: dict[Request, int] = {}
        for part, tokens in self._side(number).lost(number, parts, now).items():
            hand_over = part.of
            if not isinstance(hand_over, HandOver):
                found[part] = tokens
                continue
            answering = part is not hand_over.reading
            if answering:
                self._give_back(hand_over.reading, now)
            found[hand_over.request] = tokens + (answering and self.split.first_token == "prefill")
        for part in self._kept_by(number):
            hand_over = part.of
            assert isinstance(hand_over, HandOver)
            hand_over.reading.kept = False
            if not part.over:
                tokens = self._decode.withdraw(part, now) + (self.split.first_token == "prefill")
                found[hand_over.request] = tokens
                self._decode.front_end(part).replica.lose_pull(part, now)
        return found

    def record_unfinished(self) -> None:
        """The run is stopped: log the requests for which there is no replica."""
        self._prefill.record_unfinished()
        self._decode.record_unfinished()

    @property
    def waiting(self) -> list[Request]:
        """Requests for which there is no replica now."""
        return [*self._prefill.waiting, *self._decode.waiting]

    def waiting_for(self, number: int) -> int:
        """How many requests there are that it would get, were it there."""
        return self._side(number).waiting_for(number)

    def reads(self, number: int) -> bool:
        """Whether that replica is of the prefill side."""
        return number in self._prefill

    def answers(self, number: int) -> bool:
        """Whether it is of the decode side."""
        return number in self._decode

    def _side(self, number: int) -> Direct:
        return self._prefill if number in self._prefill else self._decode

    def _kept_by(self, number: int) -> list[Request]:
        """The requests on the decode side whose KV is there, those that were given up while it moves among them."""
        return [
            part
            for part in (self._decode.parts if number in self._prefill else ())
            if isinstance(part.of, HandOver) and part.of.reading.kept and part.of.reading.replica == number
        ]
