"""A prefix cache with tiers behind it: what the GPU loses, or never had, is looked for there and loaded.

As in vLLM's OffloadingConnector (0.24), and LMCache's adapter where steps wait for loads. After what the GPU has found
of a prompt the tiers are asked chunk by chunk, the nearest first; what only farther ones have is kept in the nearest,
too. Whatever of a sequence is computed is written to all tiers that lack it: of a prompt when the next step begins, of
an answer when the request ends or is preempted (vLLM: as it grows, too). Moving it takes the wires of the device, of
the replica's link to it, and of its GPUs' host link, which go on at once: it is there when the last of them is done.
With `prefetch` what only farther tiers have of a prompt begins to come to the nearest when the engine receives the
request, as with SGLang's HiCache (`prefetch_from_storage`); who is admitted meanwhile gets what is on its way as it
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, Literal

from sim.prefixcache import Path, PrefixCache, own_content
from sim.tiers import LATER, Job, Stretch, Tier, TierSpec, Wire

if TYPE_CHECKING:
    from sim.request import Request


@dataclass(frozen=True, slots=True)
class Offload:
    """What a pool's replicas have beyond their GPUs: `tiers`, the nearest first, in chunks of `chunk_tokens`.

    `read_s`, `write_s`: seconds of a token on the link of GPU and host. `loads`: whether requests wait for what they
    load (async), or the step that admits them does (sync). A chunk is stored from the `store_after`-th request on whose
    prompt has it. `prefetch`: farther tiers give to the nearest, the host's memory, while a request waits for its turn.
    """

    tiers: tuple[TierSpec, ...]
    chunk_tokens: int
    read_s: float
    write_s: float
    loads: Literal["async", "sync"] = "async"
    store_after: int = 1
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a request loads from one tier, and when it is there."""

    tier: int
    tokens: int
    end_s: float


