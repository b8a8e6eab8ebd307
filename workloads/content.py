"""Which KV blocks of a trace's prompts hold the same: what prompts begin with, in blocks of an engine's own size.

It knows nothing of caches. A KV block can be shared if all of it lies in content blocks that are known, and that more
than one prompt begins with; nobody else would look for it. Whatever follows in a prompt is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.prefix import Ints, Prefix, _leading


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The leading KV blocks of n prompts that others have too.

    chains: int64[content blocks]: each names its block and all before it; those of request i begin at offsets[i]
    (int64[n + 1]). content_tokens, block_tokens: tokens of a content block and of a KV block. blocks: int64[n]: KV
    blocks that can be shared.
    """

    offsets: Ints
    chains: Ints
    content_tokens: int
    block_tokens: int
    blocks: Ints

    def keys(self, request: int) -> list[int]:
        """What the KV blocks hold, from the first on, as far as others have the same: equal keys, equal content."""
        count = int(self.blocks[request])
        if not count:
            return []
        last = np.arange(1, count + 1) * self.block_tokens - 1  # the last token of each
        index, within = np.divmod(last, self.content_tokens)
        a_chain = self.content_tokens // self.block_tokens + 1  # more KV blocks than end in one content block
        keys: list[int] = (
            self.chains[self.offsets[request] + index] * a_chain + within // self.block_tokens
        ).tolist()
        return keys


def content_of(prefix: Prefix, prompt_tokens: Ints, block_tokens: int) -> Content:
    """The shared content of prompts of `prompt_tokens` tokens (int64[n]), for KV blocks of `block_tokens` tokens."""
    offsets = prefix.offsets
    chains, counts = np.unique(prefix.ids if prefix.chained else _chains(prefix), return_inverse=True, return_counts=True)[1:]
    shared = _leading(counts[chains] > 1, offsets)
    known = np.minimum(shared * prefix.block_tokens, prompt_tokens)
    return Content(offsets, chains.astype(np.int64), prefix.block_tokens, block_tokens, known // block_tokens)


def _chains(prefix: Prefix) -> Ints:
    """int64[blocks]: an id of each content block and all before it, from ids that name contents alone."""
    counts = np.diff(prefix.offsets)
    chains = np.zeros(prefix.ids.size, dtype=np.int64)
    before = np.zeros(len(prefix), dtype=np.int64)
    rows, named = np.flatnonzero(counts), 0
    for position in range(int(counts.max(initial=0))):
        rows = rows[counts[rows] > position]
        at = prefix.offsets[rows] + position
        pairs = np.stack([before[rows], prefix.ids[at]])
        distinct, inverse = np.unique(pairs, axis=1, return_inverse=True)
        chains[at] = before[rows] = named + inverse.ravel()
        named += distinct.shape[1]
    return chains
