"""aiperf's variant of Mooncake's format: `session_id` makes rows turns of one session, `delay` (ms) is the think time.

`timestamp` (ms) may be missing: a turn then stands `delay` after the one before (the answer's duration is not known),
a session begins at 0 or, with spread_s, at a random time. `input_length` is taken as the whole prompt of a turn, the
history included. `hash_ids` (512-token blocks) may be missing. Source: github.com/ai-dynamo/aiperf, 0.13.
"""

from __future__ import annotations

import numpy as np

from workloads.chains import follow, hand_on
from workloads.prefix import Prefix
from workloads.readers.blocks import prefix_of
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Blocks, Mask, Texts, read_columns, times, tokens
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.readers.plausible import on_a_grid, too_fast
from workloads.readers.starts import starts
from workloads.trace import Floats, Ints, Trace, Turns

OPTIONS: tuple[str, ...] = ("block_tokens", "spread_s")
BLOCK_TOKENS = 512


def lacks(file: TraceFile) -> list[str]:
    """What the first row lacks to be of this format, in words; empty when it is."""
    problems = missing(file, "input_length", "output_length")
    if isinstance(file.first.get("hash_ids"), dict):
        problems.append("'hash_ids' is an object, not a list")
    if not {"session_id", "delay"} & set(file.columns):
        problems.append("'session_id' and 'delay' are missing")
    return problems


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by key and row."""
    stamp = times("timestamp", milliseconds=True, optional=True, gaps=True)
    delay = times("delay", milliseconds=True, optional=True, gaps=True)
    session = Texts("session_id", optional=True, gaps=True)
    blocks = Blocks("hash_ids", optional=True, gaps=True)
    prompt, output = tokens("input_length"), tokens("output_length")
    blank = read_columns(file, [stamp, delay, session, blocks, prompt, output])
    before = follow(session.codes)
    think, notes = _think(stamp.values, delay.values, before)
    think = hand_on(think, session.codes, ~blank & (prompt.values > 0) & (output.values > 0))
    arrival, unknown = _arrivals(stamp.values, think, before, blank, options)
    if unknown:
        where = f"spread over {options.spread_s:g} s (seed {options.seed})" if options.spread_s else "start at 0 s"
        notes.append(f"{unknown:,} sessions and lone requests have no timestamp: they {where}")
    prefix: Prefix | None = None
    if blocks.seen:
        prefix, more = prefix_of(file, blocks, prompt, blank, options.block_tokens or BLOCK_TOKENS)
        notes += more

    def turns(rows: Ints) -> Turns:
        previous = follow(session.codes[rows])
        return Turns(previous, np.where(previous >= 0, think[rows], 0.0))

    requests = Requests(
        arrival, prompt, output, prefix=prefix, turns=turns if session.seen else None, notes=tuple(notes)
    )
    trace = to_trace(file, blank, requests)
    return noted(trace, *too_fast(trace), *on_a_grid(trace))


def _think(stamp: Floats, delay: Floats, before: Ints) -> tuple[Floats, list[str]]:
    """The think time of every row: its delay, else the gap between the time stamps, else 0."""
    gap = np.where(before >= 0, stamp - stamp[before], np.nan)
    guessed = np.isnan(delay) & (gap >= 0)
    notes = []
    if count := int(np.count_nonzero(guessed)):
        notes.append(
            f"{count:,} turns have no delay: their think time is the gap between the time stamps, in which the answer "
            "before is included"
        )
    return np.nan_to_num(np.where(guessed, gap, delay)), notes


def _arrivals(stamp: Floats, think: Floats, before: Ints, blank: Mask, options: ReadOptions) -> tuple[Floats, int]:
    """When each row arrives, and how many rows had neither a time stamp nor a turn before them."""
    arrival = stamp.copy()
    first = np.flatnonzero(np.isnan(stamp) & (before < 0) & ~blank)
    arrival[first] = starts(first.size, options)
    arrival[blank] = 0.0
    for row in np.flatnonzero(np.isnan(arrival)):
        arrival[row] = arrival[before[row]] + think[row]
    return arrival, first.size
