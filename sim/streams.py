"""When the tokens of each request came: its longest gap, and the time of any of its tokens.

From the log of steps: a request has a token in every step of its replica that decodes, from its first to its last.
Where all that decode wait for prompts, the gap is that between two steps that decode; gaps in which a request alone
was preempted or left out are logged by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sim.metrics import Floats

SAME_S = 1e-7
"""Times of one step from two logs: within a run of steps they are rounded."""
STRIDE = 2.0**40
"""More than the steps of any replica: what keys of the next one are further on."""


class Streams:
    """The streams of finished `requests`, from the rows of the log of `steps` and of the long `gaps`. Unknown, and NaN,
    are those of several samples of a prompt, and where a replica's log does not hold all of a request's tokens
    (pipelines; a first token that another replica gave, or none of its steps)."""

    def __init__(self, requests: Mapping[str, Floats], steps: Mapping[str, Floats], gaps: Mapping[str, Floats]) -> None:
        self._requests = requests
        columns = ("replica", "step", "steps", "start_s", "end_s", "first_step_s", "decodes")
        order = np.lexsort((steps["step"], steps["replica"]))
        every = {name: steps[name][order] for name in columns}
        self._rows = rows = {name: column[every["decodes"] > 0] for name, column in every.items()}
        self._first_end = rows["start_s"] + rows["first_step_s"]
        self._done = np.cumsum(rows["steps"])  # steps that decode, up to and with each row
        one = (requests["samples"] == 1) & (requests["output_tokens"] > 1)
        if not len(rows["step"]):
            self._begin = self._last = np.zeros(len(one), np.intp)
            self._known = np.zeros(len(one), bool)
        else:
            mine = requests["replica"] * STRIDE
            key = every["replica"] * STRIDE + every["step"]
            with_first = np.searchsorted(key, mine + requests["first_step"], side="right") - 1
            one &= np.abs(every["end_s"][with_first] - requests["first_token_s"]) < SAME_S
            key = rows["replica"] * STRIDE + rows["step"]
            begin = np.searchsorted(key + rows["steps"] - 1, mine + requests["first_step"], side="right")
            last = np.searchsorted(key, mine + requests["last_step"], side="right") - 1
            known = one & (begin <= last)
            self._begin, self._last = begin, last = np.where(known, begin, 0), np.where(known, last, 0)
            known &= np.abs(rows["end_s"][last] - requests["finish_s"]) < SAME_S
            self._known = known & (rows["replica"][begin] == requests["replica"])
        own = gaps["id"] >= 0
        ids, since_s, end_s = (gaps[name][own] for name in ("id", "since_s", "end_s"))
        at = np.minimum(np.searchsorted(requests["id"], ids), max(len(one) - 1, 0))
        there = np.zeros(len(ids), bool) if not len(one) else (requests["id"][at] == ids) & self._known[at]
        self._alone = (at[there], since_s[there], end_s[there])

    def longest_gaps(self) -> Floats:
        """float64[requests]: seconds of the longest gap between two tokens; NaN too for a single token."""
        found, rows, known = np.full(len(self._known), np.nan), self._rows, self._known
        if not known.any():
            return found
        lead = np.diff(self._first_end, prepend=self._first_end[0])
        lead[1:] = self._first_end[1:] - rows["end_s"][:-1]  # of another replica's last row it is never asked for
        length, count = rows["end_s"] - rows["start_s"], rows["steps"]
        later = np.where(count > 1, 2 * length / count - rows["first_step_s"], -np.inf)
        longest = np.append(np.maximum(lead, later), -np.inf)
        begin, last = self._begin, self._last
        order = np.argsort(begin, kind="stable")  # what lies between two spans is reduced too: it should be little
        spans = np.stack([begin[order] + 1, last[order] + 1], axis=1).ravel()
        inside = np.empty(len(begin))
        inside[order] = np.maximum.reduceat(longest, spans)[::2]
        inside = np.where(begin < last, inside, -np.inf)
        first = self._first_end[begin] - self._requests["first_token_s"]
        found[known] = np.maximum(np.maximum(first, later[begin]), inside)[known]
        at, since_s, end_s = self._alone
        np.maximum.at(found, at, end_s - since_s)
        return found

    def token_s(self, number: npt.NDArray[np.int64]) -> Floats:
        """float64[requests]: when token `number` of each came, from 1; of unknown streams only the first and last."""
        requests = self._requests
        found = np.where(number <= 1, requests["first_token_s"], np.nan)
        found = np.where(number == requests["output_tokens"], requests["finish_s"], found)
        between = np.flatnonzero(self._known & (number > 1) & (number < requests["output_tokens"]))
        before = self._done[self._begin] - self._rows["steps"][self._begin] if len(self._done) else self._done
        found[between] = self._ends(before[between] + number[between] - 1)
        at, since_s, end_s = self._alone
        order = np.lexsort((since_s, at))
        left_out = np.intersect1d(at, between)
        starts, ends = (np.searchsorted(at[order], left_out, side=side) for side in ("left", "right"))
        for i, start, end in zip(left_out.tolist(), starts.tolist(), ends.tolist(), strict=True):
            mine = order[start:end]
            found[i] = self._late(i, int(number[i]) - 1, float(before[i]), since_s[mine], end_s[mine])
        return found

    def _late(self, i: int, left: int, done: float, since_s: Floats, end_s: Floats) -> float:
        """When a request that was left out now and then has had `left` tokens more than after `done` steps."""
        for since, end in zip(since_s.tolist(), end_s.tolist(), strict=True):
            until = max(self._until(i, since), done)
            if left <= until - done:
                break
            left -= int(until - done) + 1
            if not left:
                return float(end)
            done = self._until(i, end)
        return float(self._ends(np.array([done + left]))[0])

    def _until(self, i: int, time_s: float) -> float:
        """Steps that decode, in all rows before and those of this replica that have ended by then: at a row's end."""
        first, last = self._begin[i], self._last[i]
        ended = int(np.searchsorted(self._rows["end_s"][first : last + 1], time_s + SAME_S, side="right"))
        return float(self._done[first + ended - 1]) if first + ended else 0.0

    def _ends(self, position: Floats) -> Floats:
        """When the steps at these positions among all that decode ended."""
        rows = self._rows
        row = np.searchsorted(self._done, position)
        start, end, first, count = (rows[name][row] for name in ("start_s", "end_s", "first_step_s", "steps"))
        within = position - (self._done[row] - count)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(count > 1, 2 * (end - start - count * first) / (count * (count - 1)), 0.0)
        times: Floats = np.where(within == count, end, start + within * first + slope * within * (within - 1) / 2)
        return times
