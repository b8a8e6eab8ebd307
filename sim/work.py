"""What the steps of each replica had taken until any time, and what of that their prompts took: from the step log.

A step that holds prompts takes longer than its decodes need. They are said to need what a step without prompts took on
average in this run, in that pool and with as many decoding sequences (of a number that never decoded alone: as between
its neighbours); what is over is the prompts'. Engines that step together wait for each other's prompts.

The log is read a block at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sim.deployment import Deployment
from sim.metrics import Floats
from sim.steplog import Table

TOOK, PROMPTS, OWN_PROMPTS, TOKENS = range(4)
"""What is summed up over steps: their seconds, those of prompts, those where the engine had prompts itself, and their
tokens."""
SUMS = 4


class Work:
    """`until` says what had been done when, in the replicas of `deployment` with the log `steps`."""

    def __init__(self, steps: Table, deployment: Deployment) -> None:
        self._blocks = list(steps.blocks())
        sizes = [pool.replicas for pool in deployment.pools]
        self._replicas = sum(sizes)
        self._pool = np.repeat(np.arange(len(sizes)), sizes)
        ranks = np.repeat([pool.ranks for pool in deployment.pools], sizes)
        first = np.repeat(deployment.first[:-1], sizes)
        place = np.arange(self._replicas) - first
        self._group = first + place // ranks * ranks  # the first of those that step together
        self._together = bool((ranks > 1).any())
        self._alone_s = self._without_prompts(len(sizes))
        before, begins = np.zeros((SUMS, self._replicas)), []
        self._before = []  # [SUMS, replicas] of each block: what the blocks before it come to
        for block in self._blocks:
            self._before.append(before)
            replica = block["replica"].astype(np.int64)
            sums = [np.bincount(replica, s, self._replicas) for s in self._sums(block, replica)]
            before = before + np.array(sums)
            begins.append(block["end_s"].min(initial=np.inf))
        self._begins = np.minimum.accumulate(begins[::-1])[::-1]

    def until(self, replica: npt.NDArray[np.int64], time_s: Floats) -> Floats:
        """float64[SUMS, n]: what the replica's steps that began before the time come to."""
        out = np.empty((SUMS, len(time_s)))
        at = np.maximum(np.searchsorted(self._begins, time_s, side="right") - 1, 0)
        for i in np.unique(at):
            here = np.flatnonzero(at == i)
            out[:, here] = self._within(int(i), replica[here], time_s[here])
        return out

    def _within(self, i: int, replica: npt.NDArray[np.int64], time_s: Floats) -> Floats:
        block = self._blocks[i]
        of = block["replica"].astype(np.int64)
        order = np.argsort(of, kind="stable")
        begin = np.searchsorted(of[order], np.arange(self._replicas + 1))
        starts_s = block["start_s"][order]
        row = np.empty(len(time_s), dtype=np.int64)
        asked = np.argsort(replica, kind="stable")
        which, starts = np.unique(replica[asked], return_index=True)
        for number, mine in zip(which, np.split(asked, starts[1:]), strict=True):
            a, b = begin[number], begin[number + 1]
            row[mine] = a + np.searchsorted(starts_s[a:b], time_s[mine])
        out = self._before[i][:, replica]
        for sums, s in zip(out, self._sums(block, of), strict=True):
            total = np.concatenate([[0.0], np.cumsum(s[order])])
            sums += total[row] - total[begin[replica]]
        return out

    def _sums(self, block: Mapping[str, Floats], replica: npt.NDArray[np.int64]) -> tuple[Floats, ...]:
        """What is summed up, of each row."""
        took, own = block["end_s"] - block["start_s"], block["prefill_tokens"]
        decodes_s = self._alone_s[self._pool[replica], block["decodes"].astype(np.int64)]
        prompts = np.where(self._hold(block, replica), np.maximum(took - decodes_s, 0.0), 0.0)
        return took, prompts, np.where(own > 0, prompts, 0.0), own

    def _hold(self, block: Mapping[str, Floats], replica: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether a row holds prompts, or that of another engine which steps together with it (and is in the block)."""
        own = block["prefill_tokens"] > 0
        if not self._together or not len(own):
            return own
        group, end = self._group[replica], block["end_s"]
        step = np.cumsum(np.concatenate([[True], (np.diff(group) != 0) | (np.diff(end) != 0)])) - 1
        found: npt.NDArray[np.bool_] = (np.bincount(step, own) > 0)[step]
        return found

    def _without_prompts(self, pools: int) -> Floats:
        """float64[pools, decodes]: seconds of a step without prompts, by how many sequences decode in it."""
        most = 1 + max(int(block["decodes"].max(initial=0)) for block in self._blocks)
        took, steps = np.zeros(pools * most), np.zeros(pools * most)
        for block in self._blocks:
            replica = block["replica"].astype(np.int64)
            alone = ~self._hold(block, replica)
            kind = (self._pool[replica] * most + block["decodes"].astype(np.int64))[alone]
            took += np.bincount(kind, (block["end_s"] - block["start_s"])[alone], len(took))
            steps += np.bincount(kind, block["steps"][alone], len(took))
        out = np.zeros((pools, most))
        for pool, (t, n) in enumerate(zip(took.reshape(pools, most), steps.reshape(pools, most), strict=True)):
            there = np.flatnonzero(n)
            if len(there):
                out[pool, 1:] = np.interp(np.arange(1, most), there, t[there] / n[there])
        return out
