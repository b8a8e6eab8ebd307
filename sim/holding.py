"""KV that an engine holds between the turns of sessions: until the turn for which it stays, or the time is over, or
others wait for it and nothing else can go on."""

from __future__ import annotations

from collections import deque

from sim.request import Request
from sim.state import State
from sim.steplog import EXPIRED, GIVEN_UP, RESUMED, Log


class Holding:
    """What is held in the `state` of engine `index`. `expired`: held for long enough, and not yet let go."""

    __slots__ = ("_index", "_log", "_state", "expired")

    def __init__(self, index: int, state: State, log: Log) -> None:
        self._index = index
        self._state = state
        self._log = log
        self.expired: deque[Request] = deque()

    def expire(self, planned_s: float) -> None:
        """Let go what was to be held until then."""
        while self.expired and (request := self.expired[0]).hold_ends_s <= planned_s:
            self.expired.popleft()
            self.let_go(request, request.hold_ends_s, EXPIRED)

    def let_go(self, request: Request, now: float, why: int) -> None:
        """What is held of `request`, if it still is, is free; `why` indexes HOLDS of `sim.steplog`."""
        assert request.hold is not None
        if self._state.holds.get(request.hold.next) is request:
            self._state.let_go(request)
            self._log.hold(self._index, request, self._state.kv.blocks(request.computed), now, why)

    def resumed(self, now: float) -> None:
        """The turns have come for which some was held."""
        state = self._state
        for request in state.resumed:
            self._log.hold(self._index, request, state.kv.blocks(request.computed), now, RESUMED)
        state.resumed.clear()

    def give_up(self, now: float) -> bool:
        """With requests waiting and nothing to do for it, an engine lets go what it would hold for the shortest time
        from now on. Whether there was any."""
        holds = self._state.holds
        if not self._state.waiting or not holds:
            return False
        self.let_go(min(holds.values(), key=lambda request: request.hold_ends_s), now, GIVEN_UP)
        return True
