"""vLLM's timed traces (`--dataset-name timed_trace`): Mooncake's keys, but `timestamp` in seconds and 16-token blocks.

The block size is vLLM's `--timed-trace-chunk-hash-size`; a wrong one, which vLLM pays with shorter prompts, is refused
here. Rows need not be sorted nor start at 0. Source: vllm/benchmarks/datasets of vLLM 0.33.
"""

from __future__ import annotations

from workloads.readers import mooncake
from workloads.readers.blocks import prefix_of
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Blocks, read_columns, times, tokens
from workloads.readers.files import TraceFile
from workloads.readers.options import ReadOptions
from workloads.readers.plausible import on_a_grid, too_slow
from workloads.trace import Trace

OPTIONS: tuple[str, ...] = ("block_tokens",)
BLOCK_TOKENS = 16

lacks = mooncake.lacks


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by key and row."""
    arrival = times("timestamp")
    prompt, output, blocks = tokens("input_length"), tokens("output_length"), Blocks("hash_ids")
    blank = read_columns(file, [arrival, prompt, output, blocks])
    prefix, notes = prefix_of(file, blocks, prompt, blank, options.block_tokens or BLOCK_TOKENS)
    trace = to_trace(file, blank, Requests(arrival.values, prompt, output, prefix=prefix, notes=tuple(notes)))
    return noted(trace, *too_slow(trace), *on_a_grid(trace))
