"""In what order decoding requests give blocks back as their windows slide, for the queue of free blocks of a cache.

Once its window is full a request gives one block of each of that window's tables back in every `block_size`-th step,
after those that were admitted before it: that order is known for each phase, so that many steps are put into the queue
at once, as counts. Steps in which a request does otherwise, or gives back blocks that others may look for, are noted,
and put request by request. What was put in the last steps can be named, should a request be preempted. Where only the
ends of windows are kept, what they pass later goes to the front of the queue, and is put with what decodes take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING

from sim.request import NEVER

if TYPE_CHECKING:
    from sim.hybridcache import HybridCache
    from sim.request import Request
    from sim.windowdecodes import WindowDecodes

Steady = tuple[int, int, int]
"""A request that gives back one block a table of a window: its ticket, the window, its `kv_offset`."""


class Slides:
    """Those of `decodes`, put into the queue of `cache`: of all steps up to `planned`, when `put` is asked for."""

    __slots__ = (
        "_apart", "_blocks", "_cache", "_decodes", "_done", "_flows", "_recent", "_steady", "_takers", "_through",
        "planned",
    )  # fmt: skip

    def __init__(self, decodes: WindowDecodes, cache: HybridCache) -> None:
        self._decodes = decodes
        self._cache = cache
        self.planned = self._done = decodes.step - 1
        self._through = -1  # of step `_done` + 1: up to which ticket it has been put
        self._steady: list[tuple[Steady, ...]] = [()] * decodes.block_size  # by phase, in order of admission
        self._blocks = [0] * decodes.block_size  # what they give back
        self._takers: list[list[int]] = [[] for _ in range(decodes.block_size)]  # tickets of who takes blocks, by phase
        self._flows: dict[int, tuple[int, int]] = {}  # phase -> see `_flow`
        self._apart: list[tuple[int, int, int, Request]] = []  # step, ticket, stint: sorted
        self._recent: deque[tuple[int, int, tuple[Steady, ...]]] = deque()  # step, number of the first block, whose

    def join(self, request: Request) -> None:
        """`request` decodes from step `joined` on. Its first slides, and those of blocks that others may look for, are
        apart from the others'."""
        decodes, size = self._decodes, self._decodes.block_size
        late = decodes.late
        first = request.joined + late
        steps = {request.joined, first}
        for window in decodes.windows:
            if not window.chunked:
                begin = window.passed(request.slid) // size
                after = window.size - 1 - request.kv_offset + late
                steps.update(block * size + after for block in range(begin + 1, self._cache.found_up_to(request) + 1))
        for step in steps:
            if request.joined <= step <= request.joined + request.max_tokens:
                self.apart(step, request)
        phase = -request.kv_offset % size
        insort(self._takers[phase], request.ticket)
        self._flows.pop(phase, None)

    def part(self, request: Request) -> None:
        """`request` decodes no more."""
        phase = -request.kv_offset % self._decodes.block_size
        self._takers[phase].remove(request.ticket)
        self._flows.pop(phase, None)

    def apart(self, step: int, request: Request) -> None:
        """What `request` gives back in `step` is not what its phases say, or not for nobody."""
        insort(self._apart, (step, request.ticket, request.stint, request), key=_order)

    def steady(self, phase: int, window: int, request: Request) -> None:
        """From now on `request` gives blocks back in the steps of `phase`."""
        who = list(self._steady[phase])
        insort(who, (request.ticket, window, request.kv_offset))
        self._steady[phase] = tuple(who)
        self._blocks[phase] += self._decodes.windows[window].tables
        self._flows.pop(phase, None)

    def leave(self, phase: int, window: int, request: Request) -> None:
        """It does so no longer."""
        gone = (request.ticket, window, request.kv_offset)
        self._steady[phase] = tuple(who for who in self._steady[phase] if who != gone)
        self._blocks[phase] -= self._decodes.windows[window].tables
        self._flows.pop(phase, None)

    def put(self) -> None:
        """Put the steps up to `planned`."""
        while self._done < self.planned:
            self._put_next(self.planned)

    def put_step(self) -> int:
        """In the step that is being planned all decode: put it, too. Returns the blocks that become free by what had
        not been put before."""
        self.put()
        self.planned = self._decodes.step
        return self._put_next(self.planned) if self._done < self.planned else 0

    def put_before(self, request: Request) -> int:
        """Of the step that is being planned, put those who were admitted before `request`. Returns the blocks that
        become free."""
        self.put()
        blocks = self._put_one(self._decodes.step, request.ticket)
        self._through = request.ticket - 1
        return blocks

    @property
    def in_order(self) -> bool:
        """The step that is being planned is planned request by request."""
        return self.planned == self._decodes.step

    def begin_in_order(self) -> None:
        """The step that is being planned is planned request by request, each of which says what it gives back."""
        self.put()
        self._done = self.planned = self._decodes.step

    def end_in_order(self, step: bool) -> None:
        """It is planned; not `step`: it was none after all."""
        self._cache.settle()
        self._done = self.planned = self._decodes.step - (not step)

    def sole_until(self, step: int, limit: int) -> int:
        """How many steps from `step` on, at most `limit`, go by before one in which somebody gives back a block that
        another one holds, which does not become free."""
        for at, _, stint, request in self._apart:
            if at >= step + limit:
                break
            if at >= step and _counts(stint, request) and self._cache.shares(request, self._decodes.slid(request, at)):
                return at - step
        return limit

    def name_recent(self, request: Request) -> None:
        """`request` is preempted, and may look for what it gave back in the last steps."""
        windows, late = self._decodes.windows, self._decodes.late
        for step, number, order in self._recent:
            for ticket, window, offset in order:
                if ticket == request.ticket:
                    block = windows[window].passed(step - late + offset) // self._decodes.block_size - 1
                    self._cache.name(request, window, number, block)
                number += windows[window].tables

    def _put_next(self, upto: int) -> int:
        """Put the next step, or all up to `upto` in which nobody is apart. Returns the blocks that become free."""
        apart, step = self._apart, self._done + 1
        while apart and (apart[0][0] < step or not _counts(apart[0][2], apart[0][3])):
            del apart[0]
        if self._through < 0 and (not apart or apart[0][0] > step):
            self._done = min(upto, apart[0][0] - 1) if apart else upto
            blocks = self._put_alike(step, self._done)
        else:
            blocks = self._put_one(step, NEVER)
            self._done, self._through = step, -1
        recent, size = self._recent, self._decodes.block_size
        while recent and recent[0][0] <= self._done - 2 * size:
            recent.popleft()
        return blocks

    def _put_alike(self, step: int, last: int) -> int:
        """Put the steps up to `last`, in which all do as their phases say. All but the last ones are one count: who has
        given back more since looks for nothing that was given back then."""
        size, blocks = self._decodes.block_size, self._blocks
        if self._cache.keeps_ends:
            most = more = 0
            for j in range(step, last + 1):
                peak, net = self._flow(j % size)
                most = max(most, more + peak)
                more += net
            self._cache.flow(most, more)
            rounds, rest = divmod(last + 1 - step, size)
            return rounds * sum(blocks) + sum(blocks[j % size] for j in range(step, step + rest))
        first = max(step, last + 1 - 2 * size)
        rounds, rest = divmod(first - step, size)
        count = rounds * sum(blocks) + sum(blocks[j % size] for j in range(step, step + rest))
        self._cache.put(count)
        for j in range(first, last + 1):
            if more := blocks[j % size]:
                count += more
                self._recent.append((j, self._cache.put(more), self._steady[j % size]))
        return count

    def _put_one(self, step: int, before: int) -> int:
        """Put those of `step` who were admitted before ticket `before` and have not been put yet."""
        decodes, cache = self._decodes, self._cache
        apart = {}
        for at, ticket, stint, request in self._apart:
            if at > step:
                break
            if at == step and self._through < ticket < before and _counts(stint, request):
                apart[ticket] = request
        alike = [
            who for who in self._steady[step % decodes.block_size]
            if self._through < who[0] < before and who[0] not in apart
        ]  # fmt: skip
        if cache.keeps_ends:
            return self._put_each(step, before, apart, alike)
        blocks = begin = 0
        for ticket, request in sorted(apart.items()):
            end = bisect_left(alike, (ticket,))
            blocks += self._put_steady(step, tuple(alike[begin:end]))
            begin = end
            blocks += self._put_apart(step, request)
        return blocks + self._put_steady(step, tuple(alike[begin:]))

    def _put_apart(self, step: int, request: Request) -> int:
        decodes = self._decodes
        given = request.slid if step == request.joined else max(request.slid, decodes.slid(request, step - 1))
        return self._cache.pass_unseen(request, given, decodes.slid(request, step), step)

    def _put_each(self, step: int, before: int, apart: dict[int, Request], alike: list[Steady]) -> int:
        """As `_put_one`, each of those with what he takes after what he gives back."""
        cache, tables = self._cache, self._decodes.windows
        given: dict[int, int] = dict.fromkeys(apart, 0)
        for ticket, window, _ in alike:
            given[ticket] = given.get(ticket, 0) + tables[window].tables
        takers = [t for t in self._takers[step % self._decodes.block_size] if self._through < t < before]
        blocks = 0
        for ticket in sorted({*given, *takers}):
            if ticket in apart:
                blocks += self._put_apart(step, apart[ticket])
            elif more := given.get(ticket, 0):
                cache.put_blank(more)
                blocks += more
            if ticket in takers:
                cache.take(cache.tables)
        return blocks

    def _flow(self, phase: int) -> tuple[int, int]:
        """Blocks that the decodes take, less what they give back, in a step of `phase` in which all do as their phases
        say: the most at any time, and in the end. Each gives back before he takes."""
        if phase not in self._flows:
            events = [(ticket, 1, self._cache.tables) for ticket in self._takers[phase]]
            events += [(ticket, 0, -self._decodes.windows[i].tables) for ticket, i, _ in self._steady[phase]]
            most = more = 0
            for _, _, blocks in sorted(events):
                more += blocks
                most = max(most, more)
            self._flows[phase] = most, more
        return self._flows[phase]

    def _put_steady(self, step: int, order: tuple[Steady, ...]) -> int:
        blocks = sum(self._decodes.windows[window].tables for _, window, _ in order)
        if blocks:
            self._recent.append((step, self._cache.put(blocks), order))
        return blocks


def _order(noted: tuple[int, int, int, Request]) -> tuple[int, int, int]:
    return noted[:3]


def _counts(stint: int, request: Request) -> bool:
    """Whether `request` has not left since it joined for the `stint`-th time that somebody did."""
    return request.decoding and request.stint == stint
