"""Places beyond the GPU that keep KV: what each holds, in what order it is lost, and how long it takes to get there.

As in vLLM's `v1/kv_offload/` (0.24) and LMCache: KV is kept in chunks, each named by what it and all before it hold; a
chunk can be read once it is written; the ones not used for longest go first, of a prompt its tail, and none that is on
its way in or out. A store that finds no room is dropped. Chunks are handled by the run (`Held`).

It knows the content of chunks and the time, nothing of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Stretch = tuple[int, int, int]
"""Content, and from which chunk to before which by index; see `workloads.content`."""
LATER = float("inf")


class Wire:
    """One direction of a link or a device, busy with one transfer after the other."""

    __slots__ = ("busy_s", "free_s")

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def take(self, ready_s: float, seconds: float) -> float:
        """Queue a transfer that is ready then and takes so long: when it is over."""
        self.free_s = max(ready_s, self.free_s) + seconds
        self.busy_s += seconds
        return self.free_s


@dataclass(frozen=True, slots=True)
class TierSpec:
    """`chunks` that it holds; seconds from a transfer's end at the wires until it is there, and seconds of a token on
    the device's own wire, which all share that share the tier, and on the replica's `link` to it, in both directions.
    What is 0 nobody waits for."""

    name: str
    chunks: int
    latency_s: float
    read_s: float = 0.0
    write_s: float = 0.0
    link_s: float = 0.0
    shared: bool = False


class Job:
    """Chunks that are written together: when they can be read. `LATER` until that is known. `ahead`: they come from a
    farther tier, before anybody asks for them."""

    __slots__ = ("ahead", "ready_s")

    def __init__(self, ahead: bool = False) -> None:
        self.ready_s = LATER
        self.ahead = ahead


class Held:
    """Chunks `start` to before `end` of one content, next to each other in the queue, of which the last goes first."""

    __slots__ = ("content", "end", "job", "read_until_s", "start")

    def __init__(self, content: int, start: int, end: int, job: Job, read_until_s: float) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.job = job
        self.read_until_s = read_until_s

    def idle(self, now: float) -> bool:
        """Whether nobody reads or writes it."""
        return self.job.ready_s <= now and self.read_until_s <= now


class Tier:
    """One such place."""

    __slots__ = ("_queue", "_runs", "dropped", "evicted", "fetched", "held", "read", "spec", "stored", "write")

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.read = Wire()
        self.write = Wire()
        self.held = 0
        self.stored = self.dropped = self.evicted = 0
        self.fetched = 0  # chunks that it gave before anybody asked for them
        self._runs: dict[int, list[Held]] = {}  # content -> its runs, by start
        self._queue: OrderedDict[Held, None] = OrderedDict()  # in the order in which they are lost

    def follow(self, content: int, at: int, stop: int, now: float) -> int:
        """The first chunk of a content, from `at` on and before `stop`, that cannot be read; else `stop`."""
        for run in self._runs.get(content, ()):
            if run.start <= at < run.end and run.job.ready_s <= now:
                at = min(run.end, stop)
                if at == stop:
                    break
        return at

    def touch(self, stretches: Sequence[Stretch], now: float, read_until_s: float = 0.0) -> None:
        """Of these stretches, in the order of a prompt, what is here was used just now: the first chunk last. It stays
        until `read_until_s`."""
        queue, all_runs = self._queue, self._runs
        for content, start, end in reversed(stretches):
            runs = all_runs.get(content)
            if runs is None:
                continue
            if len(runs) == 1 and (run := runs[0]).end <= end:
                queue.move_to_end(run)
                if read_until_s > run.read_until_s:
                    run.read_until_s = read_until_s
                continue
            for i in range(len(runs) - 1, -1, -1):
                if runs[i].end > start and runs[i].start < end:
                    self._used(runs, i, start, end, now, read_until_s)

    def _used(self, runs: list[Held], i: int, start: int, end: int, now: float, read_until_s: float) -> None:
        run, queue = runs[i], self._queue
        if run.end > end:  # what is above keeps its place
            low = Held(run.content, run.start, end, run.job, run.read_until_s)
            run.start = end
            runs.insert(i, low)
            run = low
        assert run.start >= start, "a content always begins with the same chunk of a prompt"
        queue[run] = None
        queue.move_to_end(run)
        run.read_until_s = max(run.read_until_s, read_until_s)
        above = runs[i + 1] if i + 1 < len(runs) else None
        if above is None or above.start != run.end or above.start >= end:
            return
        alike = run.read_until_s == above.read_until_s or max(run.read_until_s, above.read_until_s) <= now
        if alike and run.job.ready_s <= now and above.job.ready_s <= now:
            above.start = run.start  # that was used just before: it is next to this one in the queue
            if run.job.ready_s > above.job.ready_s:
                above.job = run.job
            del queue[run], runs[i]

    def split(
        self, stretches: Sequence[Stretch], now: float, ahead: bool = False
    ) -> tuple[list[Stretch], list[Stretch]]:
        """Of these stretches, what can be read then, and the rest; `now` LATER: what is here or on its way in. With
        `ahead` also what comes from farther tiers."""
        here, rest = [], []
        for content, at, end in stretches:
            for run in self._runs.get(content, ()):
                if run.end > at and run.start < end and (run.job.ready_s <= now or (ahead and run.job.ahead)):
                    if run.start > at:
                        rest.append((content, at, run.start))
                    here.append((content, max(at, run.start), min(run.end, end)))
                    at = run.end
            if at < end:
                rest.append((content, at, end))
        return here, rest

    def ready_s(self, stretches: Sequence[Stretch]) -> float:
        """When the last of these stretches, all of them here or on their way in, can be read."""
        runs = ((run, s) for s in stretches for run in self._runs[s[0]])
        return max(run.job.ready_s for run, (_, start, end) in runs if run.end > start and run.start < end)

    def store(self, stretches: Sequence[Stretch], job: Job, now: float) -> bool:
        """Make room for all of these chunks, none of which is here, and write them with `job`; or drop them all."""
        need = sum(end - start for _, start, end in stretches)
        if not self._make_room(need - (self.spec.chunks - self.held), now):
            self.dropped += need
            return False
        self.stored += need
        self.held += need
        for content, start, end in reversed(stretches):
            runs, run = self._runs.setdefault(content, []), Held(content, start, end, job, 0.0)
            at = len(runs)
            while at and runs[at - 1].start > start:
                at -= 1
            runs.insert(at, run)
            self._queue[run] = None
        return True

    def _make_room(self, need: int, now: float) -> bool:
        """Evict `need` chunks, or none where there are not so many that could go."""
        victims = []
        if need > 0:
            for run in self._queue:
                if run.idle(now):
                    victims.append((run, min(run.end - run.start, need)))
                    need -= victims[-1][1]
                    if not need:
                        break
            else:
                return False
        for run, chunks in victims:
            run.end -= chunks
            self.held -= chunks
            self.evicted += chunks
            if run.start == run.end:
                del self._queue[run]
                runs = self._runs[run.content]
                runs.remove(run)
                if not runs:
                    del self._runs[run.content]
        return True
