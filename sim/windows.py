"""Layers that see only near tokens: a sliding window, or the chunk of the sequence that a token lies in.

They read less than all of a sequence, and what no later token will read is given back while the sequence grows.
Semantics of vLLM's `v1/core/single_type_kv_cache_manager.py` (`remove_skipped_blocks`, 0.10 to 0.32). It knows requests
and counts of blocks, nothing of queues or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sim.kvcache import KVCache

if TYPE_CHECKING:
    from sim.request import Request


@dataclass(frozen=True, slots=True)
class Window:
    """One kind of such layers: `size` tokens, the one that reads included, or, where `chunked`, chunks of so many.

    `tables`: how many block tables these layers have; none where the engine keeps all their tokens, as of any layer.
    `most`: the most blocks that one of these tables ever holds, by the engine's own bound.
    """

    size: int
    chunked: bool
    tables: int
    most: int

    def seen(self, tokens: int) -> int:
        """What the next token of a sequence of `tokens` tokens reads, itself not counted."""
        return tokens % self.size if self.chunked else min(tokens, self.size)

    def passed(self, tokens: int) -> int:
        """The tokens, from the first on, that nobody reads any more once `tokens` are computed."""
        return tokens // self.size * self.size if self.chunked else max(0, tokens - self.size + 1)

    def freed(self, tokens: int, block_size: int) -> int:
        """The blocks that have been given back by then."""
        return self.tables * (self.passed(tokens) // block_size)


@dataclass(frozen=True, slots=True)
class Tables:
    """The block tables of a model's layers: `full` whose layers see everything, and those of the `windows`.

    `admission`: an admission reserves, of these, the blocks of what it computes first ("step"), of the whole prompt as
    if no window were there ("prompt"), or of the prompt, but never more than `Window.most` ("window", from vLLM 0.24).
    `late`: what a step reads is kept until that step is over, not only until it is planned (0.32, asynchronous).
    `keeps_ends`: of a sliding window, a prefix cache keeps only what is read at the end of a prompt, and of what
    prompts share (0.32).
    """

    full: int = 1
    windows: tuple[Window, ...] = ()
    admission: Literal["step", "prompt", "window"] = "step"
    late: bool = False
    keeps_ends: bool = False

    @property
    def count(self) -> int:
        """All of them."""
        return self.full + sum(window.tables for window in self.windows)

    def reserved(self, found: int, first: int, last: int, block_size: int) -> int:
        """See `KVCache.reserved`."""
        known, blocks = found // block_size, -(-last // block_size)
        if self.admission != "window":
            return self.count * (blocks - known)
        needed = self.count * (-(-first // block_size) - known)
        capped = sum(w.tables * max(0, min(blocks, w.most) - known) for w in self.windows)
        return max(needed, self.full * (blocks - known) + capped)

    def fits(self, prompt: int, tokens: int, room: int, block_size: int) -> bool:
        """See `KVCache.fits`. By the engine's bound: it may be a block or two a table less."""
        if self.admission == "prompt" and self.count * -(-prompt // block_size) > room:
            return False
        blocks = -(-tokens // block_size)
        return self.full * blocks + sum(w.tables * min(blocks, w.most) for w in self.windows) <= room


ONE = Tables()
"""Of a model whose layers all see everything."""


class WindowCache(KVCache):
    """A KV cache whose blocks several block tables share. Nothing is kept of what is given back.

    A running request says in `slid` how many of its tokens were computed when it gave back last what was passed.
    """

    __slots__ = ("_layout", "tables")

    def __init__(self, num_blocks: int, block_size: int, tables: Tables) -> None:
        super().__init__(num_blocks, block_size)
        self._layout = tables
        self.tables = tables.count

    def needed(self, before: int, after: int) -> int:
        """See `KVCache`."""
        return self.tables * (self.blocks(after) - self.blocks(before))

    def reserved(self, found: int, first: int, last: int) -> int:
        """See `KVCache`."""
        return self._layout.reserved(found, first, last, self.block_size)

    def fits(self, prompt: int, tokens: int, room: int) -> bool:
        """See `KVCache`."""
        return self._layout.fits(prompt, tokens, room, self.block_size)

    def slide(self, request: Request, tokens: int) -> None:
        """`request` gives back what is passed once `tokens` of its tokens are computed."""
        size = self.block_size
        for window in self._layout.windows:
            self.free += window.freed(tokens, size) - window.freed(request.slid, size)
        request.slid = tokens

    def grow(self, request: Request, before: int, after: int) -> None:
        """See `KVCache`."""
        self.free -= self.needed(before, after)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """See `KVCache`."""
        self.free += self.needed(0, tokens)
        for window in self._layout.windows:
            self.free -= window.freed(request.slid, self.block_size)
