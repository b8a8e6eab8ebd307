"""The content of prompts that repeat what was said before in their session, as blocks."""

from __future__ import annotations

import numpy as np

from workloads.prefix import Prefix
from workloads.rag import check_blocks
from workloads.trace import Ints


def said_blocks(known: Ints, owner: Ints, common: int, block_tokens: int) -> Prefix:
    """The full blocks of the first `known` tokens of each prompt (int64[n]): those within the first `common` tokens are
    everyone's, the rest its owner's (int64[n], from 0), whose prompts all begin alike.
    """
    full, everyones = known // block_tokens, common // block_tokens
    offsets = np.concatenate([[0], np.cumsum(full)])
    check_blocks(int(offsets[-1]), block_tokens)
    most = np.zeros(int(owner.max()) + 1, dtype=np.int64)
    np.maximum.at(most, owner, full - everyones)
    base = np.cumsum(most) - most
    ids = np.arange(offsets[-1]) - np.repeat(offsets[:-1], full)
    ids += np.where(ids < everyones, 0, np.repeat(base[owner], full))
    return Prefix(offsets, ids, block_tokens)
