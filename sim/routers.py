"""Which replica gets a request: one function a router, one line in `ROUTERS`.

A router is given the `Fleet` it chooses from and returns what names, for a request, the index of a replica in it; its
keyword-only parameters become scenario keys. What it may know of a replica is what it has handed to it, and what the
replica tells when it is asked; never the length of an answer.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Annotated

from sim.request import Request
from workloads.parameters import Number

if TYPE_CHECKING:
    import numpy as np

    from sim.clock import Clock
    from sim.frontend import FrontEnd
    from sim.prefixcache import Path

Choose = Callable[[Request], int]
Share = Annotated[float, Number("a share", 0, 1)]
Requests = Annotated[int, Number("a number of requests", 0, 10**9, whole=True)]
Factor = Annotated[float, Number("a factor", 1, 10**9)]


@dataclass(frozen=True, slots=True)
class Known:
    """What a gateway can see in requests, by their id: `paths`, what a prompt begins with (as a prefix cache of blocks
    of `block_size` tokens is told), and `session`, the one they belong to; None where the workload does not say it."""

    paths: Callable[[int], Path] | None = None
    block_size: int = 16
    session: Callable[[int], int] | None = None


class Fleet:
    """The replicas that a router chooses from, and what it knows of them.

    `weights`: one a replica. `stale_s`: loads are looked at, all at once, at most so often (0: always afresh). `up`:
    the indexes of those that take requests now, in order; that one is gone is known at once.
    """

    def __init__(
        self,
        replicas: Sequence[FrontEnd],
        weights: Sequence[float],
        rng: np.random.Generator,
        clock: Clock,
        known: Known,
        stale_s: float,
    ) -> None:
        self.replicas = list(replicas)
        self.up = list(range(len(replicas)))
        self.weights = weights
        self.known = known
        self._rng = rng
        self._clock = clock
        self._stale_s = stale_s
        self.loads: list[Load] = []
        self.forget: list[Callable[[int], None]] = []
        self.welcome: list[Callable[[int], None]] = []
        """What a router does when the replica of an index is gone, and with it what it had, and when one is there."""

    @property
    def count(self) -> int:
        """How many replicas there are, those that take none included."""
        return len(self.replicas)

    def gone(self, index: int) -> None:
        """The replica of that index takes no requests any more."""
        self.up.remove(index)
        for load in self.loads:
            load.gone(index)
        for forget in self.forget:
            forget(index)

    def came(self, index: int, replica: FrontEnd) -> None:
        """From now on `replica` takes requests under that index."""
        self.replicas[index] = replica
        insort(self.up, index)
        for load in self.loads:
            load.came(index)
        for welcome in self.welcome:
            welcome(index)

    def load(self, measure: Callable[[Request], int]) -> Load:
        """What each replica has that is not over yet, in units of `measure`."""
        load = Load(self.count, measure, self.fresh(), self.up)
        self.loads.append(load)
        return load

    def fresh(self) -> Callable[[], bool] | None:
        """A function that says whether loads may be looked at again, and takes note of it; None: always."""
        stale_s, clock, last = self._stale_s, self._clock, -inf

        def again() -> bool:
            nonlocal last
            if clock.now - last < stale_s:
                return False
            last = clock.now
            return True

        return again if stale_s else None

    def draws(self, but: int = 0) -> Iterator[int]:
        """Random whole numbers below the number of those that are up, less `but`, from the fleet's own stream."""
        while True:
            up = len(self.up)
            for drawn in self._rng.integers(max(1, up - but), size=4096).tolist():
                yield drawn
                if len(self.up) != up:
                    break

    def placed(self, index: int, request: Request) -> None:
        """`request` goes to the replica of that index."""
        for load in self.loads:
            load.add(index, load.measure(request))

    def over(self, index: int, request: Request) -> None:
        """It is finished, rejected or given up."""
        for load in self.loads:
            load.take(index, load.measure(request))


