"""Qwen-Bailian traces: JSONL of `chat_id,parent_chat_id,timestamp,input_length,output_length,type,turn,hash_ids`.

Seconds from 0; chained blocks of 16 tokens. parent_chat_id names the request whose answer a turn follows (-1: none).
The file does not say when answers ended: a think time is the gap between arrivals, the answer included. Source:
github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

import numpy as np

from workloads.readers.blocks import prefix_of
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Blocks, Texts, read_columns, times, tokens
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.readers.plausible import on_a_grid, too_slow
from workloads.trace import Ints, Trace, Turns

OPTIONS: tuple[str, ...] = ("block_tokens",)
BLOCK_TOKENS = 16


def lacks(file: TraceFile) -> list[str]:
    """What the first row lacks to be of this format, in words; empty when it is."""
    return missing(file, "chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by key and row."""
    chat, parent = Texts("chat_id"), Texts("parent_chat_id", gaps=True)
    arrival, prompt, output = times("timestamp"), tokens("input_length"), tokens("output_length")
    blocks = Blocks("hash_ids")
    blank = read_columns(file, [chat, parent, arrival, prompt, output, blocks])
    prefix, found = prefix_of(file, blocks, prompt, blank, options.block_tokens or BLOCK_TOKENS)
    notes: list[str] = []

    def turns(rows: Ints) -> Turns:
        previous, said = _previous(chat, parent, rows)
        notes.extend(said)
        start = arrival.values[rows]
        return Turns(previous, np.where(previous >= 0, start - start[previous], 0.0))

    trace = to_trace(
        file, blank, Requests(arrival.values, prompt, output, prefix=prefix, turns=turns, notes=tuple(found))
    )
    return noted(trace, *notes, *too_slow(trace), *on_a_grid(trace))


def _previous(chat: Texts, parent: Texts, rows: Ints) -> tuple[Ints, list[str]]:
    """The position of each row's parent, and notes on what a chain of turns cannot say."""
    n = rows.size
    position = np.full(len(chat.words) + 1, n, dtype=np.int64)  # its last entry: a parent that is not in the file
    np.minimum.at(position, chat.codes[rows], np.arange(n))
    code = {word: i for i, word in enumerate(chat.words)}
    named = np.array([code.get(word, len(chat.words)) for word in parent.words] + [len(chat.words)])
    roots = {i for i, word in enumerate(parent.words) if word in ("-1", "-1.0")}
    parents = parent.codes[rows]
    wanted = (parents >= 0) & ~np.isin(parents, list(roots))
    found = np.where(wanted, position[named[parents]], n)
    absent, late = wanted & (found == n), (found < n) & (found >= np.arange(n))
    previous = np.where(late | (found == n), -1, found)
    first = np.zeros(n, dtype=bool)
    first[np.unique(previous, return_index=True)[1]] = True
    branch = (previous >= 0) & ~first
    previous[branch] = -1
    reasons = {
        "whose parent is not in the file or was dropped": absent,
        "that stand before their parent": late,
        "that follow an answer which another turn followed already (a branch)": branch,
    }
    notes = [f"{mask.sum():,} turns {why} begin a session of their own" for why, mask in reasons.items() if mask.any()]
    if (previous >= 0).any():
        notes.append("think times are gaps between arrivals, in which the answer before is included")
    return previous, notes
