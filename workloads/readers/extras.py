"""What the canonical form says beyond arrival and lengths; every column may be missing.

`session` (any word; turns of one session stand in order), `parent` (in a session's first row: the session whose last
row above spawned it, and whose next row waits for all that it has spawned), `turn` (its number, which must rise),
`think_s`, `class`, `patience_s` (absent: the client never gives up), `samples`; `block_ids` (a list), `block_tokens`
and `blocks_chained`, the same in every row; `provenance` (JSON text, in the first row only: where the rows came from,
what was dropped).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.chains import follow, hand_on
from workloads.prefix import Prefix
from workloads.readers.blocks import prefix_of
from workloads.readers.columns import Blocks, Mask, Numbers, Texts, times
from workloads.readers.files import TraceFile
from workloads.trace import MAX_TIME_S, MAX_TOKENS, Floats, Ints, Trace, Turns

GAPS = ("think times are gaps between arrivals, in which the answer before is included",)


@dataclass(frozen=True, slots=True)
class Rest:
    """The extras of every row of a file."""

    prefix: Prefix | None
    turns: Callable[[Ints], Turns] | None
    classes: tuple[Ints, tuple[str, ...]] | None
    patience_s: Floats | None
    samples: Ints | None
    provenance: dict[str, Any]
    notes: tuple[str, ...] = ()

    def restored(self, trace: Trace) -> Trace:
        """The trace with what its file says about where it came from."""
        said = self.provenance
        if not said:
            return trace
        dropped = dict(said["dropped"])
        for reason, count in trace.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
        source = f"{trace.source} (made from {said['source']})"
        return replace(trace, source=source, dropped=dropped, notes=(*said["notes"], *trace.notes))


class Extras:
    """The columns to ask for, and what they hold once they are read."""

    def __init__(self) -> None:
        self.session = Texts("session", optional=True, gaps=True)
        self.parent = Texts("parent", optional=True, gaps=True)
        self.turn = Numbers(
            "turn", "turns must be whole numbers from 0", most=MAX_TOKENS, whole=True, optional=True, gaps=True
        )
        self.think = times("think_s", optional=True, gaps=True)
        self.kind = Texts("class", "give every request a class, or leave the column out", optional=True)
        self.patience = Numbers(
            "patience_s",
            f"give seconds above 0 and up to {MAX_TIME_S:g}, or nothing for a client that never gives up",
            least=np.nextafter(0, 1),
            most=MAX_TIME_S,
            optional=True,
            gaps=True,
        )
        rule = f"samples must be whole numbers from 1 to {MAX_TOKENS}"
        self.samples = Numbers("samples", rule, least=1, most=MAX_TOKENS, whole=True, optional=True, gaps=True)
        self.blocks = Blocks("block_ids", optional=True, gaps=True)
        rule = f"a block has whole tokens from 1 to {MAX_TOKENS}, the same in every row"
        self.size = Numbers("block_tokens", rule, least=1, most=MAX_TOKENS, whole=True, optional=True, gaps=True)
        self.chained = Texts("blocks_chained", optional=True, gaps=True)
        self.provenance = Texts("provenance", optional=True, gaps=True)
        self.columns: tuple[Numbers | Texts | Blocks, ...] = (
            self.session,
            self.parent,
            self.turn,
            self.think,
            self.kind,
            self.patience,
            self.samples,
            self.blocks,
            self.size,
            self.chained,
            self.provenance,
        )

    def of(self, file: TraceFile, blank: Mask, arrival: Numbers, prompt: Numbers, output: Numbers) -> Rest:
        """Raises ServecastError where the columns contradict each other."""
        said = self._provenance(file)
        if self.parent.seen and not self.session.seen:
            raise ServecastError(
                f"{file.path}: column 'parent' names sessions, and there is no column 'session'; add one with each "
                "row's session, or leave 'parent' out"
            )
        kept = ~blank & (prompt.values > 0) & (output.values > 0)
        names = tuple(said.get("classes", ())) or self.kind.words
        return Rest(
            prefix=self._prefix(file, blank, prompt),
            turns=self._turns(file, kept, arrival) if self.session.seen else None,
            classes=(self._classes(file, names), names) if self.kind.seen else None,
            patience_s=np.where(np.isnan(self.patience.values), np.inf, self.patience.values)
            if self.patience.seen
            else None,
            samples=np.nan_to_num(self.samples.values, nan=1.0).astype(np.int64) if self.samples.seen else None,
            provenance=said,
            notes=GAPS if self.session.seen and not self.think.seen else (),
        )

    def _turns(self, file: TraceFile, kept: Mask, arrival: Numbers) -> Callable[[Ints], Turns]:
        think_s = hand_on(np.nan_to_num(self.think.values), self.session.codes, kept)

        def turns(rows: Ints) -> Turns:
            previous = follow(self.session.codes[rows])
            number = self.turn.values[rows]
            back = np.flatnonzero((previous >= 0) & (number <= number[previous]))
            if back.size:
                shown = [str(file.first_row + row) for row in rows[back[:5]].tolist()]
                raise ServecastError(
                    f"{file.path}: column 'turn' does not rise within its session in {file.rows(shown, back.size)}; "
                    "later turns must arrive later, or stand below the turns before"
                )
            waits = think_s[rows]
            if not self.think.seen:
                waits = arrival.values[rows] - arrival.values[rows][previous]
            if not self.parent.seen:
                return Turns(previous, np.where(previous >= 0, waits, 0.0))
            previous = self._spawned(file, rows, previous)
            if not self.think.seen:
                waits = np.where(previous >= 0, arrival.values[rows] - arrival.values[rows][previous], 0.0)
            codes = self.session.codes[rows]
            own = np.where(codes >= 0, codes, len(self.session.words) + np.arange(rows.size))
            return Turns(previous, np.where(previous >= 0, waits, 0.0), own)

        return turns

    def _spawned(self, file: TraceFile, rows: Ints, previous: Ints) -> Ints:
        """`previous` with the rows by which sessions were spawned."""
        code = {word: i for i, word in enumerate(self.session.words)}
        parents = [code.get(word, -1) for word in self.parent.words]
        found, last, wrong = previous.copy(), dict[int, int](), list[int]()
        for i, (own, parent) in enumerate(zip(self.session.codes[rows].tolist(), self.parent.codes[rows], strict=True)):
            if parent >= 0 and previous[i] < 0:
                found[i] = last.get(parents[parent], -1)
                if found[i] < 0:
                    wrong.append(i)
            last[own] = i
        if wrong:
            shown = [str(file.first_row + row) for row in rows[wrong[:5]].tolist()]
            raise ServecastError(
                f"{file.path}: column 'parent' names a session that has no row above in {file.rows(shown, len(wrong))}"
            )
        return found

    def _classes(self, file: TraceFile, names: tuple[str, ...]) -> Ints:
        place = {name: i for i, name in enumerate(names)}
        if unknown := [word for word in self.kind.words if word not in place]:
            raise ServecastError(f"{file.path}: class {unknown[0]!r} is not among those in provenance: {names}")
        number = np.array([place[word] for word in self.kind.words] + [0], dtype=np.int64)
        return number[self.kind.codes]

    def _prefix(self, file: TraceFile, blank: Mask, prompt: Numbers) -> Prefix | None:
        if not self.blocks.seen:
            return None
        sizes = np.unique(self.size.values[~np.isnan(self.size.values)])
        words = set(self.chained.words)
        if sizes.size != 1:
            found = ", ".join(f"{size:g}" for size in sizes[:5]) or "none"
            raise ServecastError(f"{file.path}: block_ids need one block size in column 'block_tokens'; found {found}")
        if not words <= {"true", "false"} or len(words) > 1:
            raise ServecastError(
                f"{file.path}: column 'blocks_chained' must be true or false, the same in every row; "
                f"found {', '.join(sorted(words))[:60]}"
            )
        prefix, _ = prefix_of(file, self.blocks, prompt, blank, int(sizes[0]), stated=True)
        return replace(prefix, chained=words != {"false"})

    def _provenance(self, file: TraceFile) -> dict[str, Any]:
        if not self.provenance.words:
            return {}
        try:
            said = json.loads(self.provenance.words[0])
            clean = {
                "source": str(said["source"]),
                "notes": [str(note) for note in said.get("notes", [])],
                "dropped": {str(reason): int(count) for reason, count in said.get("dropped", {}).items()},
                "classes": [str(name) for name in said.get("classes", [])],
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise ServecastError(
                f"{file.path}: column 'provenance' is not what servecast writes; leave it out"
            ) from None
        return clean
