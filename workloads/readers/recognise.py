"""Which format a file is of: from the names of its columns, and where two formats share them, from its first rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from servecast.errors import ServecastError, one_of
from workloads.readers import mooncake, timed_trace
from workloads.readers.blocks import likely_size
from workloads.readers.columns import Blocks, tokens
from workloads.readers.files import TraceFile
from workloads.trace import MAX_TOKENS

SAMPLE = 200
CLOSEST = 3


def format_of(file: TraceFile, lacking: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(the format, a note that says what it was recognised from). lacking: what the file lacks to be of each format.
    Raises ServecastError, with what it lacks to be of the closest ones, when it is of none.
    """
    names = "keys" if file.kind == "jsonl" else "columns"
    for name, missing in lacking.items():
        if missing:
            continue
        if name == "mooncake":
            return _by_blocks(file)
        return name, f"format {name} recognised from the {names} {one_of(file.columns)}"
    closest = sorted(lacking, key=lambda name: len(lacking[name]))[:CLOSEST]
    raise ServecastError(
        f"{file.path}: the {names} {one_of(file.columns)} are of no known trace format; formats: {one_of(lacking)}",
        *(f"{file.path}: as format {name}, {problem}" for name in closest for problem in lacking[name]),
    )


def _by_blocks(file: TraceFile) -> tuple[str, str]:
    """Mooncake's and vLLM's timed traces have the same keys: milliseconds and 512 tokens, or seconds and 16."""
    prompt, blocks = tokens("input_length"), Blocks("hash_ids")
    row, frame = next(file.load([prompt.name, blocks.name]))
    sample = frame.head(SAMPLE)
    for column in (prompt, blocks):
        column.add(sample[column.name], np.zeros(len(sample), dtype=bool), row)
        column.close()
    known = (prompt.values >= 1) & (prompt.values <= MAX_TOKENS)
    size = likely_size(np.diff(blocks.offsets)[known], prompt.values[known].astype(np.int64))
    if size == timed_trace.BLOCK_TOKENS:
        name, other, unit = "timed_trace", "mooncake", "seconds"
    else:
        name, other, unit = "mooncake", "timed_trace", "milliseconds"
    if size in (mooncake.BLOCK_TOKENS, timed_trace.BLOCK_TOKENS):
        why = f"blocks of {size} tokens in its first rows tell it from {other}"
    else:
        why = f"{other} has the same keys, and the blocks of its first rows do not tell"
    return name, f"format {name} (times in {unit}) recognised from the keys {one_of(file.columns)}; {why}"
