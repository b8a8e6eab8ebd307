"""Where TTFT and TPOT were spent: those of each finished request in parts, which add up to them.

Until the first token: the network and earlier tries that were given up, where there are such; before a replica had the
request, in its front end, in its engine's queue; and from its first step on in steps, whose time is divided as
`sim.work` says it: into what its own prompt took (by its share of the prompt tokens in these steps), what those of
others took, and what decodes took. Where it was handed over, the stages after that (`STAGES` of `sim.occupancy`); where
KV comes from tiers, how long it waited for that. Between tokens: steps as far as they decode, and as far as they held
prompts of others; and whole gaps in which it was preempted or left out of a step, or handed over.

Derived once a run is over, a block of requests at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sim import metrics
from sim.deployment import Classes, Deployment
from sim.metrics import Floats
from sim.samples import STRIDE
from sim.steplog import Table
from sim.tier_use import load_waits
from sim.work import OWN_PROMPTS, PROMPTS, TOKENS, TOOK, Work

Whole = npt.NDArray[np.int64]
Group = npt.NDArray[np.int32]
Parts = dict[str, Floats]

SLOWEST = 0.01
"""The share of the requests that are called the slowest."""

HANDED = ("decode_queue", "link_queue", "transfer", "first_decode")
"""Parts of TTFT that only requests have which are handed over before their first token."""


@dataclass(frozen=True, slots=True)
class Handed:
    """The hand-overs of some requests: NaN, and replica -1, where there was none."""

    replica: Whole  # that read the prompt
    read_s: Floats
    reserved_s: Floats
    start_s: Floats
    end_s: Floats

    @property
    def reserved_first(self) -> npt.NDArray[np.bool_]:
        """For whom the decode side had blocks before the prompt was read."""
        found: npt.NDArray[np.bool_] = self.reserved_s < self.read_s
        return found

    @property
    def there(self) -> npt.NDArray[np.bool_]:
        """Who was handed over."""
        return self.replica >= 0


class Spent:
    """The requests `done` (all finished) of a run, with the rest of its log."""

    def __init__(
        self,
        done: Table,
        steps: Table,
        transfers: Table,
        gaps: Table,
        deployment: Deployment,
        loads: Table | None = None,
    ) -> None:
        self._done = done
        self._waits = load_waits(loads) if loads is not None and loads.height else None
        self._deployment = deployment
        self._work = Work(steps, deployment)
        self._transfers = transfers
        self._transfer_of = np.argsort(transfers["id"], kind="stable")
        self._transfer_id = transfers["id"][self._transfer_of]
        ids = gaps["id"]
        left_out = np.flatnonzero(ids >= 0)
        ids = ids[left_out] % STRIDE
        order = np.argsort(ids, kind="stable")
        self._gaps = gaps.take(left_out[order])
        self._gap_id = ids[order]

    def handed(self, rows: Mapping[str, Floats]) -> Handed:
        """The hand-overs of some requests; of several, the last one counts."""
        ids = rows["id"]
        at = np.searchsorted(self._transfer_id, ids, side="right") - 1
        there = np.flatnonzero((at >= 0) & (self._transfer_id[at] == ids)) if len(self._transfer_id) else at[:0]
        found = self._transfers.take(self._transfer_of[at[there]])
        replica = np.full(len(ids), -1)
        replica[there] = found["prefill_replica"]
        times = np.full((4, len(ids)), np.nan)
        for time, name in zip(times, ("read_s", "reserved_s", "start_s", "end_s"), strict=True):
            time[there] = found[name]
        return Handed(replica, *times)

    def ttft(self, rows: Mapping[str, Floats], handed: Handed) -> Parts:
        """The parts of the TTFT of some requests, in seconds: in order of time, and of importance within steps."""
        first, scheduled, there = rows["first_token_s"], rows["scheduled_s"], handed.there
        read = np.where(there, handed.read_s, first)
        replica = np.where(there, handed.replica, rows["replica"].astype(np.int64))
        done = self._work.until(replica, read) - self._work.until(replica, scheduled)
        window = read - scheduled
        scale = _ratio(window, done[TOOK])
        tokens = rows["prompt_tokens"] * rows["samples"] - rows["cached_tokens"]
        own = done[OWN_PROMPTS] * scale * np.minimum(_ratio(tokens, done[TOKENS]), 1.0)
        decodes = (done[TOOK] - done[PROMPTS]) * scale
        parts = {
            "no_replica": rows["sent_s"] - metrics.arrived_s(rows),
            "front_end": rows["queued_s"] - rows["sent_s"],
            "queue": scheduled - rows["queued_s"],
            "prefill": own,
            "other_prompts": window - own - decodes,
            "other_decodes": decodes,
        }
        if self._waits is not None:
            self._take_loads(parts, rows)
        outside = {"network": rows["network_s"], "earlier_tries": rows["retried_s"]}
        parts |= {name: taken for name, taken in outside.items() if taken.any()}
        if there.any():
            late = there & (first > read)
            times = (read, np.fmax(handed.reserved_s, read), handed.start_s, handed.end_s, first)
            for name, since, until in zip(HANDED, times, times[1:], strict=False):
                parts[name] = np.where(late, until - since, 0.0)
            before = np.where(handed.reserved_first, np.fmax(handed.reserved_s - rows["queued_s"], 0.0), 0.0)
            parts["queue"] = parts["queue"] - before
            parts["decode_queue"] = parts["decode_queue"] + before
        return parts

    def _take_loads(self, parts: Parts, rows: Mapping[str, Floats]) -> None:
        """What a request waited for KV from tiers is a part of its own: not of its queue, and of its steps that of all
        their prompts."""
        assert self._waits is not None
        ids, since, waited = self._waits
        whose, which = _among(ids, rows["id"])
        since, waited, count = since[which], waited[which], len(rows["id"])
        before = since < rows["scheduled_s"][whose]
        within = ~before & (since < rows["first_token_s"][whose])
        queued, stepped = (np.bincount(whose, waited * some, count).astype(np.float64) for some in (before, within))
        prompts = parts["prefill"] + parts["other_prompts"]
        queued, stepped = np.minimum(queued, parts["queue"]), np.minimum(stepped, prompts)
        parts["queue"] = parts["queue"] - queued
        rest = 1.0 - _ratio(stepped, prompts)
        for name in ("prefill", "other_prompts"):
            parts[name] = parts[name] * rest
        parts["kv_load"] = queued + stepped

    def tpot(self, rows: Mapping[str, Floats], handed: Handed) -> Parts:
        """The parts of the TPOT of some requests with two tokens at least, in seconds a token."""
        first, finish, samples = rows["first_token_s"], rows["finish_s"], rows["samples"]
        replica = rows["replica"].astype(np.int64)
        whose, since, until = self._gaps_of(rows["id"])
        in_time = since >= first[whose]  # not of a try that was lost
        whose, since, until = whose[in_time], since[in_time], until[in_time]
        early = (first <= handed.end_s) & ~handed.reserved_first  # the prefill side streams the first token
        over = early[whose] & (since == first[whose])
        begin = first.copy()
        begin[whose[over]] = until[over]
        whose, since, until = whose[~over], since[~over], until[~over]
        done = self._work.until(replica, finish) - self._work.until(replica, begin)
        lost = self._work.until(replica[whose], until) - self._work.until(replica[whose], since)
        for sums, gone in zip(done, lost, strict=True):
            sums -= np.bincount(whose, gone, len(first)) / samples
        left_out = np.bincount(whose, until - since, len(first)) / samples
        stepping = finish - begin - left_out
        prompts = done[PROMPTS] * _ratio(stepping, done[TOOK])
        parts = {
            "decode": stepping - prompts,
            "other_prompts": prompts,
            "left_out": left_out,
            "handed_over": begin - first,
        }
        tokens = rows["output_tokens"] / samples - 1
        return {name: part / tokens for name, part in parts.items()}

    def _gaps_of(self, ids: Floats) -> tuple[Whole, Floats, Floats]:
        """(which of the requests, since, until) of the gaps in which these were left out."""
        whose, which = _among(self._gap_id, ids)
        found = self._gaps.take(which)
        return whose, found["since_s"], found["end_s"]

    def summary(self, classes: Classes | None) -> dict[str, dict[str, Any]]:
        """`all`, and by class and by pool (TTFT: that read, TPOT: that answered): of `ttft_ms` and `tpot_ms` the mean
        of every part, over all requests (`mean`) and over those that took the longest (`slowest`, SLOWEST of them)."""
        names = {"all": ("",), "pools": tuple(pool.name for pool in self._deployment.pools)}
        if classes is not None:
            names["classes"] = classes.names
        out: dict[str, dict[str, Any]] = {kind: {name: {} for name in each} for kind, each in names.items()}
        for metric in ("ttft", "tpot"):
            values, groups = [], []
            for some in self._some(metric, classes):
                values.append(some.took_s)
                groups.append(some.groups)
            means = {
                kind: Means(np.concatenate(values), np.concatenate([group[kind] for group in groups]), len(each))
                for kind, each in names.items()
            }
            for some in self._some(metric, classes):
                parts = some.parts()
                for kind, mean in means.items():
                    mean.add(some.took_s, some.groups[kind], parts)
            for kind, each in names.items():
                for i, name in enumerate(each):
                    if found := means[kind].of(i):
                        out[kind][name][f"{metric}_ms"] = found
        return out

    def _some(self, metric: str, classes: Classes | None) -> Iterator[Some]:
        """The requests that have the metric, some at a time."""
        pools = np.arange(len(self._deployment.pools), dtype=np.int32)
        pool = np.repeat(pools, [pool.replicas for pool in self._deployment.pools])
        for block in self._done.blocks():
            rows = block if metric == "ttft" else block.where(block["output_tokens"] > block["samples"])
            handed = self.handed(rows)
            replica = rows["replica"].astype(np.int64)
            if metric == "ttft":
                replica = np.where(handed.there, handed.replica, replica)
            groups = {"all": np.zeros(len(replica), dtype=np.int32), "pools": pool[replica]}
            if classes is not None:
                groups["classes"] = classes.of(rows).astype(np.int32)
            if metric == "ttft":
                yield Some(metrics.ttft_s(rows), groups, partial(self.ttft, rows, handed))
            else:
                yield Some(metrics.tpot_s(rows), groups, partial(self.tpot, rows, handed))


@dataclass(frozen=True, slots=True)
class Some:
    """What some requests took, the group that each is in (by way of grouping them), and the parts of that."""

    took_s: Floats
    groups: Mapping[str, Group]
    parts: Callable[[], Parts]


class Means:
    """The mean parts of all, and of the slowest requests, in each of `size` groups: of requests that took `took_s` and
    are in `group`, once they have all been added."""

    def __init__(self, took_s: Floats, group: Group, size: int) -> None:
        self._limit_s = np.full(size, np.inf)  # from which on a request is one of the slowest
        for g in range(size):
            mine = took_s if size == 1 else took_s[group == g]
            if len(mine):
                others = len(mine) - int(np.ceil(SLOWEST * len(mine)))
                self._limit_s[g] = np.partition(mine, others)[others]
        self._count = np.zeros((2, size))
        self._sums: dict[str, Floats] = {}

    def add(self, took_s: Floats, group: Group, parts: Parts) -> None:
        """Some of the requests."""
        size = len(self._limit_s)
        slowest = (took_s >= self._limit_s[group]).astype(np.float64)
        for i, weight in enumerate((np.ones(len(took_s)), slowest)):
            self._count[i] += np.bincount(group, weight, size)
            for name, part in parts.items():
                total = self._sums.setdefault(name, np.zeros((2, size)))
                total[i] += np.bincount(group, part * weight, size)

    def of(self, g: int) -> dict[str, dict[str, float]]:
        """Of a group, in milliseconds; nothing where it is empty."""
        if not self._count[0, g]:
            return {}
        return {
            which: {name: 1e3 * float(total[i, g] / self._count[i, g]) for name, total in self._sums.items()}
            for i, which in enumerate(("mean", "slowest"))
        }


def _among(sorted_ids: Floats, ids: Floats) -> tuple[Whole, Whole]:
    """Where `ids` are among `sorted_ids`, each perhaps several times: (which of the former, which of the latter)."""
    low, high = (np.searchsorted(sorted_ids, ids, side=side) for side in ("left", "right"))
    count = high - low
    whose = np.repeat(np.arange(len(ids)), count)
    return whose, np.arange(len(whose)) + np.repeat(low - np.cumsum(count) + count, count)


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b; 0 where b is not positive."""
    return np.divide(a, b, out=np.zeros(len(a)), where=b > 0)