class TieredCache(PrefixCache):
    """As `PrefixCache`, with `tiers` behind it: those that are shared are the same ones for all who share them.
    `now_s`: when was planned what is done to it now, and `begin_s`, when that step begins; others must set them."""

    __slots__ = (
        "_asked", "_chunk", "_coming", "_links", "_pending", "_read", "_received", "_write", "begin_s", "loads",
        "now_s", "offload", "prefetches", "tiers",
    )  # fmt: skip

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        paths: Callable[[int], Path] | None,
        blank_first: bool,
        offload: Offload,
        tiers: Sequence[Tier],
    ) -> None:
        super().__init__(num_blocks, block_size, paths, blank_first)
        self.offload = offload
        self.tiers = tiers
        self.loads = offload.loads
        self.prefetches = offload.prefetch
        self.now_s = self.begin_s = 0.0
        self._chunk = offload.chunk_tokens
        self._read, self._write = Wire(), Wire()
        self._links = [(Wire(), Wire()) for _ in tiers]
        self._pending: list[tuple[int, list[tuple[int, int, Job]]]] = []  # that leave the GPU; tier, chunks, job
        self._coming: dict[Request, tuple[list[Stretch], float]] = {}  # what comes, and when
        self._received: list[Request] = []  # of whom nothing has been fetched ahead
        self._asked: dict[int, list[int]] = {}  # content -> the longest stretches asked for, a heap of `store_after`

    def beyond(self, request: Request, found: int) -> int:
        """How many tokens would be known of a request of which the GPU has `found`, once all that tiers have is loaded;
        `found` if that is less than a chunk more."""
        chunk = self._chunk
        at, stop = found // chunk, request.target // chunk
        if stop * chunk - found < chunk:
            return found
        for content, start, end in self._stretches(request, at, stop):
            at, before = start, -1
            while before < at < end:
                before = at
                for tier in self.tiers:
                    at = tier.follow(content, at, end, self.now_s)
            if at < end:
                break
        return at * chunk if at * chunk - found >= chunk else found

    def awaited(self, request: Request, found: int, known: int) -> Request | None:
        """Who is loading a part of what this one would load."""
        if not self._coming:
            return None
        mine = self._stretches(request, found // self._chunk, known // self._chunk)
        for other, (theirs, _) in self._coming.items():
            for content, start, end in mine:
                if any(c == content and s < end and start < e for c, s, e in theirs):
                    return other
        return None

    def admitted(self, request: Request) -> None:
        """It gets blocks now: what tiers have of it was used, and it counts as one that asked for its content."""
        stretches = self._stretches(request, 0, request.target // self._chunk)
        for tier in self.tiers:
            tier.touch(stretches, self.now_s)
        most = self.offload.store_after
        if most > 1 and not request.preemptions:
            for content, _, end in stretches:
                if content < 0:
                    break  # nobody else asks for it
                asked = self._asked.setdefault(content, [])
                if len(asked) < most:
                    heappush(asked, end)
                else:
                    heappushpop(asked, end)

    def load(self, request: Request, found: int, known: int) -> list[Loaded]:
        """A request that is admitted loads what lies between `found` and `known`: of each tier what no nearer one has.
        All chunks of its prompt that tiers have stay until it is over."""
        chunk, near, now, begin = self._chunk, self.tiers[0], self.now_s, self.begin_s
        request.stored = known // chunk
        rest = mine = self._stretches(request, found // chunk, request.stored)
        rows, promoted, over = [], list[Stretch](), begin
        for i, tier in enumerate(self.tiers):
            here, rest = tier.split(rest, now, ahead=tier is near)
            if not here:
                continue
            tokens = _length(here) * chunk
            if here[0][:2] == mine[0][:2]:
                tokens -= found % chunk
            ends = [
                tier.ready_s(here),
                *self._gives(i, begin, tokens),
                self._read.take(begin, tokens * self.offload.read_s),
            ]
            end = max(ends) + tier.spec.latency_s
            rows.append(Loaded(i, tokens, end))
            over = max(over, end)
            promoted += here if i else []
        whole = self._stretches(request, 0, request.target // chunk)
        for tier in self.tiers:
            tier.touch(whole, now, over)
        if promoted := near.split(promoted, LATER)[1]:
            job = Job()
            job.ready_s = over
            if near.store(promoted, job, now):
                near.touch(whole, now, over)
        if self.loads == "async":
            self._coming[request] = mine, over
        return rows

    def _gives(self, i: int, begin_s: float, tokens: int) -> list[float]:
        """When so many tokens of a tier, read from then on, have taken its own wires."""
        tier = self.tiers[i]
        ends = [tier.read.take(begin_s, tokens * tier.spec.read_s)] if tier.spec.read_s else []
        if tier.spec.link_s:
            ends.append(self._links[i][0].take(begin_s, tokens * tier.spec.link_s))
        return ends

    def received(self, request: Request) -> None:
        """It takes its place in the queue."""
        if self.prefetches:
            self._received.append(request)

    def fetch_ahead(self, now: float) -> None:
        """What only farther tiers have of those who were received begins to come to the nearest."""
        received, self._received = self._received, []
        for request in received:
            if not request.over:
                self._fetch(request, now)

    def _fetch(self, request: Request, now: float) -> None:
        self.now_s, chunk, near, over = now, self._chunk, self.tiers[0], now
        found, _ = self.lookup(request)
        last = self.beyond(request, found) // chunk
        rest = near.split(self._stretches(request, found // chunk, max(last, found // chunk)), LATER)[1]
        if not rest or not near.store(rest, job := Job(ahead=True), now):
            return
        for i, tier in enumerate(self.tiers[1:], 1):
            here, rest = tier.split(rest, now)
            if here:
                tier.fetched += (chunks := _length(here))
                over = max(over, max([now, *self._gives(i, now, chunks * chunk)]) + tier.spec.latency_s)
        job.ready_s = over
        whole = self._stretches(request, 0, last)
        for tier in self.tiers:
            tier.touch(whole, now, over)

    def comes_s(self, request: Request) -> float:
        """When what it loads will be there."""
        return self._coming[request][1]

    def arrived(self, request: Request) -> None:
        """What it loaded is there; if it was given up meanwhile, nobody will find that."""
        del self._coming[request]
        if not request.over:
            self.filled(request, request.arriving)

    # Stores.

    def planned(self, chunks: Sequence[tuple[Request, int, int]]) -> None:
        """The step that was just planned computes these chunks of prompts."""
        for request, tokens, before in chunks:
            self._offer(request, before + tokens)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """As in a prefix cache; and what of it tiers have not been offered goes there."""
        self._offer(request, kept)
        super().release(request, tokens, kept, again)

    def did(self, i: int) -> tuple[int, ...]:
        """Of a tier, in tokens: what it holds, was given, had no room for, has given up, and gave ahead."""
        tier = self.tiers[i]
        return tuple(n * self._chunk for n in (tier.held, tier.stored, tier.dropped, tier.evicted, tier.fetched))

    @property
    def sends(self) -> bool:
        """Whether anything is to leave the GPU when the next step ends."""
        return bool(self._pending)

    def send(self, now: float) -> None:
        """What was offered until now leaves the GPU."""
        for leaving, stores in self._pending:
            gone = self._write.take(now, leaving * self._chunk * self.offload.write_s)
            for i, chunks, job in stores:
                tier, tokens = self.tiers[i], chunks * self._chunk
                ends = [gone]
                if tier.spec.write_s:
                    ends.append(tier.write.take(gone, tokens * tier.spec.write_s))
                if tier.spec.link_s:
                    ends.append(self._links[i][1].take(gone, tokens * tier.spec.link_s))
                job.ready_s = max(ends) + tier.spec.latency_s
        self._pending.clear()

    def _offer(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a request are computed with this step: the chunks among them that have not been
        offered before are stored where they are missing."""
        upto = tokens // self._chunk
        if upto <= request.stored:
            return
        offered = self._stretches(request, request.stored, upto)
        request.stored = upto
        if self.offload.store_after > 1:
            offered = [(c, start, end) for c, start, end in map(self._wanted, offered) if start < end]
        leaving, stores = list[Stretch](), []
        for i, tier in enumerate(self.tiers):
            lacks = tier.split(offered, LATER)[1]
            if lacks and tier.store(lacks, job := Job(), self.now_s):
                stores.append((i, _length(lacks), job))
                leaving += lacks
        if stores:
            whole = self._stretches(request, 0, upto)
            for i, *_ in stores:
                self.tiers[i].touch(whole, self.now_s)
            self._pending.append((_union(leaving), stores))

    def _wanted(self, stretch: Stretch) -> Stretch:
        """The part of a stretch that enough requests have asked for."""
        content, start, end = stretch
        asked = self._asked.get(content, [])
        return content, start, min(end, asked[0] if len(asked) == self.offload.store_after else 0)

    def _stretches(self, request: Request, first: int, last: int) -> list[Stretch]:
        """What a request's chunks `first` to before `last` hold; a chunk is of the stretch in which it ends."""
        shared = request.stretches
        if shared is None:
            shared = request.stretches = self._shared(request)
        tail = shared[-1][2] if shared else 0
        if first or last < tail:
            found = []
            for stretch in shared:
                content, start, end = stretch
                if end > first and start < last:
                    inside = start >= first and end <= last
                    found.append(stretch if inside else (content, max(start, first), min(end, last)))
        else:
            found = shared.copy()
        if last > tail:
            found.append((own_content(request), max(tail, first), last))
        return found

    def _shared(self, request: Request) -> list[Stretch]:
        """The beginning of its prompt that others have too."""
        found, at, blocks = list[Stretch](), 0, self._chunk // self.block_size
        for content, until in self._path(request):
            if (end := until // blocks) > at:
                found.append((content, at, end))
                at = end
        return found


def _length(stretches: Sequence[Stretch]) -> int:
    return sum(end - start for _, start, end in stretches)


def _union(stretches: list[Stretch]) -> int:
    """How many chunks are in any of these."""
    total, of, until = 0, 0, 0
    for content, start, end in sorted(stretches):
        if content != of:
            of, until = content, 0
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
