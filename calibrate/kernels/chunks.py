"""Prefill attention of the chunks of one step, as look-ups for a simulator's loop. It knows no fit and no tables."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


TILE_S = 3e-6
"""To begin and end a tile: by LLMServingSim's mixed kernels of RTX 4090 and RTX PRO 6000 (2 to 5 us)."""


class Priced(Protocol):
    """What `compile_chunks` needs of a head shape's prices; `PrefillShape` is one."""

    def line(self, level: int, q: Floats) -> Floats:
        """Seconds of 2^level prompts of `q` tokens in one kernel."""

    def key(self, sequences: ArrayLike, q: ArrayLike) -> Floats:
        """Seconds of one more cached token in each of them."""


@dataclass(frozen=True, slots=True)
class Riders:
    """What decoding sequences cost in the chunks' kernel, where that kernel gives every head of each its own tile, as
    FlashAttention 2 does in mixed steps: it then neither splits their KV nor shares it among grouped queries.

    A tile takes TILE_S and `key_s` a key, and `wave` of them run at a time. `read_s` is the time to read a token's KV
    once: every query head does, and finds in the last cache what the first of its KV head has read as long as that
    holds the KV of all sequences (`resident` tokens); half more, and it finds nothing.
    """

    key_s: float
    wave: float
    read_s: float
    heads: int
    kv_heads: int
    resident: float = float("inf")

    @property
    def again_s(self) -> float:
        """Seconds to read a token's KV once for every other query head of its KV head."""
        return self.read_s * (self.heads / self.kv_heads - 1)

    def token_s(self, sequences: int) -> float:
        """Seconds that a KV token takes the tiles of so many sequences, all in all."""
        return max(self.key_s / sequences, self.key_s * self.heads / self.wave) if sequences else 0.0

    def tiles_s(self, sequences: int) -> float:
        """Seconds that the tiles of so many sequences take whatever their KV."""
        return sequences * self.heads / self.wave * TILE_S if self.read_s else 0.0

    def seconds(self, sequences: int, kv_tokens: float) -> float:
        """Seconds that so many sequences with so many cached tokens in all add to a kernel with chunks.

        Derived but for TILE_S. On 27,408 mixed kernels of vLLM 0.19 (FlashAttention 2; LLMServingSim's layers of RTX
        4090 and RTX PRO 6000) 11 % median error, median +0.5 and +7 %; a decode kernel of their own is 40 % low.
        """
        read = self.read_s * kv_tokens + self.again_s * min(3 * max(kv_tokens - self.resident, 0.0), kv_tokens)
        return max(self.tiles_s(sequences) + self.token_s(sequences) * kv_tokens, read if sequences else 0.0)


