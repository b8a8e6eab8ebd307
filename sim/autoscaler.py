"""How many replicas a pool is to have: looked at now and then, in proportion to a metric, as Kubernetes does it.

The rule is that of its horizontal pod autoscaler (`pkg/controller/podautoscaler`: `horizontal.go` and
`replica_calculator.go`): as many as bring the metric to its target, unless it is within a tolerance of that; of what it
wanted during a window the most counts before it scales down, the least before it scales up. Limits on how fast it
scales (4 more, or twice as many, within 15 s) it does not know. SLO attainment is in no proportion to replicas: one
more while it is missed, one fewer while all requests meet it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf

from sim.changes import Autoscale
from sim.frontend import FrontEnd
from sim.lives import Lives
from sim.request import Request


class Autoscaler:
    """Starts and drains replicas of `pool`. `waiting()`: how many requests wait for one at the gateway."""

    def __init__(
        self,
        pool: int,
        rule: Autoscale,
        lives: Lives,
        front_ends: Sequence[FrontEnd],
        waiting: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._rule = rule
        self._lives = lives
        self._front_ends = front_ends
        self._waiting = waiting
        self._wanted = deque([(0.0, len(lives.counted(pool)))])
        self._met: deque[tuple[float, bool]] = deque()
        self._acted_s = 0.0
        lives.later(rule.every_s, self._look)

    def over(self, request: Request, now: float) -> None:
        """A request is over; whether it met its SLO counts for a while."""
        if self._rule.metric == "slo":
            self._met.append((now, request.finished and meets(request, self._rule.slo(request.id))))

    def _look(self, now: float) -> None:
        rule, lives = self._rule, self._lives
        has = len(lives.counted(self._pool))
        wanted = min(max(self._desired(has, now), rule.least), rule.most)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - max(rule.up_after_s, rule.down_after_s):
            self._wanted.popleft()
        most = max([wanted, *(n for at, n in self._wanted if at > now - rule.down_after_s)])
        least = min([wanted, *(n for at, n in self._wanted if at > now - rule.up_after_s)])
        to = min(max(has, least), most)
        if to > has:
            lives.start(self._pool, to - has)
        for unit in lives.counted(self._pool)[: max(has - to, 0)]:
            lives.drain(unit)
        if to != has:
            self._acted_s = now
        patience_s = max(rule.up_after_s, rule.down_after_s) + rule.window_s + rule.every_s
        if lives.hope() or now - self._acted_s <= patience_s:
            lives.later(rule.every_s, self._look)

    def _desired(self, has: int, now: float) -> int:
        """How many the metric asks for, of a pool that `has` so many."""
        rule = self._rule
        if rule.metric == "slo":
            while self._met and self._met[0][0] <= now - rule.window_s:
                self._met.popleft()
            if not self._met:
                return has
            share = sum(met for _, met in self._met) / len(self._met)
            return has + 1 if share < rule.target else has - 1 if share == 1 else has
        units = self._lives.up(self._pool)
        there = [self._front_ends[number] for unit in units for number in unit]
        if rule.metric == "kv":
            total = sum(self._front_ends[number].kv_used / len(unit) for unit in units for number in unit)
        elif rule.metric == "waiting":
            total = self._waiting() + sum(front_end.waiting for front_end in there)
        else:
            total = self._waiting() + sum(front_end.in_flight for front_end in there)
        ratio = total / (rule.target * has) if has else inf
        return has if abs(ratio - 1) <= rule.tolerance else ceil(total / rule.target)


def meets(request: Request, limits: Mapping[str, float]) -> bool:
    """Whether a finished request meets its limits (`ttft`, `tpot`, `e2e`, in seconds): see `sim.metrics.meets`."""
    gaps = request.output_tokens - 1
    found = {
        "ttft": request.first_token_s - request.arrival_s,
        "tpot": (request.finish_s - request.first_token_s) / gaps if gaps else 0.0,
        "e2e": request.finish_s - request.arrival_s,
    }
    return all(found[name] <= limit for name, limit in limits.items())
