"""A request that both sides know from the start: how prefill and decode replicas of SGLang find together.

The gateway sends it to one of each. The decode side gives it blocks and says so, and the prefill side reads it from
then on; it sends the KV of every chunk, whole pages until the last one, when the chunk is computed. The decode side
streams all tokens, the first of which comes with the KV. Pieces wait for the host that posts them and for the links of
both replicas; that all are there is known `fixed_s` after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sim.clock import ARRIVAL
from sim.handover import HandOver, SplitDesk
from sim.request import NOT_YET, Request
from sim.steplog import LENGTH, REJECTED, STOP

if TYPE_CHECKING:
    from sim.split_replicas import PrefillSide


class Bootstrapped(HandOver):
    """A client's `request`, its `reading` and its `answering`, which begin together."""

    __slots__ = ("_bootstrap", "answer", "closed", "reserved_s", "sent")

    def __init__(self, request: Request, desk: BootstrapDesk) -> None:
        super().__init__(request, desk)
        self._bootstrap = desk
        self.reading.kept = self.reading.streams = True
        self.answer = self.answering = Request(
            request.id, request.arrival_s, request.prompt_tokens, request.output_tokens, request.max_tokens,
            request.priority,
        )  # fmt: skip
        self.answer.of = self
        self.answer.pulls = True
        self.reserved_s = NOT_YET  # when the decode side had its blocks
        self.sent = 0  # tokens of the prompt whose KV was sent
        self.closed = False  # its client has heard the end of it

    @property
    def ready(self) -> bool:
        """The decode side has its blocks."""
        return self.reserved_s == self.reserved_s

    def record(self, part: Request, tokens: int) -> int:
        """See `HandOver`. What becomes of a request is known on the decode side, unless the other turns it away."""
        whole, reading = self.request, self.reading
        if whole.over or (part is reading and part.outcome not in REJECTED):
            return -1
        whole.outcome = part.outcome
        if part.finished:
            whole.outcome = LENGTH if whole.output_tokens == whole.max_tokens else STOP
        whole.replica = part.replica
        whole.first_token_s, whole.finish_s = part.first_token_s, part.finish_s
        whole.first_step, whole.last_step = part.first_step, part.last_step
        whole.sent_s, whole.queued_s = reading.sent_s, reading.queued_s
        whole.scheduled_s, whole.cached_tokens = reading.scheduled_s, reading.cached_tokens
        whole.read = reading.read + (part.read if part is not reading else 0)
        whole.preemptions = part.preemptions
        return whole.output_tokens if part.outcome in REJECTED else tokens

    def computed(self, tokens: int, now: float) -> None:
        """The prefill side has the KV of the first `tokens` tokens of the prompt."""
        self._bootstrap.send(self, tokens, now)


class BootstrapDesk(SplitDesk):
    """As `SplitDesk`, for replicas that are `sim.split_replicas.SIDES`."""

    def submit(self, request: Request) -> None:
        """A client's request arrives now."""
        hand_over = Bootstrapped(request, self)
        for part, side in ((hand_over.reading, self._prefill), (hand_over.answer, self._decode)):
            part.entered_s = request.entered_s
            side.submit(part)

    def cancel(self, request: Request, now: float) -> None:
        """Its client has given up."""
        assert isinstance(request.of, Bootstrapped)
        self._decode.cancel(request.of.answer, now)

    def ended(self, hand_over: HandOver, part: Request, now: float, over: Callable[[Request, float], None]) -> None:
        """One of the two requests is over."""
        assert isinstance(hand_over, Bootstrapped)
        reading, answer = hand_over.reading, hand_over.answer
        if part is reading and part.finished:
            return  # not before its KV has moved
        (self._prefill if part is reading else self._decode).over(part)
        if not part.finished:
            self._drop_reading(reading, now)
            self._drop_answer(answer, now)
        if not hand_over.closed:
            hand_over.closed = True
            over(hand_over.request, now)

    def pull(self, hand_over: HandOver, request: Request, found: int, reserved_s: float) -> None:
        """The decode side has the blocks for `request` since `reserved_s`."""
        assert isinstance(hand_over, Bootstrapped)
        hand_over.reserved_s = reserved_s
        reading = hand_over.reading
        if reading.replica >= 0:
            side: PrefillSide = self._prefill.front_end(reading).replica  # type: ignore[assignment]
            side.ready(reading, reserved_s)

    def send(self, hand_over: Bootstrapped, tokens: int, now: float) -> None:
        """The KV of the prompt's first `tokens` tokens is there: what was not sent of it can be."""
        reading, answer = hand_over.reading, hand_over.answer
        source, to = reading.replica, answer.replica
        last = tokens == reading.prompt_tokens
        size = self._prefill.front_end(reading).replica.state.kv.block_size
        piece = (tokens if last else tokens // size * size) - hand_over.sent
        if piece <= 0:
            return
        hand_over.sent += piece
        cost = self.split.transfers[self._pools[source], self._pools[to]]
        start_s, end_s = self._wires.send(cost, piece, source, to, now)
        if last:
            end_s += cost.fixed_s
            moved_bytes = cost.moved_bytes(tokens)
            self._log.transfer(
                hand_over.request.id, source, to, tokens, moved_bytes, now, hand_over.reserved_s, start_s, end_s
            )
            self._clock.call_at(end_s, lambda _: self._all_moved(hand_over), ARRIVAL)

    def _all_moved(self, hand_over: Bootstrapped) -> None:
        if hand_over.closed:
            return  # given up, or lost with one of the two replicas
        now, answer = self._clock.now, hand_over.answer
        self._give_back(hand_over.reading, now)
        self._decode.front_end(answer).replica.transferred(answer, now)

    def _give_back(self, reading: Request, now: float) -> None:
        if reading.kept:
            self._prefill.over(reading)
        super()._give_back(reading, now)

    def _drop_reading(self, reading: Request, now: float) -> None:
        """Nobody wants what it reads any more."""
        if reading.finished:
            self._give_back(reading, now)
        elif not reading.over:
            reading.kept = False
            self._prefill.withdraw(reading, now)

    def _drop_answer(self, answer: Request, now: float, failed: bool = False) -> None:
        """Nothing will come for it any more: its blocks are free when the decode side looks, or, since it may be back
        by then under the same number, at once where the prefill replica has `failed`."""
        if not answer.over:
            self._decode.withdraw(answer, now)
        if answer.replica >= 0:
            replica = self._decode.front_end(answer).replica
            if failed:
                replica.lose_pull(answer, now)
            elif answer in replica.state.pulling:
                replica.transferred(answer, now)

    def lost(self, number: int, parts: Sequence[tuple[Request, int]], now: float) -> dict[Request, int]:
        """It has failed, with `parts`: the clients' requests that are lost, and what their clients have of them. A
        prefill replica loses what it keeps, too."""
        found: dict[Request, int] = {}
        lost = self._side(number).lost(number, parts, now)
        if number in self._prefill:
            kept = [answer.of.reading for answer in self._kept_by(number) if isinstance(answer.of, HandOver)]
            moving = [reading for reading in kept if reading.finished]
            for reading in moving:
                self._prefill.over(reading)
            lost |= dict.fromkeys(moving, 0)
        for part, tokens in lost.items():
            hand_over = part.of
            assert isinstance(hand_over, Bootstrapped)
            hand_over.closed = True
            if part is hand_over.answer:
                self._drop_reading(hand_over.reading, now)
                found[hand_over.request] = tokens
            else:
                part.kept = False
                self._drop_answer(hand_over.answer, now, failed=True)
                found[hand_over.request] = 0
        return found
