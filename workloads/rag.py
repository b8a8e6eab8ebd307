"""Retrieval-augmented generation: prompts of a system prompt, retrieved chunks and a question.

Popular chunks come back, but a prefix cache finds one only behind the same chunks in the same order: which order the
chunks stand in decides what can be shared. It knows nothing of caches.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.generate import stream
from workloads.kinds import KindOf, Spec, call_kind
from workloads.lengths import LENGTHS
from workloads.parameters import BlockTokens, Count, Number, TokensOrNone, Word
from workloads.prefix import Prefix
from workloads.trace import Floats, Ints, Trace

ArrivalsOf = Annotated[Spec, KindOf(ARRIVALS)]
LengthsOf = Annotated[Spec, KindOf(LENGTHS)]
Zipf = Annotated[float, Number("a number", 0, 5)]
Order = Annotated[str, Word(("relevance", "sorted"))]

MAX_CHUNKS = 100_000_000
MAX_BLOCKS = 200_000_000


def rag(
    n: int,
    seed: int,
    *,
    arrivals: ArrivalsOf,
    chunks: Count,
    chunk: LengthsOf,
    corpus: Count,
    question: LengthsOf,
    answer: LengthsOf,
    zipf: Zipf = 1.0,
    order: Order = "relevance",
    system_tokens: TokensOrNone = 0,
    block_tokens: BlockTokens = 16,
) -> Trace:
    """n questions, each with `chunks` different chunks of a corpus of `corpus`. A chunk has its tokens, drawn from
    `chunk`, once and for all. The r-th most popular one is drawn in proportion to 1/r^zipf (0: all alike).
    order: chunks stand as they were drawn (relevance), or by their place in the corpus (sorted), so that the same set
    makes the same prompt and popular chunks stand in front.
    """
    if problems := rag_problems({"chunks": chunks, "corpus": corpus}, "sessions"):
        raise ServecastError(*problems)
    if n * chunks > MAX_CHUNKS:
        raise ServecastError(f"sessions: {n * chunks:,} chunks; at most {MAX_CHUNKS:,} are drawn, so ask for fewer")
    size = call_kind(LENGTHS, chunk, corpus, stream(seed, "corpus"))
    popularity = np.arange(1, corpus + 1, dtype=np.float64) ** -zipf
    drawn = draw_distinct(n, chunks, popularity, stream(seed, "retrieval"), stream(seed, "more retrieval"))
    if order == "sorted":
        drawn.sort(axis=1)
    arrival_s = call_kind(ARRIVALS, arrivals, n, stream(seed, "arrivals"))
    asked = call_kind(LENGTHS, question, n, stream(seed, "question"))
    output = call_kind(LENGTHS, answer, n, stream(seed, "answer"))
    retrieved = size[drawn].sum(axis=1)
    prompt = system_tokens + retrieved + asked
    prefix, known = _blocks(drawn, size, system_tokens, prompt, block_tokens)

    total = int(prompt.sum())
    repeated = np.ones(drawn.size, dtype=bool)
    repeated[np.unique(drawn, return_index=True)[1]] = False
    again = int(size[drawn.ravel()[repeated]].sum())
    notes = (
        f"{total:,} prompt tokens: {system_tokens * n / total:.1%} system prompt (the same in all); "
        f"{int(retrieved.sum()) / total:.1%} retrieved chunks; {int(asked.sum()) / total:.1%} questions (new)",
        f"{again / int(retrieved.sum()):.1%} of the chunk tokens were retrieved before, but as prefixes (order: "
        f"{order}) at most {int(known.sum()) * block_tokens / total:.1%} of all prompt tokens can be found in a cache, "
        "the system prompt included",
    )
    source = f"generated: {n:,} questions with {chunks} chunks each, {arrivals['kind']} arrivals, seed {seed}"
    return Trace(arrival_s, prompt, output, output, source=source, prefix=prefix, notes=notes)


def rag_problems(spec: Spec, where: str) -> list[str]:
    """What contradicts itself in checked parameters."""
    if spec["chunks"] > spec["corpus"]:
        return [f"{where}.chunks: {spec['chunks']} different chunks cannot come from a corpus of {spec['corpus']}"]
    return []


def check_blocks(count: int, block_tokens: int) -> None:
    """Raises ServecastError when the prompts have more blocks than memory should hold."""
    if count > MAX_BLOCKS:
        raise ServecastError(
            f"block_tokens: the prompts have {count:,} blocks of {block_tokens} tokens; at most {MAX_BLOCKS:,} are "
            "kept, so give larger blocks or fewer sessions"
        )


def draw_distinct(n: int, k: int, weights: Floats, rng: np.random.Generator, more: np.random.Generator) -> Ints:
    """int64[n, k]: in each row k different positions, drawn one after the other in proportion to the weights of those
    that are left.

    Drawing again what was drawn already gives just that. Rows that still lack some after 4k + 16 draws take the rest
    from a race: exponential times with the weights as rates end in such an order, too.
    """
    total = np.cumsum(weights)
    tries = 4 * k + 16
    drawn = np.empty((n, k), dtype=np.int64)
    for begin in range(0, n, 4096):  # in pieces, for the memory
        rows = min(4096, n - begin)
        found = np.searchsorted(total, rng.random((rows, tries)) * total[-1], side="right")
        found = np.minimum(found, weights.size - 1)
        by_value = np.argsort(found, axis=1, kind="stable")
        ordered = np.take_along_axis(found, by_value, axis=1)
        again = np.zeros((rows, tries), dtype=bool)
        np.put_along_axis(again, by_value[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        front = np.argsort(again, axis=1, kind="stable")[:, :k]  # those seen first, in order of drawing
        drawn[begin : begin + rows] = np.take_along_axis(found, front, axis=1)
        have = np.minimum((~again).sum(axis=1), k)
        for row in np.flatnonzero(have < k).tolist():
            mine = drawn[begin + row, : have[row]]
            race = more.exponential(1.0, weights.size) / weights
            race[mine] = np.inf
            drawn[begin + row, have[row] :] = np.argsort(race, kind="stable")[: k - have[row]]
    return drawn


def _blocks(drawn: Ints, size: Ints, system: int, prompt: Ints, block_tokens: int) -> tuple[Prefix, Ints]:
    """(the full blocks of each prompt, how many leading ones were in earlier prompts).

    A block belongs to the part in which it ends, and its id names that part and all before: the chunk and those in
    front of it. Blocks that end in a question are their request's own.
    """
    n, k = drawn.shape
    end = np.full(n, system, dtype=np.int64)
    counts = np.empty((n, k + 2), dtype=np.int64)
    starts = np.empty((n, k + 2), dtype=np.int64)
    counts[:, 0], starts[:, 0] = system // block_tokens, 0
    used, path = system // block_tokens, np.zeros(n, dtype=np.int64)
    known = np.where(np.arange(n) > 0, counts[:, 0], 0)
    for i in range(k):
        before, end = end, end + size[drawn[:, i]]
        _, first, path = np.unique(path * size.size + drawn[:, i], return_index=True, return_inverse=True)
        counts[:, i + 1] = end // block_tokens - before // block_tokens
        of_path = counts[first, i + 1]
        starts[:, i + 1] = (used + np.cumsum(of_path) - of_path)[path]
        used += int(of_path.sum())
        known += np.where(first[path] < np.arange(n), counts[:, i + 1], 0)
    own = prompt // block_tokens - end // block_tokens
    counts[:, -1], starts[:, -1] = own, used + np.cumsum(own) - own
    check_blocks(int(counts.sum()), block_tokens)
    flat = counts.ravel()
    within = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    return Prefix(offsets, np.repeat(starts.ravel(), flat) + within, block_tokens), known