class Load:
    """Loads of the replicas, and whose is the least: of equal ones, that which was given a request the longest ago.

    `fresh` None: they are looked at afresh every time. `up`: which of them there are (see `Fleet`).
    """

    def __init__(
        self, count: int, measure: Callable[[Request], int], fresh: Callable[[], bool] | None, up: Sequence[int]
    ) -> None:
        self.measure = measure
        self._fresh = fresh
        self._up = up
        self._there = [True] * count
        self._now = [0] * count
        self._seen = [0] * count
        self._last = list(range(-count, 0))  # the turn in which it was given a request
        self._turn = 0
        self._heap: list[tuple[int, int, int]] = []  # (load, last, index); those that are no longer true stay in it
        self._rebuild()

    @property
    def seen(self) -> Sequence[int]:
        """The loads, as they were when they were looked at last."""
        if self._fresh is None:
            return self._now
        if self._fresh():
            self._seen[:] = self._now
        return self._seen

    def least(self) -> int:
        """The index of the replica with the least load."""
        if self._fresh is not None:
            seen, last = self.seen, self._last
            return min(self._up, key=lambda i: (seen[i], last[i]))
        heap, now, last, there = self._heap, self._now, self._last, self._there
        while True:
            load, turn, index = heap[0]
            if load == now[index] and turn == last[index] and there[index]:
                return index
            heappop(heap)

    def gone(self, index: int) -> None:
        """The replica of that index is no longer to be named."""
        self._there[index] = False

    def came(self, index: int) -> None:
        """There is one again, with what the last one there had when it went and was not over yet."""
        self._there[index] = True
        self._seen[index] = self._now[index]
        heappush(self._heap, (self._now[index], self._last[index], index))

    def add(self, index: int, amount: int) -> None:
        """The replica of that index is given so much."""
        self._last[index] = self._turn
        self._turn += 1
        self.take(index, -amount)

    def take(self, index: int, amount: int) -> None:
        """It has so much less."""
        self._now[index] -= amount
        heappush(self._heap, (self._now[index], self._last[index], index))
        if len(self._heap) > 8 * len(self._now) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(load, self._last[i], i) for i, load in enumerate(self._now)]
        heapify(self._heap)


def one(request: Request) -> int:
    """A request counts as one."""
    return 1


def round_robin(fleet: Fleet) -> Choose:
    """One after the other."""
    up, last = fleet.up, -1

    def choose(request: Request) -> int:
        nonlocal last
        at = bisect_right(up, last)
        last = up[at if at < len(up) else 0]
        return last

    return choose


def random(fleet: Fleet) -> Choose:
    """Any of them, all equally likely."""
    draws, up = fleet.draws(), fleet.up
    return lambda request: up[next(draws)]


def weighted(fleet: Fleet) -> Choose:
    """In turn, each as often as its pool's `weight` says. One that comes back takes its turn as if it were new."""
    heap, due = [(1 / weight, i) for i, weight in enumerate(fleet.weights)], 0.0
    heapify(heap)

    def forget(index: int) -> None:
        heap[:] = [turn for turn in heap if turn[1] != index]
        heapify(heap)

    def choose(request: Request) -> int:
        nonlocal due
        due, index = heap[0]
        heapreplace(heap, (due + 1 / fleet.weights[index], index))
        return index

    fleet.forget.append(forget)
    fleet.welcome.append(lambda index: heappush(heap, (due + 1 / fleet.weights[index], index)))

    return choose


def least_outstanding(fleet: Fleet) -> Choose:
    """The one with the fewest requests that are not over yet."""
    load = fleet.load(one)
    return lambda request: load.least()


def least_tokens(fleet: Fleet) -> Choose:
    """The one whose requests that are not over yet have the fewest prompt tokens."""
    load = fleet.load(lambda request: request.prompt_tokens)
    return lambda request: load.least()


