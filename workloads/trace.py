"""A trace: when requests arrive and how many tokens each one brings and asks for.

Columns, not objects: a million requests are four arrays. It knows nothing of files, generators, GPUs or schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TOKENS = 2**31 - 1
"""The largest token count of one request; anything above is a mistake in the data, not a long prompt."""

MAX_TIME_S = 1e11
"""The latest time in seconds (about 3,000 years): a Unix time in seconds passes, one in milliseconds does not."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """n >= 1 requests in the order in which they arrive; every array has shape (n,) and is read-only.

    arrival_s: seconds from the start of the workload (time 0), ascending. Traces that come from a file start at 0.
    prompt_tokens, output_tokens: tokens, 1 or more. output_tokens is the true length, hidden from schedulers.
    max_tokens: the client's cap, at least output_tokens; equal to it unless the source says otherwise (the benchmark
        convention `ignore_eos`).
    source: where it came from, for people. dropped: rows left out, by reason. notes: what people should know.

    Raises ServecastError, naming the positions, when a column breaks these rules.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    source: str
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
        return problems

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
        kept = self._rows(int(first), int(last), note)
        return replace(kept, arrival_s=kept.arrival_s - kept.arrival_s[0])

    def head(self, n: int) -> Trace:
        """The first n requests (all of them when there are fewer, which the notes say)."""
        if n < 1:
            raise ServecastError(f"{self.source}: the first {n} requests were asked for; give 1 or more")
        few = f"; {n:,} were asked for" if n > len(self) else ""
        return self._rows(0, n, f"first {min(n, len(self)):,} of {len(self):,} requests{few}")

    def scale_rate(self, factor: float) -> Trace:
        """The same requests arriving `factor` times as fast (every arrival time divided by it)."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ServecastError(f"{self.source}: rate factor {factor} is not a finite number above 0")
        with np.errstate(over="ignore"):
            arrival_s = self.arrival_s / factor
        return replace(self, arrival_s=arrival_s, notes=(*self.notes, f"request rate times {factor:g}"))

    def _rows(self, first: int, last: int, note: str) -> Trace:
        rows = slice(first, last)
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            max_tokens=self.max_tokens[rows],
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
