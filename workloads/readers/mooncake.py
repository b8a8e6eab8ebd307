"""Mooncake traces: JSONL of `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (blocks of 512 tokens).

Ids are chained: each names its block and all before it; the last block may be partly filled. Arrivals of the
conversation trace stand on a grid of 3 s. Source: github.com/kvcache-ai/Mooncake (cite Mooncake, FAST'25).
"""

from __future__ import annotations

from workloads.readers.blocks import prefix_of
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Blocks, read_columns, times, tokens
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.readers.plausible import on_a_grid, too_fast
from workloads.trace import Trace

OPTIONS: tuple[str, ...] = ("block_tokens",)
BLOCK_TOKENS = 512


def lacks(file: TraceFile) -> list[str]:
    """What the first row lacks to be of this format, in words; empty when it is."""
    if isinstance(file.first.get("hash_ids"), dict):
        return ["'hash_ids' is an object, not a list"]
    return missing(file, "timestamp", "input_length", "output_length", "hash_ids")


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by key and row."""
    arrival = times("timestamp", milliseconds=True)
    prompt, output, blocks = tokens("input_length"), tokens("output_length"), Blocks("hash_ids")
    blank = read_columns(file, [arrival, prompt, output, blocks])
    prefix, notes = prefix_of(file, blocks, prompt, blank, options.block_tokens or BLOCK_TOKENS)
    trace = to_trace(file, blank, Requests(arrival.values, prompt, output, prefix=prefix, notes=tuple(notes)))
    return noted(trace, *too_fast(trace), *on_a_grid(trace))
