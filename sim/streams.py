"""When the tokens of each request came, as its client saw them: gaps between messages, and the time of any token.

From the log of steps: a request has a token in every step of its replica that decodes, from its first to its last.
Where all that decode wait for prompts, the gap is that between two steps that decode; gaps in which a request alone
was preempted or left out are logged by themselves, and cut its stream into segments. Where a server streams less often
(`stream_interval`), a message holds several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from sim.metrics import SAME_S, Floats

Whole = npt.NDArray[np.int64]

ROW_S = 1e-7
"""Times of one step from two logs: within a run of steps they are rounded."""
STRIDE = 2.0**40
"""More than the steps of any replica: what keys of the next one are further on."""
MESSAGES = 2**22
"""So many are listed at a time."""


class Streams:
    """The streams of finished `requests`, from the rows of the log of `steps` and of the long `gaps`. Unknown, and NaN,
    are those of several samples of a prompt, and where a replica's log does not hold all of a request's tokens
    (pipelines; a first token that another replica gave, or none of its steps). `interval` (int64[requests]): a message
    has so many tokens, but the first has one and the last what is left; None where every token is one. `by_step`
    (bool[requests]): a message has what a step yields; None where that is one token."""

    def __init__(
        self,
        requests: Mapping[str, Floats],
        steps: Mapping[str, Floats],
        gaps: Mapping[str, Floats],
        interval: Whole | None = None,
        by_step: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        columns = ("replica", "step", "steps", "start_s", "end_s", "first_step_s", "decodes")
        order = np.lexsort((steps["step"], steps["replica"]))
        every = {name: steps[name][order] for name in columns}
        decode = every["decodes"] > 0
        if not decode.any():  # a row of no replica, so that there is one
            decode, every = np.insert(decode, 0, True), {k: np.insert(column, 0, -1.0) for k, column in every.items()}
        self._rows = rows = {name: column[decode] for name, column in every.items()}
        self._first_end = rows["start_s"] + rows["first_step_s"]
        self._done = np.cumsum(rows["steps"])  # steps that decode, up to and with each row
        self._first_s, self._finish_s = requests["first_token_s"], requests["finish_s"]
        self._tokens = requests["output_tokens"].astype(np.int64)
        self._interval = interval
        self._by_step = by_step
        self._known = (requests["samples"] == 1) & (self._tokens > 1)
        mine = requests["replica"] * STRIDE
        key = every["replica"] * STRIDE + every["step"]
        for step, time_s in (("first_step", self._first_s), ("last_step", self._finish_s)):
            at = np.searchsorted(key, mine + requests[step], side="right") - 1
            self._known &= np.abs(every["end_s"][at] - time_s) < ROW_S
        key = rows["replica"] * STRIDE + rows["step"]
        begin = np.searchsorted(key + rows["steps"] - 1, mine + requests["first_step"], side="right")
        last = np.searchsorted(key, mine + requests["last_step"], side="right") - 1
        self._segments(begin, last, requests, gaps)

    def _segments(
        self, begin: npt.NDArray[np.intp], last: npt.NDArray[np.intp], requests: Mapping[str, Floats],
        gaps: Mapping[str, Floats],
    ) -> None:  # fmt: skip
        """A segment is a token (at `_from_s`) and those of the rows `_begin` to `_last`, none where these are before;
        `_whose` it is; the known requests have one each, and one more after every gap in which they were left out."""
        own = gaps["id"] >= 0
        ids, since_s, end_s = (gaps[name][own] for name in ("id", "since_s", "end_s"))
        at = np.minimum(np.searchsorted(requests["id"], ids), max(len(begin) - 1, 0))
        there = np.zeros(len(ids), bool)
        if len(begin):
            there = (requests["id"][at] == ids) & self._known[at] & (since_s >= self._first_s[at] - ROW_S)
        at, since_s, end_s = at[there], since_s[there], end_s[there]
        self._alone = (at, end_s - since_s)
        whose = np.flatnonzero(self._known)
        self._whose, self._from_s = whose, self._first_s[whose]
        self._begin, self._last = begin[whose], last[whose]
        if not len(at):
            return
        replica = requests["replica"][at]
        after = np.maximum(self._ended(replica, end_s), begin[at])
        until = self._ended(replica, since_s) - 1
        from_s = np.concatenate([self._from_s, end_s])
        whose = np.concatenate([whose, at])
        order = np.lexsort((from_s, whose))
        later = np.lexsort((since_s, at))  # a segment ends where the gap begins that the next one follows
        self._whose, self._from_s = whose[order], from_s[order]
        self._begin = np.concatenate([self._begin, after])[order]
        ends = np.append(self._whose[1:] != self._whose[:-1], True)
        self._last = np.empty(len(order), np.intp)
        self._last[ends] = last[self._whose[ends]]
        self._last[~ends] = until[later]

    def _ended(self, replica: Floats, time_s: Floats) -> npt.NDArray[np.intp]:
        """How many rows, with all of the replicas before, have ended by each time: at the end of a row."""
        rows = len(self._done)
        asked = np.concatenate([np.zeros(rows, bool), np.ones(len(time_s), bool)])
        times = np.concatenate([self._rows["end_s"], time_s + ROW_S])
        order = np.lexsort((asked, times, np.concatenate([self._rows["replica"], replica])))
        found = np.empty(len(order), np.intp)
        found[order] = np.cumsum(~asked[order])
        return found[rows:]

    def longest_gaps(self) -> Floats:
        """float64[requests]: seconds of the longest gap between two messages; NaN too for a single token."""
        found = np.full(len(self._known), np.nan)
        found[self._known] = -np.inf
        if self._interval is not None:
            for whose, _, gap_s in self.messages():
                np.maximum.at(found, whose, gap_s)
            return found
        rows, whose, begin, last = self._rows, self._whose, self._begin, self._last
        at, gap_s = self._alone
        np.maximum.at(found, at, gap_s)
        if not len(whose):
            return found
        length, count = rows["end_s"] - rows["start_s"], rows["steps"]
        later = np.where(count > 1, 2 * length / count - rows["first_step_s"], -np.inf)
        longest = np.append(np.maximum(self._leads(), later), -np.inf)
        some = begin <= last
        whose, from_s, begin, last = whose[some], self._from_s[some], begin[some], last[some]
        order = np.argsort(begin, kind="stable")  # what lies between two spans is reduced too: it should be little
        spans = np.stack([begin[order] + 1, last[order] + 1], axis=1).ravel()
        inside = np.empty(len(begin))
        inside[order] = np.maximum.reduceat(longest, spans)[::2]
        inside = np.where(begin < last, inside, -np.inf)
        np.maximum.at(found, whose, np.maximum(np.maximum(self._first_end[begin] - from_s, later[begin]), inside))
        return found

    def over(self, limit_s: float) -> Floats:
        """float64[requests]: how many gaps between messages are longer (by more than SAME_S); NaN where unknown."""
        found, limit_s = np.where(self._known, 0.0, np.nan), limit_s + SAME_S
        if self._interval is not None:
            for whose, _, gap_s in self.messages():
                np.add.at(found, whose, gap_s > limit_s)
            return found
        at, gap_s = self._alone
        np.add.at(found, at, gap_s > limit_s)
        rows, begin, last = self._rows, self._begin, self._last
        count, first, slope = rows["steps"], rows["first_step_s"], self._slopes()
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = (limit_s - first) / slope  # the gaps after this one are longer; with a slope below 0 those before
            rising = count - 1 - np.floor(np.clip(reach, 0, count - 1))
            falling = np.ceil(np.clip(reach, 1, count)) - 1
        level = np.where(first > limit_s, count - 1, 0)
        within = np.where(slope > 0, rising, np.where(slope < 0, falling, level))
        so_far = np.cumsum(within + (self._leads() > limit_s))
        some = begin <= last
        whose, from_s, begin, last = self._whose[some], self._from_s[some], begin[some], last[some]
        counted = (self._first_end[begin] - from_s > limit_s) + within[begin] + so_far[last] - so_far[begin]
        np.add.at(found, whose, counted)
        return found

    def counts(self) -> Whole:
        """int64[requests]: how many gaps between messages each has, of unknown streams too."""
        found = -(-(self._tokens - 1) // (1 if self._interval is None else self._interval))
        if self._by_step is not None:
            some = self._begin <= self._last
            begin, last = np.where(some, self._begin, 0), np.where(some, self._last, 0)
            steps = np.where(some, self._done[last] - self._done[begin] + self._rows["steps"][begin], 0)
            of_each = np.zeros(len(found), np.int64)
            np.add.at(of_each, self._whose, 1 + steps.astype(np.int64))
            found = np.where(self._by_step & self._known, of_each - 1, found)
        return found

    def messages(self) -> Iterator[tuple[Whole, Floats, Floats]]:
        """(which request, when the message before came, seconds since then) of all messages of known streams but the
        first of each, in pieces."""
        whose = np.flatnonzero(self._known)
        count, interval = self.counts(), np.ones(1, np.int64) if self._interval is None else self._interval
        interval = np.broadcast_to(interval, len(count))
        pieces = np.cumsum(count[whose]) // MESSAGES
        for piece in np.split(whose, np.flatnonzero(np.diff(pieces)) + 1):
            of = np.repeat(piece, count[piece] + 1)
            begins = np.append(True, of[1:] != of[:-1])[: len(of)]
            place = np.arange(len(of)) - np.repeat(np.flatnonzero(begins), count[piece] + 1)
            times = self._times(of, np.minimum(1 + place * interval[of], self._tokens[of]))
            gaps = np.flatnonzero(~begins)
            yield of[gaps], times[gaps - 1], times[gaps] - times[gaps - 1]

    def token_s(self, number: Whole, message: Whole | None = None) -> Floats:
        """float64[requests]: when token `number` of each came, from 1, in its message; of unknown streams only the
        first and the last. `message`: which message that is, where it is said (0: not known)."""
        if self._interval is not None:
            number = np.minimum(1 + -(-(number - 1) // self._interval) * self._interval, self._tokens)
        found = np.where(number <= 1, self._first_s, np.nan)
        found = np.where(number == self._tokens, self._finish_s, found)
        between = np.flatnonzero(self._known & (number > 1) & (number < self._tokens))
        if message is not None:
            number, between = message, between[message[between] > 0]
        found[between] = self._times(between, number[between])
        return found

    def _times(self, which: Whole, number: Whole) -> Floats:
        """When these tokens of these known requests came, from 1."""
        begin, last, rows = self._begin, self._last, self._rows
        some = begin <= last
        begin, last = np.where(some, begin, 0), np.where(some, last, 0)
        before = self._done[begin] - rows["steps"][begin]
        count = 1 + np.where(some, self._done[last] - before, 0).astype(np.int64)  # tokens of each segment
        total = np.cumsum(count)
        of = np.searchsorted(self._whose, which)  # the first segment of each
        position = (total - count)[of] + number
        at = np.searchsorted(total, position)
        within = position - (total - count)[at] - 1
        found = self._from_s[at]
        later = np.flatnonzero(within)
        found[later] = self._ends(before[at[later]] + within[later])
        return found

    def _leads(self) -> Floats:
        """From the last step that decodes to the first one of each row; of another replica's last row it is never asked
        for."""
        lead = np.diff(self._first_end, prepend=self._first_end[:1])
        lead[1:] = self._first_end[1:] - self._rows["end_s"][:-1]
        return lead

    def _slopes(self) -> Floats:
        """How much longer each step of a row is than the one before; 0 where it is the rounding of times."""
        rows, count = self._rows, self._rows["steps"]
        more = 2 * (rows["end_s"] - rows["start_s"] - count * rows["first_step_s"])
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(count > 1, more / (count * (count - 1)), 0.0)
        return np.where(np.abs(slope) * count < SAME_S, 0.0, slope)

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
