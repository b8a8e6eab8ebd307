"""Shared content in KV blocks: equal where the tokens are, and left out where nobody shares or knows it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.content import content_of
from workloads.prefix import Prefix


@st.composite
def prefixes(draw):
    """Prompts, their content ids, tokens of a content block and of a KV block, and whether ids are chained."""
    rows = draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8))
    tokens = draw(st.integers(1, 9))
    prompts = [max(1, len(row) * tokens + draw(st.integers(-tokens + 1, 2 * tokens))) for row in rows]
    return prompts, rows, tokens, draw(st.integers(1, 9)), draw(st.sampled_from([None, 1, 10**12]))


@settings(max_examples=500, deadline=None)
@given(prefixes())
def test_paths_name_what_prompts_share(case):
    prompts, rows, tokens, block, chained = case
    names: dict[tuple[int, ...], int] = {}
    chains = [[tuple(row[: i + 1]) for i in range(len(row))] for row in rows]
    ids = (
        [chained * names.setdefault(c, len(names)) for row in chains for c in row]
        if chained
        else [c for row in rows for c in row]
    )
    offsets = np.cumsum([0, *map(len, rows)])
    prefix = Prefix(offsets, np.array(ids, dtype=np.int64), tokens, chained is not None)
    content = content_of(prefix, np.array(prompts), block)
    popular = Counter(c for row in chains for c in row)
    names_of: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
    for i, (prompt, row) in enumerate(zip(prompts, chains, strict=True)):
        shared = [c for c in row if popular[c] > 1]
        count = min(len(shared) * tokens, prompt) // block
        path = content.path(i)
        assert [end for _, end in path] == sorted({end for _, end in path})
        assert (path[-1][1] if path else 0) == count
        start = 0
        for stretch, end in path:
            for index in range(start, end):
                last = (index + 1) * block - 1
                assert names_of.setdefault((row[last // tokens], index), (stretch, index)) == (stretch, index)
            start = end
    assert len(set(names_of.values())) == len(names_of)  # others have other names
