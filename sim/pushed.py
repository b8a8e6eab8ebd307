"""KV that is sent layer by layer while the last chunk of a prompt is computed, as vLLM's P2pNcclConnector does (0.19).

The gateway chooses both replicas at once, but sends the request to the second when the first has answered. In the step
that ends a prompt each layer's KV of the whole prompt is queued when the layer is computed; one thread sends what is
queued, piece by piece, and the step is not over before all is sent (`wait_for_sent`): nothing is kept after it. On the
decode side the KV lies in a buffer, which is taken to have room; a request gets its blocks and computes the prompt's
last token in the step that admits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.handover import HandOver, SplitDesk
from sim.request import Request


class Pushed(HandOver):
    """A client's `request`; who answers it is `chosen` before it is read, and begins once it is."""

    __slots__ = ("chosen", "goes_on")

    def __init__(self, request: Request, desk: PushDesk) -> None:
        super().__init__(request, desk)
        self.goes_on, self.reading.kept = self.reading.kept, False
        early = int(self.reading.streams)
        self.chosen = Request(
            request.id, request.arrival_s, request.prompt_tokens + early, request.output_tokens - early,
            request.max_tokens - early, request.priority,
        )  # fmt: skip
        self.chosen.of = self
        self.chosen.pulls = self.chosen.brought = True

    def record(self, part: Request, tokens: int) -> int:
        """See `HandOver`."""
        if part is self.reading and part.finished and self.goes_on:
            return -1
        return super().record(part, tokens)


class PushDesk(SplitDesk):
    """As `SplitDesk`, for prefill replicas that are `sim.split_replicas.PushSide`. Replicas do not come and go."""

    def submit(self, request: Request) -> None:
        """A client's request arrives now."""
        if request.prompt_tokens <= self.split.local_tokens:
            self._decode.submit(request)
            return
        hand_over = Pushed(request, self)
        hand_over.reading.entered_s = request.entered_s
        hand_over.chosen.replica = self._decode.choose(hand_over.chosen)
        self._prefill.submit(hand_over.reading)

    def ended(self, hand_over: HandOver, part: Request, now: float, over: Callable[[Request, float], None]) -> None:
        """One of the two requests is over."""
        assert isinstance(hand_over, Pushed)
        chosen = hand_over.chosen
        if part is not hand_over.reading:
            self._decode.over(part)
        else:
            self._prefill.over(part)
            if part.finished and hand_over.goes_on:
                chosen.arrival_s = chosen.entered_s = now
                if self.split.first_token == "prefill":
                    chosen.gap_from_s = part.first_token_s
                hand_over.answering = chosen
                self._decode.hand_to(chosen.replica, chosen)
                return
            self._decode.over(chosen)
        over(hand_over.request, now)

    def push(self, readings: Sequence[Request], start_s: float, end_s: float) -> float:
        """A step from `start_s` to `end_s` ends these prompts: when all that it sends has arrived."""
        source, pieces = readings[0].replica, []
        for reading in readings:
            hand_over = reading.of
            assert isinstance(hand_over, Pushed)
            to = hand_over.chosen.replica
            pieces.append((self.split.transfers[self._pools[source], self._pools[to]], reading.prompt_tokens, to))
        done = self._wires.push(pieces, source, start_s, end_s, self.split.layers)
        for reading, (cost, tokens, to) in zip(readings, pieces, strict=True):
            self._log.transfer(
                reading.id, source, to, tokens, cost.moved_bytes(tokens), end_s, end_s, end_s, max(done, end_s)
            )
        return done
