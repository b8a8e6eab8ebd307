"""A prefix cache of layers that see different things: vLLM's hybrid KV cache manager with prefix caching.

Every block table has blocks of its own in one pool, and all take their places in one queue of free blocks. A prompt
finds as much as all of them can serve: tables whose layers see everything, all blocks from the first on; those with a
window, the blocks that the next token reads (`find_longest_cache_hit` of vLLM's `v1/core/kv_cache_coordinator.py` and
`single_type_kv_cache_manager.py`, 0.10 to 0.32). What windows pass goes to the end of the queue, and can be found
there; but where only ends are kept (`Tables.keeps_ends`; `reachable_block_mask` of 0.32), blocks that are not are used
up first. Tables come in the order of the first layers that they hold: windows first, in every model known to have both.

Blocks that somebody may look for are runs here as in `PrefixCache`, of each table. What decoding requests give back as
their windows slide are counts, put in place when the order of the queue matters (`sim.slides`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.prefixcache import Path, PrefixCache, Run, own_content, parts
from sim.request import NEVER
from sim.slides import Slides
from sim.windows import Tables, Window

if TYPE_CHECKING:
    from sim.request import Request
    from sim.windowdecodes import WindowDecodes


class HybridCache(PrefixCache):
    """As `PrefixCache`, for the block tables of `tables`.

    A running request holds, of each table, the leading blocks that somebody may look for (`Request.tables`), as far as
    its window has not passed them; of all, there were the first `known`.
    """

    __slots__ = ("_ahead", "_decodes", "_hit", "_hits", "_kinds", "_layout", "_slides", "keeps_ends", "tables")

    def __init__(
        self, num_blocks: int, block_size: int, paths: Callable[[int], Path] | None, blank_first: bool, tables: Tables
    ) -> None:
        super().__init__(num_blocks, block_size, paths, blank_first)
        self._layout = tables
        self.keeps_ends = tables.keeps_ends and not all(window.chunked for window in tables.windows)
        self.tables = tables.count
        windows: list[Window | None] = [window for window in tables.windows for _ in range(window.tables)]
        self._kinds = windows + [None] * tables.full
        self._ahead = 0  # blocks in the queue already that `free` does not count yet: of the step that is being planned
        self._hit = 0  # blocks that the last lookup has found
        self._hits: list[list[tuple[Run, int, int]]] = []  # and those that are needed of them, of each table

    def watch(self, decodes: WindowDecodes) -> None:
        """These are the requests whose windows slide unseen."""
        self._decodes = decodes
        self._slides = decodes.slides = Slides(decodes, self)

    def needed(self, before: int, after: int) -> int:
        """See `KVCache`."""
        return self.tables * super().needed(before, after)

    def reserved(self, found: int, first: int, last: int) -> int:
        """See `KVCache`."""
        return self._layout.reserved(found, first, last, self.block_size)

    def fits(self, prompt: int, tokens: int, room: int) -> bool:
        """See `KVCache`."""
        return self._layout.fits(prompt, tokens, room, self.block_size)

    def lookup(self, request: Request) -> tuple[int, int]:
        """See `PrefixCache`."""
        self.settle()
        most = (request.target - 1) // self.block_size
        path = list(self._path(request))
        if request.preemptions:
            path.append((own_content(request), most))
        limit = min(most, path[-1][1]) if path else 0
        present = []
        for table, window in enumerate(self._kinds):
            blocks = self._present(table, path, limit)
            if window is None:
                limit = min(limit, blocks[0][1] if blocks and not blocks[0][0] else 0)
            else:
                present.append((window, blocks))
        known, before = limit if self._layout.full else 0, -1
        while before != limit:
            before = limit
            for window, blocks in present:
                limit = _accepted(window, blocks, limit, self.block_size)
        request.junction = known if limit < known else 0
        self._hit, self._hits = limit, []
        for table, window in enumerate(self._kinds if limit else ()):
            at = self._passed(window, limit * self.block_size)
            found: list[tuple[Run, int, int]] = []
            for content, end in path:
                if at < (stop := min(end, limit)):
                    at = self._follow(self._key(content, table), at, stop, found)
            self._hits.append(found)
        idle = sum(end - start for hits in self._hits for run, start, end in hits if not run.holders)
        return limit * self.block_size, idle

    def claim(self, request: Request) -> None:
        """See `PrefixCache`."""
        request.known = self._hit
        request.tables = []
        for found in self._hits:
            held = []
            for run, start, end in found:
                part = self._cut(run, start, end) if run.holders else self._take_out(run, start, end)
                part.holders += 1
                held.append((part, end))
            request.tables.append(held)

    def untouched(self) -> int:
        """How many blocks can be taken before one goes that the lookup just made has found."""
        wanted: dict[Run, int] = {}
        for found in self._hits:
            for run, _, end in found:
                wanted[run] = max(end, wanted.get(run, 0))
        count = 0
        for run in self._queue if wanted else ():
            if run in wanted:
                return count + run.end - wanted[run]
            count += run.end - run.start
        return count if wanted else NEVER

    def grow(self, request: Request, before: int, after: int) -> None:
        """See `PrefixCache`."""
        self.free -= self.needed(before, after)
        if not request.tables:
            request.tables, request.known = [[] for _ in self._kinds], 0
        full = after // self.block_size
        for content, end in request.path or ():
            if request.known < (stop := min(end, full)):
                for table, (window, held) in enumerate(zip(self._kinds, request.tables, strict=True)):
                    for start, last in self._kept(request, window, request.known, stop):
                        self._register(held, self._key(content, table), start, last)
                request.known = stop
        if self.keeps_ends:
            self.take(self.needed(before, after))

    def slide(self, request: Request, tokens: int) -> None:
        """See `KVCache`."""
        passes = any(self._passed(w, tokens) > self._passed(w, request.slid) for w in self._layout.windows)
        if passes or self.keeps_ends:
            if self._slides.in_order:
                self.settle()
            else:
                self._ahead += self._slides.put_before(request)
            self._pass(request, request.slid, tokens, self._decodes.step)
        request.slid = tokens

    def slide_all(self, decodes: WindowDecodes) -> None:
        """See `KVCache`."""
        self.free += self._ahead + self._slides.put_step()
        self._ahead = 0

    def found_up_to(self, request: Request) -> int:
        """From this block on, nobody looks for what the windows of `request` pass."""
        if not self.keeps_ends:
            return request.known
        return max(request.known, (request.prompt_tokens - 1) // self.block_size, request.junction)

    def shares(self, request: Request, tokens: int) -> bool:
        """Whether another one holds what `request` gives back at `tokens` computed tokens."""
        for window, held in zip(self._kinds, request.tables, strict=True):
            stop = self._passed(window, tokens)
            if any(run.start < stop and run.holders > 1 for run in parts(held)):
                return True
        return False

    def pass_unseen(self, request: Request, before: int, tokens: int, step: int) -> int:
        """As `slide`, when `step` is planned, from `before` computed tokens on; returns the blocks that become free,
        which `free` counts elsewhere."""
        free = self.free
        self._pass(request, before, tokens, step)
        blocks, self.free = self.free - free, free
        return blocks

    def _pass(self, request: Request, before: int, tokens: int, step: int) -> None:
        """`request`, which had given back what is passed at `before` computed tokens, does so at `tokens`. A chunk may
        end with a token that is still in flight: nobody will know the block in which it is."""
        filled = request.computed
        if request.decoding:
            filled = request.registered(step + request.kv_offset, step - 2)  # decode steps count from 1
        for table, window in enumerate(self._kinds):
            start, stop = self._passed(window, before), self._passed(window, tokens)
            if start >= stop:
                continue
            mine = self._kept(request, window, max(start, request.known), min(stop, filled // self.block_size))
            gone = self._leave_front(request.tables[table], stop) if start < request.known else []
            self._append(stop - start - _length(mine) - _blocks(gone), front=self._blank_first)
            for begin, end in reversed(mine):
                self._enqueue(self._keep(self._key(own_content(request), table), begin, end))
            self._drop(gone)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """See `PrefixCache`."""
        self.settle()
        if again:
            self._slides.name_recent(request)
        full = kept // self.block_size
        for table, (window, held) in enumerate(zip(self._kinds, request.tables, strict=True)):
            passed, runs = self._passed(window, request.slid), parts(held)
            mine = self._kept(request, window, max(request.known, passed), full)
            blank = self.blocks(tokens) - passed - _length(mine) - _blocks(runs)
            self._append(blank, front=self._blank_first)
            if again:
                for begin, end in reversed(mine):
                    self._enqueue(self._keep(self._key(own_content(request), table), begin, end))
            else:
                self._append(_length(mine))
            self._drop(runs)
        request.tables, request.known = [], 0

    def put(self, count: int) -> int:
        """`count` blocks that decoding requests give back, which `free` counts elsewhere, join the queue; returns the
        number of the first."""
        number = self._appended
        self._append(count)
        self.free -= count
        return number

    def put_blank(self, count: int) -> None:
        """As `put`, at the front."""
        self._append(count, front=True)
        self.free -= count

    def flow(self, most: int, more: int) -> None:
        """Decoding requests take and give back blocks that nobody will look for: in the end `more` are taken than given
        back, and `most` more at some time before. `free` counts them elsewhere."""
        self.take(most)
        self.put_blank(most - more)

    def name(self, request: Request, window: int, number: int, block: int) -> None:
        """The blocks that were put as `number` and the following, one a table of `window`, are the `block`-th of
        `request`, which may look for them. Those that are gone are forgotten."""
        first = sum(w.tables for w in self._layout.windows[:window])
        for table in range(first, first + self._layout.windows[window].tables):
            self._name(number + table - first, self._key(own_content(request), table), block)

    def _name(self, number: int, key: int, block: int) -> None:
        queue = self._queue
        inside = (run for run in queue if run.content is None and run.start <= number < run.end)
        if (run := next(inside, None)) is None:
            return
        order = list(queue)
        at = order.index(run)
        pieces = [Run(None, run.start, number, 0), self._keep(key, block, block + 1), Run(None, number + 1, run.end, 0)]
        order[at : at + 1] = [piece for piece in pieces if piece.start < piece.end]
        self._queue = OrderedDict.fromkeys(order)

    def settle(self) -> None:
        """See `PrefixCache`."""
        self._slides.put()
        self.take(self._queued - self._ahead - self.free)

    def _key(self, content: int, table: int) -> int:
        return content * self.tables + table

    def _passed(self, window: Window | None, tokens: int) -> int:
        return 0 if window is None else window.passed(tokens) // self.block_size

    def _kept(self, request: Request, window: Window | None, start: int, stop: int) -> list[tuple[int, int]]:
        """From where to where others can find the blocks that `request` fills from index `start` to before `stop`, of a
        table with that `window`."""
        if start >= stop:
            return []
        if window is None or window.chunked or not self.keeps_ends:
            return [(start, stop)]
        reads = _reads(window, self.block_size)
        kept: list[tuple[int, int]] = []
        for end in sorted(((request.prompt_tokens - 1) // self.block_size, request.junction)):
            begin, last = max(start, end - reads), min(stop, end)
            if begin < last:
                kept.append((begin, last))
                start = last
        return kept

    def _keep(self, key: int, start: int, end: int) -> Run:
        """Blocks of `key`'s content and table that nobody holds, registered."""
        run = Run(key, start, end, 0)
        self._runs.setdefault(key, []).append(run)
        return run

    def _leave_front(self, held: list[tuple[Run, int]], stop: int) -> list[Run]:
        """Take the runs up to block `stop` out of what is `held`."""
        gone, rest = [], []
        for run in parts(held):
            if run.start < stop:
                if run.end > stop:
                    end = run.end
                    self._cut(run, run.start, stop)
                    assert run.rest is not None
                    rest.append((run.rest, end))
                gone.append(run)
            else:
                rest.append((run, run.end))
        held[:] = rest
        return gone

    def _present(self, table: int, path: Path, limit: int) -> list[tuple[int, int]]:
        """From where to where blocks of `path`, up to `limit`, are registered; in order, apart from each other."""
        found: list[tuple[int, int]] = []
        at = 0
        for content, end in path:
            stop = min(end, limit)
            runs = self._runs.get(self._key(content, table), ())
            for start, last in sorted((max(run.start, at), min(run.end, stop)) for run in runs):
                if start >= last:
                    continue
                if found and start <= found[-1][1]:
                    found[-1] = found[-1][0], max(last, found[-1][1])
                else:
                    found.append((start, last))
            at = max(at, stop)
        return found


def _accepted(window: Window, present: list[tuple[int, int]], limit: int, block_size: int) -> int:
    """The most blocks, up to `limit`, of which those are `present` that the next token reads."""
    if window.chunked:
        begin = limit * block_size // window.size * window.size // block_size
        at = bisect_right(present, begin, key=lambda part: part[0]) - 1
        return max(begin, min(limit, present[at][1])) if at >= 0 else begin
    reads = _reads(window, block_size)
    for start, end in reversed(present):
        end = min(end, limit)
        if end > start and (not start or end - start >= reads):
            return end
    return 0


def _reads(window: Window, block_size: int) -> int:
    """Full blocks of a sliding window that the token after them reads."""
    return -(-(window.size - 1) // block_size)


def _length(stretches: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


def _blocks(runs: list[Run]) -> int:
    return sum(run.end - run.start for run in runs)