@dataclass(frozen=True, slots=True)
class ChunkPrices:
    """Seconds of chunks of one head shape. One chunk alone takes `alone_s[q]`, and `key_s[q]` for every cached token.

    Several chunks in one kernel share its fixed time and fill the GPU together: `level_s[i][q]` and `level_key_s[i][q]`
    are one chunk's part, beyond `fixed_s`, of a kernel of 2^i chunks like it.
    """

    alone_s: array[float]
    key_s: array[float]
    fixed_s: float
    level_s: list[array[float]]
    level_key_s: list[array[float]]
    window: int
    riders: Riders

    def seconds(self, q: int, context: int) -> float:
        """Seconds of a kernel with one chunk: `q` new tokens after `context` cached ones."""
        if self.window:
            return self.alone_s[q] + self.key_s[q] * more_keys(q, context, self.window)
        return self.alone_s[q] + self.key_s[q] * context

    def together(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of one kernel with all these chunks, (new tokens, cached tokens) each.

        Exact for a power of two of equal chunks. Else each chunk has its part of a kernel of as many chunks like it as
        have the same tokens together: a long chunk is priced as if alone, short ones beside it fill its gaps.
        """
        if len(chunks) == 1:
            return self.seconds(*chunks[0])
        longest = total = 0
        for q, _ in chunks:
            total += q
            longest = max(longest, q)
        level = min(
            (total * 181 // (longest * 128)).bit_length() - 1, len(self.level_s) - 1
        )  # rounds log2(total/longest)
        alone, key, window = self.level_s[level], self.level_key_s[level], self.window
        seconds = self.fixed_s
        for q, context in chunks:
            seconds += alone[q] + key[q] * (more_keys(q, context, window) if window else context)
        return seconds

    def times(self, factor: float) -> ChunkPrices:
        """Every price times `factor`."""
        riders = replace(self.riders, key_s=factor * self.riders.key_s, read_s=factor * self.riders.read_s)
        return replace(
            self,
            alone_s=_array(factor * np.array(self.alone_s)),
            key_s=_array(factor * np.array(self.key_s)),
            fixed_s=factor * self.fixed_s,
            level_s=[_array(factor * np.array(s)) for s in self.level_s],
            level_key_s=[_array(factor * np.array(s)) for s in self.level_key_s],
            riders=riders,
        )

    def plus(self, fresh: Callable[[Floats], Floats], cached_s: float) -> ChunkPrices:
        """With `fresh(tokens)` seconds more for the new tokens of all chunks together (tokens from 1; never falling),
        and `cached_s` for every cached one."""
        q = np.arange(1, len(self.alone_s), dtype=np.float64)
        least = float(fresh(q[:1])[0])
        levels = [np.array(s) + _padded((fresh(2.0**i * q) - least) / 2**i) for i, s in enumerate(self.level_s)]
        keys = [np.array(s) + _padded(np.full(len(q), cached_s)) for s in self.level_key_s]
        return replace(
            self,
            alone_s=_array(np.array(self.alone_s) + _padded(fresh(q))),
            key_s=_array(keys[0]),
            fixed_s=self.fixed_s + least,
            level_s=[_array(s) for s in levels],
            level_key_s=[_array(s) for s in keys],
        )


@dataclass(frozen=True, slots=True)
class LocalChunks:
    """Prices where tokens see only those of their own chunk of `size` tokens of the sequence: of these, each is priced
    as a sequence of its own. Prompt chunks are what a step computes of a prompt: the two do not begin together."""

    whole: ChunkPrices
    size: int

    @property
    def riders(self) -> Riders:
        """See `ChunkPrices`."""
        return self.whole.riders

    def together(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `ChunkPrices`."""
        pieces = []
        for q, context in chunks:
            at = context % self.size
            while q > 0:
                pieces.append((min(q, self.size - at), at))
                q -= self.size - at
                at = 0
        return self.whole.together(pieces)

    def times(self, factor: float) -> LocalChunks:
        """See `ChunkPrices`."""
        return LocalChunks(self.whole.times(factor), self.size)


@dataclass(frozen=True, slots=True)
class DealtChunks:
    """Prices where `ranks` GPUs share the tokens of every chunk: each computes two of 2 x `ranks` equal parts, so that
    all have the same work: the n-th and the n-th from the end, whose tokens see those of all parts before them in the
    cache. Of the rank whose parts are in the middle."""

    whole: Chunks
    ranks: int

    @property
    def riders(self) -> Riders:
        """See `ChunkPrices`."""
        return self.whole.riders

    def together(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `ChunkPrices`."""
        pieces = []
        for q, context in chunks:
            size = -(-q // (2 * self.ranks))
            last = (q - 1) // size  # of few tokens there are fewer parts
            parts = {min(self.ranks - 1, last), min(self.ranks, last)}
            pieces += [(min(size, q - part * size), context + part * size) for part in parts]
        return self.whole.together(pieces)

    def times(self, factor: float) -> DealtChunks:
        """See `ChunkPrices`."""
        return DealtChunks(self.whole.times(factor), self.ranks)


Chunks = ChunkPrices | LocalChunks | DealtChunks
"""What has a price for all chunks `together`."""


def compile_chunks(prices: Priced, riders: Riders, max_q: int, max_chunks: int, window: int) -> ChunkPrices:
    """The look-ups for chunks of 1..`max_q` tokens, up to `max_chunks` like them in one kernel."""
    q = np.arange(1, max_q + 1, dtype=np.float64)
    fixed = float(prices.line(0, q[:1])[0])
    alone, levels, keys = array("d"), [], []
    for level in range(max(max_chunks, 1).bit_length()):
        seconds = np.maximum(np.maximum.accumulate(prices.line(level, q)), fixed)
        levels.append(_by_tokens((seconds - fixed) / 2**level))
        keys.append(_by_tokens(prices.key(2.0**level, q) / 2**level))
        alone = alone or _by_tokens(seconds)
    return ChunkPrices(alone, keys[0], fixed, levels, keys, window, riders)


def _by_tokens(seconds: Floats) -> array[float]:
    """A look-up whose entry q is of q tokens: entry 0 is 0."""
    return _array(_padded(seconds))


def _padded(seconds: Floats) -> Floats:
    return np.concatenate([[0.0], seconds])


def _array(seconds: Floats) -> array[float]:
    """An array holds numbers as a list does, built in no time."""
    return array("d", seconds.tobytes())


def more_keys(q: int, context: int, window: int) -> float:
    """How many keys more each of `q` tokens sees on average because of `context` cached ones; see `pairs`."""
    fresh = q * (q + 1) / 2 if q <= window else window * (window + 1) / 2 + (q - window) * window
    if context >= window - 1:
        return window - fresh / q
    growing = min(q, window - context)
    seen = growing * context + growing * (growing + 1) / 2 + (q - growing) * window
    return (seen - fresh) / q


def pairs(q: Floats, context: Floats, window: int) -> Floats:
    """Query-key pairs of `q` tokens after `context` cached ones: each sees itself and all before, of which the last
    `window` (0: all)."""
    if not window:
        return q * context + q * (q + 1) / 2
    growing = np.clip(window - context, 0.0, q)
    seen: Floats = growing * context + growing * (growing + 1) / 2 + (q - growing) * window
    return seen
