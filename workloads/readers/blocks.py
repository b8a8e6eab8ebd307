"""Prefix blocks of a file: do they fit the prompts? A wrong block size makes every hit rate and cache size wrong."""

from __future__ import annotations

import numpy as np

from servecast.errors import ServecastError
from workloads.prefix import Prefix
from workloads.readers.columns import SHOWN, Blocks, Mask, Numbers
from workloads.readers.files import TraceFile
from workloads.trace import Ints

SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes in use."""


def prefix_of(
    file: TraceFile, blocks: Blocks, prompt: Numbers, blank: Mask, block_tokens: int, *, stated: bool = False
) -> tuple[Prefix, list[str]]:
    """The prefix of every row, and notes. Raises ServecastError where prompts hold fewer tokens than their blocks
    need, or, unless the file itself has stated the size, where another one explains most rows and this one does not.
    """
    counts = np.diff(blocks.offsets)
    rows = ~blank & (prompt.values >= 1)
    lengths = np.where(rows, prompt.values, 0).astype(np.int64)
    fits = _fits(counts, lengths, block_tokens)
    over = np.flatnonzero(rows & (counts > -(-lengths // block_tokens)))
    meant = likely_size(counts[rows], lengths[rows])
    hint = f"; {meant} tokens a block would fit: say block_tokens {meant}" if meant not in (None, block_tokens) else ""
    if over.size:
        shown = [f"{file.first_row + i} ({counts[i]:,} blocks, {lengths[i]:,} tokens)" for i in over[:SHOWN]]
        raise ServecastError(
            f"{file.path}: column {blocks.name!r} holds more blocks of {block_tokens} tokens than the prompt has in "
            f"{file.rows(shown, over.size)}{hint}"
        )
    some = rows & (counts > 0)
    if hint and not stated and np.count_nonzero(fits & some) * 2 < np.count_nonzero(some):
        covered = counts[some].sum() * block_tokens / lengths[some].sum()
        raise ServecastError(
            f"{file.path}: blocks of {block_tokens} tokens cover {100 * covered:.3g} % of the prompts "
            f"({counts[some].sum():,} blocks in column {blocks.name!r}, {lengths[some].sum():,} tokens){hint}"
        )
    notes = []
    if short := int(np.count_nonzero(rows & ~fits)):
        covered = (counts[rows] * block_tokens).clip(max=lengths[rows]).sum() / lengths[rows].sum()
        notes.append(
            f"{short:,} prompts are longer than their blocks of {block_tokens} tokens; blocks cover "
            f"{100 * covered:.3g} % of all prompt tokens, the rest is taken as never shared"
        )
    return Prefix(blocks.offsets, blocks.ids, block_tokens), notes


def likely_size(counts: Ints, lengths: Ints) -> int | None:
    """The block size in use that explains 9 of 10 rows with ids, None when none does; the largest of several."""
    some = counts > 0
    counts, lengths = counts[some], lengths[some]
    for size in reversed(SIZES):
        if counts.size and np.count_nonzero(_fits(counts, lengths, size)) >= 0.9 * counts.size:
            return size
    return None


def _fits(counts: Ints, lengths: Ints, size: int) -> Mask:
    """Rows whose number of ids is what a prompt of that length has, with or without its last, partly filled block."""
    fits: Mask = (counts == lengths // size) | (counts == -(-lengths // size))
    return fits