def power_of_two(fleet: Fleet) -> Choose:
    """Of two that are drawn at random, the one with fewer requests that are not over yet."""
    load, first, second, up = fleet.load(one), fleet.draws(), fleet.draws(but=1), fleet.up

    def choose(request: Request) -> int:
        i, j, seen = next(first), next(second), load.seen
        a, b = up[i], up[j + (j >= i and len(up) > 1)]
        return b if seen[b] < seen[a] else a

    return choose


def kv_utilisation(fleet: Fleet) -> Choose:
    """The one with the least of its KV cache in use, as it says itself; of equal ones, the one with the fewest requests
    that are not over yet."""
    load, fresh = fleet.load(one), fleet.fresh()
    used = [0.0] * fleet.count

    def choose(request: Request) -> int:
        if fresh is None or fresh():
            used[:] = [replica.kv_used for replica in fleet.replicas]
        seen = load.seen
        return min(fleet.up, key=lambda i: (used[i], seen[i], i))

    return choose


def session_affinity(fleet: Fleet) -> Choose:
    """Where the session's first turn went; first turns, and those of sessions whose replica is gone, go to the one with
    the fewest requests that are not over yet."""
    load, where, session = fleet.load(one), dict[int, int](), fleet.known.session
    assert session is not None

    def forget(index: int) -> None:
        for of in [of for of, home in where.items() if home == index]:
            del where[of]

    fleet.forget.append(forget)

    def choose(request: Request) -> int:
        of = session(request.id)
        if of not in where:
            where[of] = load.least()
        return where[of]

    return choose


def prefix_affinity(
    fleet: Fleet, *, cache_threshold: Share = 0.3, balance_abs_threshold: Requests = 64,
    balance_rel_threshold: Factor = 1.5,
) -> Choose:  # fmt: skip
    """Where most of the prompt's beginning was sent before, if that is more than `cache_threshold` of the prompt; else,
    and while loads differ by more than both thresholds, to the one with the fewest requests that are not over yet.

    The rule and the defaults of SGLang Model Gateway's `cache_aware` policy, 0.3. The
    router remembers what it has sent where, until that one is gone, and does not know what was evicted since.
    """
    load, sent, paths, size = fleet.load(one), dict[int, dict[int, int]](), fleet.known.paths, fleet.known.block_size
    up, count = fleet.up, fleet.count
    assert paths is not None

    def forget(index: int) -> None:
        for ends in sent.values():
            ends.pop(index, None)

    fleet.forget.append(forget)

    def choose(request: Request) -> int:
        path, seen = paths(request.id), load.seen
        loads = seen if len(up) == count else [seen[i] for i in up]
        least, most = min(loads), max(loads)
        index = load.least()
        if not (most - least > balance_abs_threshold and most > balance_rel_threshold * least):
            found = _longest(sent, path)
            if found is not None and found[0] * size > cache_threshold * request.prompt_tokens:
                index = found[1]
        for content, end in path:
            ends = sent.setdefault(content, {})
            ends[index] = max(ends.get(index, 0), end)
        return index

    return choose


def _longest(sent: Mapping[int, Mapping[int, int]], path: Path) -> tuple[int, int] | None:
    """(blocks, replica) of the longest beginning of `path` that one was sent; of equal ones the lowest index."""
    found: dict[int, int] = {}
    for at, (content, end) in enumerate(path):
        here = {i: min(to, end) for i, to in sent.get(content, {}).items() if not at or found.get(i) == path[at - 1][1]}
        if not here:
            break
        found |= here
    if not found:
        return None
    index = min(found, key=lambda i: (-found[i], i))
    return found[index], index


ROUTERS: dict[str, Callable[..., Choose]] = {
    "round-robin": round_robin,
    "random": random,
    "weighted": weighted,
    "least-outstanding": least_outstanding,
    "least-tokens": least_tokens,
    "power-of-two": power_of_two,
    "kv-utilisation": kv_utilisation,
    "session-affinity": session_affinity,
    "prefix-affinity": prefix_affinity,
}
"""Router name -> function."""
