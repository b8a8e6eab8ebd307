"""A trace: when requests arrive and how many tokens each one brings and asks for.

Columns, not objects: a million requests are four arrays, and a few more where the source knows more: what prompts
begin with, which requests are turns of one session, of which class they are, when clients give up. It knows nothing of
files, generators, GPUs or schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError
from workloads.prefix import Prefix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TOKENS = 2**31 - 1
"""The largest token count of one request; anything above is a mistake in the data, not a long prompt."""

MAX_TIME_S = 1e11
"""The latest time in seconds (about 3,000 years): a Unix time in seconds passes, one in milliseconds does not."""


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Requests that wait for others: turns of sessions. All arrays have shape (n,).

    previous: the position of the request whose answer this one follows, before its own; -1 for the first of a session
        and for requests on their own.
    think_s: seconds from that answer's last token to this request; 0 where previous is -1.
    session: any number, the same for the turns of one session; None where each turn is of the session of its previous
        one. A request whose previous one is of another session is the first of one that was spawned there; the next
        turn of the session that spawned it waits for the last turn of this one, too: think_s begins when it has the
        answers of all.
    """

    previous: Ints
    think_s: Floats
    session: Ints | None = None

    def problems(self, n: int) -> list[str]:
        """What contradicts the description, for a trace of n requests."""
        if self.previous.shape != (n,) or self.think_s.shape != (n,):
            return [f"turns: {self.previous.size} and {self.think_s.size} values for {n} requests"]
        wrong = np.flatnonzero((self.previous < -1) | (self.previous >= np.arange(n)))
        found = (
            [f"turns: previous is not an earlier request at {_positions(wrong, self.previous)}"] if wrong.size else []
        )
        late = np.flatnonzero(~((self.think_s >= 0) & (self.think_s <= MAX_TIME_S)))
        if late.size:
            found.append(f"turns: think_s is negative or no number at {_positions(late, self.think_s)}")
        if self.session is not None and self.session.shape != (n,):
            return [*found, f"turns: sessions of {self.session.size} of {n} requests"]
        followed = self.previous[self.goes_on]
        if not found and np.unique(followed).size != followed.size:
            found.append("turns: two requests follow the same one; a session has one next turn")
        return found

    @property
    def goes_on(self) -> NDArray[np.bool_]:
        """bool[n]: whether each is the next turn of the session of its previous one."""
        found: NDArray[np.bool_] = self.previous >= 0
        return found if self.session is None else found & (self.session[self.previous] == self.session)

    def following(self) -> Ints:
        """int64[n]: the next turn of the session of each, -1 where there is none."""
        goes_on = self.goes_on
        found = np.full(self.previous.size, -1)
        found[self.previous[goes_on]] = np.flatnonzero(goes_on)
        return found

    def joins(self) -> tuple[Ints, Ints] | None:
        """(which requests, for whom they wait beside their previous one), both int64[k]; None where no session was
        spawned by another."""
        if self.session is None:
            return None
        n, goes_on = self.previous.size, self.goes_on
        last = np.arange(n)
        for i in np.flatnonzero(goes_on)[::-1]:
            last[self.previous[i]] = last[i]  # the last turn from here on
        following = self.following()
        spawned = np.flatnonzero((self.previous >= 0) & ~goes_on)
        waits = following[self.previous[spawned]]
        return waits[waits >= 0], last[spawned[waits >= 0]]

    def sessions(self) -> Ints:
        """int64[n]: the first request of the session that each is a turn of, or of the one from which it comes."""
        found = np.arange(self.previous.size)
        for i in np.flatnonzero(self.previous >= 0):
            found[i] = found[self.previous[i]]
        return found

    def rows(self, index: NDArray[np.intp]) -> Turns:
        """The requests `index`, ascending; one whose predecessor is left out begins a session of its own."""
        position = np.full(self.previous.size + 1, -1, dtype=np.int64)  # its last entry is where -1 points
        position[index] = np.arange(index.size)
        previous = position[self.previous[index]]
        session = None if self.session is None else self.session[index]
        return Turns(previous, np.where(previous >= 0, self.think_s[index], 0.0), session)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """n >= 1 requests in the order in which they arrive; every array has shape (n,) and is read-only.

    arrival_s: seconds from the start of the workload (time 0), ascending. Traces that come from a file start at 0.
    prompt_tokens, output_tokens: tokens, 1 or more. output_tokens is the true length, hidden from schedulers.
    max_tokens: the client's cap, at least output_tokens; equal to it unless the source says otherwise (the benchmark
        convention `ignore_eos`).
    prefix: the content blocks that each prompt begins with, where known.
    turns: which requests follow the answer of another one, where known. arrival_s is then when the source saw them
        arrive, which a replay of sessions ignores for all but first turns.
    classes: (int64[n] index, names) of request classes, where there are any.
    patience_s: float64[n] seconds after its arrival at which a client gives up, inf for never.
    samples: int64[n] parallel samples of one prompt (vLLM's n), where not 1.
    source: where it came from, for people. dropped: rows left out, by reason. notes: what people should know.

    Raises ServecastError, naming the positions, when a column breaks these rules.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    source: str
    prefix: Prefix | None = None
    turns: Turns | None = None
    classes: tuple[Ints, tuple[str, ...]] | None = None
    patience_s: Floats | None = None
    samples: Ints | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        times = _column(self.source, "arrival_s", self.arrival_s, 0, MAX_TIME_S, problems)
        object.__setattr__(self, "arrival_s", times)
        for name in ("prompt_tokens", "output_tokens", "max_tokens"):
            values = _column(self.source, name, getattr(self, name), 1, MAX_TOKENS, problems)
            if not problems:
                values = values.astype(np.int64)
                values.setflags(write=False)
            object.__setattr__(self, name, values)
        if not problems:
            problems += self._inconsistencies()
        if problems:
            raise ServecastError(*problems)

    def _inconsistencies(self) -> list[str]:
        n = len(self)
        lengths = {name: getattr(self, name).size for name in ("prompt_tokens", "output_tokens", "max_tokens")}
        if any(size != n for size in lengths.values()):
            found = ", ".join(f"{name} {size}" for name, size in lengths.items())
            return [f"{self.source}: the columns differ in length: arrival_s {n}, {found}; give one value a request"]
        if not n:
            return [f"{self.source}: a trace needs at least one request"]
        problems = []
        if (back := np.flatnonzero(np.diff(self.arrival_s) < 0) + 1).size:
            problems.append(
                f"{self.source}: arrival_s goes back in time at {_positions(back, self.arrival_s)}; sort by arrival"
            )
        if (low := np.flatnonzero(self.max_tokens < self.output_tokens)).size:
            problems.append(
                f"{self.source}: max_tokens is below output_tokens at {_positions(low, self.max_tokens)}; "
                "a client's cap cannot be below what it received"
            )
        return problems + self._extra_inconsistencies()

    def _extra_inconsistencies(self) -> list[str]:
        n, found = len(self), []
        if self.prefix is not None and len(self.prefix) != n:
            found.append(f"{self.source}: prefix blocks of {len(self.prefix)} prompts for {n} requests")
        if self.turns is not None:
            found += [f"{self.source}: {problem}" for problem in self.turns.problems(n)]
        if self.classes is not None:
            index, names = self.classes
            if index.shape != (n,) or index.min() < 0 or index.max() >= len(names):
                found.append(f"{self.source}: request classes do not index the {len(names)} names, one a request")
        if self.patience_s is not None and (self.patience_s.shape != (n,) or not (self.patience_s > 0).all()):
            found.append(f"{self.source}: patience_s must be above 0 for each of the {n} requests (inf for never)")
        if self.samples is not None and (self.samples.shape != (n,) or (self.samples < 1).any()):
            found.append(f"{self.source}: samples must be 1 or more for each of the {n} requests")
        return found

    @classmethod
    def from_columns(
        cls,
        arrival_s: Sequence[float] | Floats,
        prompt_tokens: Sequence[int] | Ints,
        output_tokens: Sequence[int] | Ints,
        max_tokens: Sequence[int] | Ints | None = None,
        *,
        source: str = "Trace.from_columns",
    ) -> Trace:
        """A trace from any sequences of equal length n; max_tokens defaults to output_tokens. See `Trace` for rules."""
        cap: Any = output_tokens if max_tokens is None else max_tokens
        given: dict[str, Any] = {"arrival_s": arrival_s, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        return cls(**given, max_tokens=cap, source=source)

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def window(self, start_s: float, end_s: float) -> Trace:
        """The requests with start_s <= arrival_s < end_s (seconds), moved so that the first arrives at 0."""
        if not 0 <= start_s < end_s:
            raise ServecastError(
                f"{self.source}: window [{start_s:g} s, {end_s:g} s) is empty or before 0; give 0 <= start < end"
            )
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s])
        if first == last:
            raise ServecastError(
                f"{self.source}: no request arrives in the window [{start_s:g} s, {end_s:g} s); "
                f"arrivals run from {self.arrival_s[0]:g} s to {self.arrival_s[-1]:g} s"
            )
        note = f"window [{start_s:g} s, {end_s:g} s) holds {last - first:,} of {len(self):,} requests"
        kept = self.take(np.arange(first, last), note)
        return replace(kept, arrival_s=kept.arrival_s - kept.arrival_s[0])

    def head(self, n: int) -> Trace:
        """The first n requests (all of them when there are fewer, which the notes say)."""
        if n < 1:
            raise ServecastError(f"{self.source}: the first {n} requests were asked for; give 1 or more")
        few = f"; {n:,} were asked for" if n > len(self) else ""
        return self.take(np.arange(min(n, len(self))), f"first {min(n, len(self)):,} of {len(self):,} requests{few}")

    def scale_rate(self, factor: float) -> Trace:
        """The same requests arriving `factor` times as fast (every arrival time divided by it)."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ServecastError(f"{self.source}: rate factor {factor} is not a finite number above 0")
        with np.errstate(over="ignore"):
            arrival_s = self.arrival_s / factor
        return replace(self, arrival_s=arrival_s, notes=(*self.notes, f"request rate times {factor:g}"))

    def take(self, index: NDArray[np.intp], note: str) -> Trace:
        """The requests at the positions `index` (ascending), with a note that says which."""
        return replace(
            self,
            arrival_s=self.arrival_s[index],
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            max_tokens=self.max_tokens[index],
            prefix=None if self.prefix is None else self.prefix.rows(index),
            turns=None if self.turns is None else self.turns.rows(index),
            classes=None if self.classes is None else (self.classes[0][index], self.classes[1]),
            patience_s=None if self.patience_s is None else self.patience_s[index],
            samples=None if self.samples is None else self.samples[index],
            notes=(*self.notes, note),
        )


def _column(source: str, name: str, values: Any, least: float, most: float, problems: list[str]) -> NDArray[Any]:
    """`values` as a read-only array; what is wrong with it is added to `problems`. Tokens (least 1) are whole."""
    try:
        array = np.array(values)
    except ValueError:  # ragged nested lists
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        found = f"shape {array.shape}, type {array.dtype}"
        problems.append(f"{source}: {name} is not a flat sequence of numbers ({found})")
        return array
    bad = ~((array >= least) & (array <= most))  # negated, so that NaN is bad
    whole = "" if least == 0 else "whole "
    if whole:
        bad |= array != np.floor(array)
    if (where := np.flatnonzero(bad)).size:
        problems.append(
            f"{source}: {name} has {_positions(where, array)}; allowed are {whole}numbers from {least:g} to {most:.12g}"
        )
    elif not whole:
        array = array.astype(np.float64)
    array.setflags(write=False)
    return array


def _positions(where: NDArray[np.intp], values: NDArray[Any]) -> str:
    shown = ", ".join(f"{values[i]} at {i}" for i in where[:3])
    return f"{where.size:,} position(s), counting from 0: {shown}{', ...' if where.size > 3 else ''}"
