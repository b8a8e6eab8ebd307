"""How many replicas there were when: from the log of those that come and go. It knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim.metrics import Floats, time_average
from sim.steplog import DOWN, DRAIN, START, UP

EXIST = (START, UP, DRAIN)
"""After these changes a replica exists, and its GPUs are paid for."""


class Presence:
    """The replicas of a run in which some came or went; `changes` has CHANGE_COLUMNS."""

    def __init__(self, changes: Mapping[str, Floats]) -> None:
        self._time_s = changes["time_s"]
        self._replica = changes["replica"].astype(np.int64)
        self._change = changes["change"].astype(np.int64)

    def counts(self, replicas: range, states: tuple[int, ...] = EXIST) -> tuple[Floats, Floats]:
        """(times, how many of the replicas are in one of these states from each time on)."""
        mine = (self._replica >= replicas.start) & (self._replica < replicas.stop)
        times, replica, there = self._time_s[mine], self._replica[mine], np.isin(self._change[mine], states)
        order = np.argsort(replica, kind="stable")
        before = np.empty(len(order), dtype=bool)
        before[order] = np.concatenate([[False], there[order][:-1]]) & ~_first(replica[order])
        return times, np.cumsum(there.astype(float) - before)

    def seconds(self, replicas: range, until_s: float) -> float:
        """For how long they existed, all together, from time 0 on."""
        if until_s <= 0:
            return 0.0
        return time_average(*self.counts(replicas), 0.0, until_s) * until_s

    def each(self, replicas: range, until_s: float) -> Floats:
        """float64[len(replicas)]: for how long each of them existed."""
        return np.array([self.seconds(range(n, n + 1), until_s) for n in replicas])

    def most(self, replicas: range) -> int:
        """How many of them existed at one time."""
        return int(self.counts(replicas)[1].max(initial=0.0))

    def happened(self, replicas: Sequence[int]) -> dict[str, int]:
        """How often some of them failed, were started and drained."""
        change = self._change[np.isin(self._replica, replicas)]
        return {
            "replica_failures": int((change == DOWN).sum()),
            "replica_starts": int((change == START).sum()),
            "replica_drains": int((change == DRAIN).sum()),
        }


def _first(sorted_replicas: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.bool_]:
    """Which rows are the first one of their replica."""
    return np.concatenate([[True], sorted_replicas[1:] != sorted_replicas[:-1]])[: len(sorted_replicas)]
