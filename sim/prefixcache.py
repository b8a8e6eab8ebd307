"""A KV cache that keeps what was computed: full blocks are found again by what they and all before them hold.

vLLM's automatic prefix caching (`v1/core/block_pool.py`, 0.10 to 0.32): a block is registered when the step that fills
it is planned, and stays when its request has given it back, until it is its turn in the queue of free blocks. A request
gives its blocks back tail first; who needs blocks takes them from the front; who finds one takes it out of the middle.

Only blocks that somebody may look for have an identity: those of content that several prompts begin with, and those of
a preempted request. They are handled by the run (`Run`), all others are counts. Blocks that decoding requests take are
a lower `free` at first, and leave the queue when its order matters next (`settle`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sim.kvcache import KVCache

if TYPE_CHECKING:
    from sim.request import Request

Path = Sequence[tuple[int, int]]
"""What a prompt begins with, as far as others have the same: stretches of content (a number, 0 or more), each with the
index of the block at which it ends. Who shares a stretch shares all before it, and may end within it."""


TRIES = 2**50
"""More than the numbers of requests, and of their samples, are."""


class Run:
    """Blocks of one sequence, `start` to before `end` by index, which share their fate: held by the same `holders`
    running requests, or next to each other in the queue. `content` None: nobody will look for them; they are numbered
    as they joined the queue, or below 0 where they did so at its front.

    One that is held is cut in two when another request finds only a part of it: `rest` is then the second half.
    """

    __slots__ = ("content", "end", "holders", "rest", "start")

    def __init__(self, content: int | None, start: int, end: int, holders: int, rest: Run | None = None) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.holders = holders
        self.rest = rest


class PrefixCache(KVCache):
    """`num_blocks` blocks of `block_size` tokens that are kept while there is room; `free` counts what can be evicted.

    `paths`: request id -> what its prompt begins with; None where nobody knows. `blank_first` is the rule of vLLM
    from 0.24: blocks that are given back without having been filled are used up first. `drops_last`: the last block
    that is found is computed again all the same, since drafts need what was left of it (`use_eagle`).
    """

    __slots__ = ("_appended", "_blank_first", "_drops_last", "_found", "_paths", "_queue", "_queued", "_runs")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        paths: Callable[[int], Path] | None,
        blank_first: bool,
        drops_last: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._paths = paths
        self._blank_first = blank_first
        self._drops_last = drops_last
        self._runs: dict[int, list[Run]] = {}  # content -> what is registered of it, the oldest first
        self._queue: OrderedDict[Run, None] = OrderedDict()  # free blocks; of a run, the last one goes first
        self._queued = 0  # blocks in the queue; `free`, once those taken from its front have left it
        self._appended = 0  # blocks that joined the queue though nobody will look for them
        self._found: list[tuple[Run, int, int]] = []  # by the last lookup: a run, and from where to where
        self.free = 0
        self._append(self.usable)

    @property
    def shared(self) -> int:
        """Blocks that several running requests hold, counted for each but one of them."""
        runs = (run for runs in self._runs.values() for run in runs if run.holders > 1)
        return sum((run.holders - 1) * (run.end - run.start) for run in runs)

    def lookup(self, request: Request) -> tuple[int, int]:
        """What a waiting request would find: tokens, in full blocks, and how many of these blocks count as free.

        At least its last token is left to be computed, since a step must yield something.
        """
        self.settle()
        most = (request.target - 1) // self.block_size
        self._found, at = [], 0
        for content, end in self._path(request):
            stop = min(end, most)
            at = self._follow(content, at, stop, self._found)
            if at < stop or stop == most:
                break
        else:
            if request.preemptions:
                at = self._follow(own_content(request), at, most, self._found)
        if self._drops_last and at:
            at -= 1
            run, start, end = self._found.pop()
            if start < at:
                self._found.append((run, start, end - 1))
        return at * self.block_size, sum(end - start for run, start, end in self._found if not run.holders)

    def claim(self, request: Request) -> None:
        """Give `request` the blocks that the lookup just made has found for it."""
        for run, start, end in self._found:
            part = self._cut(run, start, end) if run.holders else self._take_out(run, start, end)
            part.holders += 1
            request.held.append((part, end))

    def grow(self, request: Request, before: int, after: int) -> None:
        """A prompt, of which `before` tokens have their blocks, gets those for `after` tokens; the full ones are
        registered."""
        super().grow(request, before, after)
        self.filled(request, after)

    def hold(self, request: Request, before: int, after: int) -> None:
        """As `grow`, but what the blocks hold comes later."""
        super().grow(request, before, after)

    def filled(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a prompt are in the blocks that it has: the full ones are registered."""
        full, held = tokens // self.block_size, request.held
        have = held[-1][1] if held else 0
        for content, end in request.path or ():
            stop = min(end, full)
            if have < stop:
                self._register(held, content, have, stop)
                have = stop

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """Take back the blocks of `tokens` tokens, tail first. The full ones among the first `kept` tokens are
        registered; `again`: the request will look for them."""
        self.settle()
        held = request.held
        have = held[-1][1] if held else 0
        full = max(kept // self.block_size, have)
        if again and have < full:
            self._register(held, own_content(request), have, full)
            have = full
        blank = self.blocks(tokens) - full
        self._append(blank, front=self._blank_first)
        self._append(full - have)
        self._drop(parts(held))
        held.clear()

    def _drop(self, parts: list[Run]) -> None:
        """Somebody who held these runs, one after the other, does so no more."""
        for run in reversed(parts):
            run.holders -= 1
            if not run.holders:
                run.rest = None
                self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        self._queue[run] = None
        self._queued += run.end - run.start
        self.free += run.end - run.start

    def _path(self, request: Request) -> Path:
        if request.path is None:
            request.path = () if self._paths is None else self._paths(request.id)
        return request.path

    def _follow(self, content: int, at: int, stop: int, found: list[tuple[Run, int, int]]) -> int:
        """Add to `found` the registered blocks of `content` from index `at` to before `stop`: of equal ones, the
        oldest. Returns the first index that is not there."""
        runs = self._runs.get(content, ())
        while at < stop:
            end = stop
            for run in runs:
                if run.start <= at < run.end:
                    break
                if at < run.start < end:
                    end = run.start  # from here on that one is older
            else:
                break
            end = min(end, run.end)
            found.append((run, at, end))
            at = end
        return at

    def _take_out(self, run: Run, start: int, end: int) -> Run:
        """The part of a free run, out of the queue, in which the rest keeps its place."""
        self.free -= end - start
        self._queued -= end - start
        if (start, end) == (run.start, run.end):
            del self._queue[run]
            return run
        part = self._beside(run, start, end, 0)
        if start == run.start:
            run.start = end
        elif end == run.end:
            run.end = start
        else:
            low = self._beside(run, run.start, start, 0)
            run.start = end
            queue = list(self._queue)
            queue.insert(queue.index(run) + 1, low)
            self._queue = OrderedDict.fromkeys(queue)
        return part

    def _cut(self, run: Run, start: int, end: int) -> Run:
        """The part of a run that is held, as a run of its own."""
        while run.end <= start:  # it has been cut before
            assert run.rest is not None
            run = run.rest
        for at in (start, end):
            if run.start < at < run.end:
                run.rest = self._beside(run, at, run.end, run.holders, run.rest)
                run.end = at
                if at == start:
                    run = run.rest
        return run

    def _beside(self, run: Run, start: int, end: int, holders: int, rest: Run | None = None) -> Run:
        """A part of a registered run, as old as that."""
        assert run.content is not None
        part = Run(run.content, start, end, holders, rest)
        runs = self._runs[run.content]
        runs.insert(runs.index(run), part)
        return part

    def _register(self, held: list[tuple[Run, int]], content: int, start: int, end: int) -> None:
        """The next full blocks of a request, which holds `held`, are of `content`."""
        runs = self._runs.setdefault(content, [])
        if held and runs:
            last = held[-1][0]
            if runs[-1] is last and last.end == start and last.holders == 1:
                last.end = end
                held[-1] = last, end
                return
        run = Run(content, start, end, 1)
        runs.append(run)
        held.append((run, end))

    def _append(self, count: int, front: bool = False) -> None:
        """`count` blocks that nobody will look for join the queue."""
        if not count:
            return
        self._queued += count
        self.free += count
        queue, number = self._queue, self._appended
        if front:
            first = next(iter(queue), None)
            if first is not None and first.content is None and first.end <= 0:
                first.start -= count
            else:
                run = Run(None, -count, 0, 0)
                queue[run] = None
                queue.move_to_end(run, last=False)
            return
        self._appended += count
        last = next(reversed(queue), None)
        if last is not None and last.content is None and last.end == number:
            last.end += count
        else:
            queue[Run(None, number, number + count, 0)] = None

    def settle(self) -> None:
        """Take from the front of the queue what has been taken from `free`: what these blocks held is lost."""
        self.take(self._queued - self.free)

    def take(self, more: int) -> None:
        """`more` blocks leave the queue at its front."""
        queue = self._queue
        self._queued -= more
        while more:
            run = next(iter(queue))
            if run.end - run.start > more:
                if run.content is None:
                    run.start += more
                else:
                    run.end -= more
                break
            more -= run.end - run.start
            del queue[run]
            if run.content is not None:
                runs = self._runs[run.content]
                runs.remove(run)
                if not runs:
                    del self._runs[run.content]


def own_content(request: Request) -> int:
    """The content that nobody else has: what follows in its prompt, and its output; no other try of it either."""
    return -1 - request.id - (0 if request.trip is None else request.trip.tries * TRIES)


def parts(held: list[tuple[Run, int]]) -> list[Run]:
    """The runs that a request holds, those that were cut since in all their parts."""
    runs = []
    for run, end in held:
        runs.append(run)
        while run.end < end:
            assert run.rest is not None
            run = run.rest
            runs.append(run)
    return runs
