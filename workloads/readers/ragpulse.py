"""RAGPulse: JSONL of `timestamp` (seconds, as text), `input_length`, `output_length`, `session_id` and `hash_ids`, an
object of five lists of chunk ids: system prompt, passages, history, web search, user input.

Ids name contents, not prefixes, and chunks differ in length (files 1 to 5 beside the trace say how long each is), so
they are no blocks: the notes say how much is shared, the trace has sessions only. Answers' ends are not recorded: a
think time is the gap between arrivals, the answer included. Source: github.com/flashserve/RAGPulse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.chains import follow
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Checked, Mask, Texts, read_columns, times, tokens
from workloads.readers.files import TraceFile, missing, open_trace
from workloads.readers.options import ReadOptions
from workloads.trace import Ints, Trace, Turns

if TYPE_CHECKING:
    import polars as pl

OPTIONS: tuple[str, ...] = ()
PARTS = {
    "sys_prompt": ("1_sys_prompt", "sys_prompt_id"),
    "passages_ids": ("2_passages", "passage_id"),
    "history": ("3_history", "history_id"),
    "web_search": ("5_web_search", "web_search_id"),
    "user_input": ("4_user_input", "user_input_id"),
}
"""The lists in the order in which a prompt holds them -> start of the file with their lengths, its id column."""

Chunk = tuple[str, int]


def lacks(file: TraceFile) -> list[str]:
    """What the first row lacks to be of this format, in words; empty when it is."""
    problems = missing(file, "timestamp", "input_length", "output_length", "session_id", "hash_ids")
    ids = file.first.get("hash_ids")
    if not problems and not (isinstance(ids, dict) and set(ids) & set(PARTS)):
        problems.append("'hash_ids' is not an object with sys_prompt, passages_ids, ...")
    return problems


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by key and row."""
    arrival, prompt, output = times("timestamp"), tokens("input_length"), tokens("output_length")
    session, chunks = Texts("session_id", gaps=True), _Chunks()
    blank = read_columns(file, [arrival, prompt, output, session, chunks])
    lengths, notes = _lengths(file)

    def turns(rows: Ints) -> Turns:
        notes.append(_shared(chunks, rows, lengths))
        previous, start = follow(session.codes[rows]), arrival.values[rows]
        if (previous >= 0).any():
            notes.append("think times are gaps between arrivals, in which the answer before is included")
        return Turns(previous, np.where(previous >= 0, start - start[previous], 0.0))

    return noted(to_trace(file, blank, Requests(arrival.values, prompt, output, turns=turns)), *notes)


class _Chunks(Checked):
    """The chunks of every row, in prompt order."""

    def __init__(self) -> None:
        super().__init__("hash_ids", f"give an object of lists of whole numbers: {', '.join(PARTS)}")
        self.rows: list[list[Chunk]] = []

    def add(self, raw: pl.Series, blank: Mask, row: int) -> None:
        found = [_chunks(text) for text in (raw.to_list() if len(raw) else [])]
        absent = raw.is_null().to_numpy()
        self._wrong("is empty", absent & ~blank, row, None)
        self._wrong("is not understood", np.array([chunks is None for chunks in found], dtype=bool) & ~absent, row, raw)
        self.seen |= not absent.all()
        self.rows += [chunks or [] for chunks in found]

    def close(self) -> None:
        pass


def _chunks(text: Any) -> list[Chunk] | None:
    try:
        parts = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(parts, dict):
        return None
    found: list[Chunk] = []
    for name in PARTS:
        ids = parts.get(name)
        if not isinstance(ids, list | None) or not all(type(i) is int for i in ids or ()):
            return None
        found += [(name, i) for i in ids or ()]
    return found


def _lengths(file: TraceFile) -> tuple[dict[Chunk, int], list[str]]:
    """Tokens of every chunk, from the files beside the trace; empty, and a note, when one of them is not there."""
    lengths: dict[Chunk, int] = {}
    for name, (start, column) in PARTS.items():
        beside = sorted(file.path.parent.glob(f"{start}*.jsonl*"))
        if not beside:
            return {}, [
                f"no file {start}.jsonl beside the trace: shared chunks are counted, not weighed by their tokens"
            ]
        ids, size = tokens(column), tokens("token_length")
        blank = read_columns(open_trace(beside[0]), [ids, size])
        pairs = zip(ids.values[~blank].tolist(), size.values[~blank].tolist(), strict=True)
        lengths.update({(name, int(i)): int(n) for i, n in pairs})
    return lengths, []


def _shared(chunks: _Chunks, rows: Ints, lengths: Mapping[Chunk, int]) -> str:
    """How much of the chunks came before, as the start of a prompt and anywhere, in words."""
    seen: set[Chunk] = set()
    starts: dict[tuple[int, Chunk], int] = {}  # every start of a prompt, told apart by what it extends
    total = anywhere = leading = 0
    for row in rows.tolist():
        start, known = 0, True
        for chunk in chunks.rows[row]:
            size = lengths.get(chunk, 0) if lengths else 1
            total += size
            anywhere += size * (chunk in seen)
            known = known and (start, chunk) in starts
            leading += size * known
            start = starts.setdefault((start, chunk), len(starts) + 1)
        seen.update(chunks.rows[row])
    unit = "tokens of all chunks" if lengths else "chunks"
    share = [f"{100 * part / max(total, 1):.1f} %" for part in (leading, anywhere)]
    leads, anywhere_share = share
    return (
        f"of the {unit}, {leads} are in a start that an earlier prompt had and {anywhere_share} in an earlier prompt "
        "anywhere; not modelled, since chunks are no blocks of equal length"
    )
