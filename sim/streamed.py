"""What clients saw of the streams of a run's finished requests: the times between messages, and of single tokens.

Where every token is a message, the gaps of all requests follow from the log of steps at once (`metrics.itl`); where a
server streams less often, they are those of each request's messages. Of pipelines, whose batches take turns, only the
first and the last token of a request are known.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sim import metrics
from sim.deployment import Deployment
from sim.metrics import Distribution, Floats
from sim.steplog import Table
from sim.streams import Streams


class Streamed:
    """Of the requests `done`, with the rest of their run's log. `stages`: the replicas are pipelines."""

    def __init__(self, done: Table, steps: Table, gaps: Table, deployment: Deployment, stages: bool) -> None:
        self._done = done
        self._steps = steps
        self._gaps = gaps
        self._stages = stages
        self._deployment = deployment
        self._every = deployment.of(lambda pool: pool.stream_interval)

    @cached_property
    def _streams(self) -> Streams:
        interval = None
        if self._seldom:
            interval = self._every[self._done["replica"].astype(np.int64)].astype(np.int64)
        return Streams(self._done, self._steps, self._gaps, interval, self._by_step)

    @cached_property
    def _by_step(self) -> npt.NDArray[np.bool_] | None:
        """bool[n]: whose replica drafts tokens, of which a step yields several; None where none does."""
        drafts = self._deployment.of(lambda pool: pool.drafting is not None) > 0
        return drafts[self._done["replica"].astype(np.int64)] if drafts.any() else None

    @property
    def _seldom(self) -> bool:
        return bool(self._every.max() > 1)

    @cached_property
    def itl(self) -> Distribution:
        """Seconds between consecutive messages: over all requests; where messages hold several tokens over the finished
        ones whose streams are known."""
        if self._seldom:
            return self._between(-np.inf, np.inf)
        return metrics.itl(list(self._steps.blocks()), self._gaps)

    def itl_within(self, edges_s: Floats) -> list[Distribution]:
        """The same of each of the spans between edges [n + 1], of the gaps (of a run of steps: all of them) that begin
        in it."""
        found = []
        for start, end in pairwise(edges_s.tolist()):
            if self._seldom:
                found.append(self._between(start, end))
                continue
            steps, gaps = (
                rows.where((rows[begun] >= start) & (rows[begun] < end))
                for rows, begun in ((self._steps, "start_s"), (self._gaps, "since_s"))
            )
            found.append(metrics.itl([steps], gaps))
        return found

    def _between(self, start_s: float, end_s: float) -> Distribution:
        pieces = [gap_s[(since_s >= start_s) & (since_s < end_s)] for _, since_s, gap_s in self._streams.messages()]
        return Distribution.of(np.concatenate([np.empty(0), *pieces]))

    @cached_property
    def longest_gaps(self) -> Floats:
        """float64[n]: see `Streams`."""
        return np.full(self._done.height, np.nan) if self._stages else self._streams.longest_gaps()

    def over(self, limits_s: Floats) -> Floats:
        """float64[n]: how many gaps of each are over its limit; NaN where it has none, or they are not known."""
        found = np.full(self._done.height, np.nan)
        for limit_s in np.unique(limits_s[~np.isnan(limits_s)]).tolist() if not self._stages else ():
            mine = limits_s == limit_s
            found[mine] = self._streams.over(limit_s)[mine]
        return found

    def counts(self) -> npt.NDArray[np.int64]:
        """int64[n]: how many gaps each has."""
        return self._streams.counts()

    def _messages(self, number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64[n]: in which message a token of each was; 0 where that cannot be told, since drafts were lost to a
        preemption, or to a small budget."""
        assert self._by_step is not None
        done, found, counts = self._done, number.copy(), self._streams.counts()
        pools = [pool.drafting for pool in self._deployment.pools for _ in range(pool.replicas)]
        replica, ids, tokens = (done[name].astype(np.int64).tolist() for name in ("replica", "id", "output_tokens"))
        for i in np.flatnonzero(self._by_step).tolist():
            drafting = pools[replica[i]]
            assert drafting is not None
            alike = counts[i] == drafting.steps(ids[i], tokens[i] - 1)
            found[i] = 1 + drafting.steps(ids[i], int(number[i]) - 1) if alike else 0
        return found

    def token_s(self, number: npt.NDArray[np.int64]) -> Floats:
        """float64[n]: when a token of each came, by its number from 1."""
        if not self._stages:
            return self._streams.token_s(number, None if self._by_step is None else self._messages(number))
        done, last = self._done, self._done["output_tokens"]
        return np.where(number <= 1, done["first_token_s"], np.where(number == last, done["finish_s"], np.nan))
