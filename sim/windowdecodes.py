"""The decoding requests of a model with windows as aggregates: what they read of each kind, and what they give back.

Once its window is full a sequence reads as much in every step, and gives a block back in every `block_size`-th: a
second histogram of phases. When a window is full, and when a chunk begins, is in a heap, so that nothing is touched
between. What a request gives back in its first two steps depends on the last chunk of its prompt: that is noted apart.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from sim.decodes import Decodes
from sim.request import Request
from sim.windows import Tables

if TYPE_CHECKING:
    from sim.slides import Slides


class WindowDecodes(Decodes):
    """As `Decodes`; besides `seen[i]`, the tokens that all requests read in the layers of window i, and `growing[i]`,
    how many of them read one more in each step.

    A request says in `joined` since when it decodes, and in `read_from` how many tokens were computed before the step
    that was in flight then (all, if none was): see `slid`.
    """

    __slots__ = (
        "_count",
        "_crossings",
        "_extra",
        "_slides",
        "_sliding",
        "_stints",
        "growing",
        "late",
        "seen",
        "slides",
        "windows",
    )

    def __init__(self, block_size: int, tables: Tables) -> None:
        super().__init__(block_size)
        self.windows = tables.windows
        self.seen = [0] * len(tables.windows)
        self.growing = [0] * len(tables.windows)
        self._count = tables.count
        self.late = tables.late
        self._slides = [0] * block_size  # blocks given back in every step j with j % block_size == p
        self._sliding = 0  # their sum
        self.slides: Slides | None = None  # for a cache that keeps what is given back
        self._stints = 0  # how often somebody has joined: what is noted of a request holds until it leaves
        self._extra: dict[int, list[tuple[int, Request, int]]] = {}  # step -> (stint, request, blocks besides)
        self._crossings: list[tuple[int, int, int, Request]] = []  # a heap: step, stint, window, request

    def advance(self, steps: int) -> None:
        """See `Decodes`. There is no crossing between these steps."""
        super().advance(steps)
        step = self.step
        if self.slides is not None:
            self.slides.planned = step - 1
        for i, growing in enumerate(self.growing):
            self.seen[i] += steps * growing
        for past in [at for at in self._extra if at < step]:
            del self._extra[past]
        while self.next_crossing == step:
            _, _, i, request = heappop(self._crossings)
            self._cross(i, request)

    @property
    def next_crossing(self) -> int:
        """The step from which on some request reads another number of tokens than one more in each; -1: none."""
        heap = self._crossings
        while heap and not _counts(heap[0][1], heap[0][3]):
            heappop(heap)
        return heap[0][0] if heap else -1

    def join(self, request: Request, step: int) -> None:
        """See `Decodes`."""
        if self.slides is not None:
            self.slides.put()
        super().join(request, step)
        request.joined = step
        self._stints = request.stint = self._stints + 1
        tokens, stint = request.computed, request.stint
        for i, window in enumerate(self.windows):
            self.seen[i] += window.seen(tokens)
            if window.chunked:
                self.growing[i] += 1
                heappush(self._crossings, (step + window.size - tokens % window.size, stint, i, request))
            elif tokens < window.size:
                self.growing[i] += 1
                heappush(self._crossings, (step + window.size - tokens, stint, i, request))
            else:
                self._fill(i, request, step)
        if self.slides is not None:
            self.slides.join(request)
        first, second = self._beginning(request)
        self._besides(step, request, first)
        self._besides(step + 1, request, second)

    def leave(self, request: Request, step: int, planned: bool = False) -> None:
        """See `Decodes`."""
        if self.slides is not None:
            self.slides.put()
        if (last := step + planned - 1) >= request.joined:
            request.slid = max(request.slid, self.slid(request, last))
        super().leave(request, step)
        if self.slides is not None:
            self.slides.part(request)
        for i, window in enumerate(self.windows):
            self.seen[i] -= window.seen(request.computed)
            if window.chunked or request.computed < window.size:
                self.growing[i] -= 1
            else:
                phase = self._phase(i, request)
                self._slides[phase] -= window.tables
                self._sliding -= window.tables
                if self.slides is not None:
                    self.slides.leave(phase, i, request)
        request.computed += planned

    def skip(self, request: Request, step: int) -> None:
        """See `Decodes`."""
        self.leave(request, step)
        request.read_from = request.computed
        self.join(request, step + 1)
        if request.finish_step >= step:
            self.give_up(request)
            self.will_finish(request, request.finish_step + 1)

    def left_out(self, requests: list[Request]) -> None:
        """See `Decodes`."""
        super().left_out(requests)
        for request in requests:
            for i, window in enumerate(self.windows):
                if request.decoding and (window.chunked or self.step + request.kv_offset < window.size):
                    self.seen[i] -= 1

    def seen_without(self, skipped: list[Request]) -> tuple[int, ...]:
        """`seen` of the step that is being planned, from which these have just been left out."""
        if not skipped:
            return tuple(self.seen)
        tokens = [self.step + 1 + request.kv_offset for request in skipped]
        return tuple(seen - sum(map(w.seen, tokens)) for seen, w in zip(self.seen, self.windows, strict=True))

    def slid(self, request: Request, step: int) -> int:
        """The computed tokens by which `request` gives back, when `step` is planned, what is passed."""
        if not self.late:
            return step + request.kv_offset
        return request.read_from if step == request.joined else step + request.kv_offset - 1

    def given_back(self, step: int) -> int:
        """Blocks that the decodes of `step` give back when it is planned."""
        blocks = self._slides[step % self.block_size]
        for stint, request, more in self._extra.get(step, ()):
            if _counts(stint, request):
                blocks += more
        return blocks

    def demand(self, step: int) -> int:
        """See `Decodes`; what they give back not counted."""
        return self._count * self.phases[step % self.block_size]

    def demand_over(self, step: int, steps: int) -> int:
        """See `Decodes`; less what they give back."""
        size, tables = self.block_size, self._count
        rounds, rest = divmod(steps, size)
        total = rounds * (tables * self.count - self._sliding)
        for j in range(step, step + rest):
            total += tables * self.phases[j % size] - self._slides[j % size]
        for at in self._extra:
            if step <= at < step + steps:
                total -= self.given_back(at) - self._slides[at % size]
        return total

    def steps_within(self, step: int, blocks: int, limit: int, waiting: bool) -> int:
        """See `Decodes`. With requests `waiting`, only as long as there are no more free blocks than now, and never
        beyond the next crossing."""
        if (crossing := self.next_crossing) >= 0:
            limit = min(limit, crossing - step)
        if self.slides is not None:
            limit = self.slides.sole_until(step, limit)
        if not waiting and (limit // self.block_size + 1) * self._count * self.count <= blocks:
            return limit
        begins, now, steps = max(self.block_size, 2), blocks, 0  # after two steps nothing but phases counts
        while steps < limit:
            if steps == begins:
                rounds, more = self._rounds(step + steps, blocks, (limit - steps) // self.block_size, now, waiting)
                steps, blocks = steps + rounds * self.block_size, blocks - more
                if steps == limit:
                    break
            demand = self.demand(step + steps)
            if demand > blocks:
                break
            blocks += self.given_back(step + steps) - demand
            if waiting and blocks > now:
                break
            steps += 1
        return steps

    def steps_taking(self, step: int, blocks: int, limit: int) -> int:
        """How many steps from `step` on, at most `limit`, take no more than `blocks` blocks, whatever is given back."""
        size, tables = self.block_size, self._count
        if (limit // size + 1) * tables * self.count <= blocks:
            return limit
        rounds = blocks // (tables * self.count) if self.count else 0
        steps, blocks = rounds * size, blocks - rounds * tables * self.count
        while steps < limit:
            blocks -= tables * self.phases[(step + steps) % size]
            if blocks < 0:
                break
            steps += 1
        return min(steps, limit)

    def _rounds(self, step: int, blocks: int, limit: int, now: int, waiting: bool) -> tuple[int, int]:
        """How many rounds of phases go by from `step` on, and how many blocks they take."""
        peak = taken = most = 0
        for j in range(step, step + self.block_size):
            demand = self.demand(j)
            peak = max(peak, taken + demand)
            taken += demand - self._slides[j % self.block_size]
            most = max(most, -taken)
        if peak > blocks or (waiting and blocks + most > now):
            return 0, 0
        rounds = min(limit, (blocks - peak) // taken + 1) if taken else limit
        return rounds, rounds * taken

    def _cross(self, i: int, request: Request) -> None:
        """The window of `request` is full, or its next chunk begins."""
        window, step = self.windows[i], self.step
        if not window.chunked:
            self.growing[i] -= 1
            self._fill(i, request, step)
            return
        tokens, size = step + request.kv_offset, self.block_size
        self.seen[i] -= window.size
        heappush(self._crossings, (step + window.size, request.stint, i, request))
        freed = window.freed(tokens, size) - window.freed(tokens - window.size, size)
        self._besides(step + self.late, request, freed)

    def _fill(self, i: int, request: Request, step: int) -> None:
        """From `step` on the window of `request` is full."""
        window, tokens, phase = self.windows[i], step + request.kv_offset, self._phase(i, request)
        self._slides[phase] += window.tables
        self._sliding += window.tables
        if self.slides is not None:
            self.slides.put()
            self.slides.steady(phase, i, request)
        if self.late and tokens == window.size:  # by then nothing is passed, though the phase is right
            self._besides(step, request, -window.tables)

    def _phase(self, i: int, request: Request) -> int:
        return (self.windows[i].size - 1 + self.late - request.kv_offset) % self.block_size

    def _beginning(self, request: Request) -> tuple[int, int]:
        """What `request` gives back in its first and its second step besides what the phases say."""
        tokens, size = request.computed, self.block_size
        first = second = 0
        for window in self.windows:
            was = window.freed(request.slid, size)
            if not self.late:
                first += window.freed(tokens if window.chunked else tokens - 1, size) - was
                continue
            then, now = window.freed(request.read_from, size), window.freed(tokens, size)
            first += then - was
            second += now - then
            if not window.chunked:
                before = window.freed(tokens - 1, size)
                first -= before - window.freed(tokens - 2, size)
                second -= now - before
        return first, second

    def _besides(self, step: int, request: Request, blocks: int) -> None:
        if blocks:
            self._extra.setdefault(step, []).append((request.stint, request, blocks))
            if self.slides is not None:
                self.slides.apart(step, request)


def _counts(stint: int, request: Request) -> bool:
    """Whether `request` has not left since it joined for the `stint`-th time that somebody did."""
    return request.decoding and request.stint == stint
