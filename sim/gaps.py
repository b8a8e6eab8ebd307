"""Between two tokens of a request that lie further apart than a step: since when it has had none, and for how long.

The gaps of one step follow from the log of steps. Here are those of requests that were preempted, left out of steps
one by one, or paused all together: these are one number for all of them, so that a pause costs nothing per request.
"""

from __future__ import annotations

from sim.batch import Batch
from sim.request import NOT_YET, Request
from sim.steplog import Log


class Gaps:
    """The gaps of one replica's requests, from the plan that begins them to the step that ends them.

    `behind`: decoding requests that were left out, whose last token is older than the others', each with its
    `gap_from_s`.
    """

    __slots__ = ("_log", "_new", "_paused_s", "behind")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._paused_s: float | None = None  # time of the last token of all others that decode
        self._new: list[Request] = []  # whose prompts were complete while all others were paused
        self.behind: list[Request] = []

    @property
    def open(self) -> bool:
        """The next step that decodes ends some: it is a row of its own in the log."""
        return bool(self.behind) or bool(self._new) or self._paused_s is not None

    def begin(self, batch: Batch, now: float) -> None:
        """A plan at `now` leaves requests out, or takes their KV."""
        since = now if self._paused_s is None else self._paused_s
        for request in batch.preempted + batch.skipped:
            if (request.emitted or request.decoding) and not request.over and request.gap_from_s != request.gap_from_s:
                request.gap_from_s = since
        if batch.paused:
            self._paused_s = since

    def token(self, request: Request, now: float, batch: Batch) -> None:
        """A prompt is complete at `now`: the gap of a preempted request ends, and in a paused step the next begins."""
        if request.gap_from_s == request.gap_from_s:
            self._end(request, now)
        if batch.paused:
            request.gap_from_s = now
            self._new.append(request)

    def end(self, batch: Batch, now: float, tokens: int) -> int:
        """A step that decodes ends at `now` with `tokens` tokens of decoding requests: how many of them came one step
        after their last one."""
        for late, waited in ((self.behind, False), (self._new, True)):
            for request in late:
                if request.decoding and request.gap_from_s == request.gap_from_s and request not in batch.skipped:
                    self._end(request, now, waited)
                    tokens -= 1
        self.behind, self._new = batch.skipped, []
        if self._paused_s is not None:
            if tokens:
                self._log.gap(self._paused_s, now, tokens)
                tokens = 0
            self._paused_s = None
        return tokens

    def _end(self, request: Request, now: float, waited: bool = False) -> None:
        self._log.gap(request.gap_from_s, now, 1, -1 if waited else request.id)
        request.gap_from_s = NOT_YET
