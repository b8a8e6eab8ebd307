"""A KV cache that keeps what was computed: full blocks are found again by what they and all before them hold.

vLLM's automatic prefix caching (`v1/core/block_pool.py`, 0.10 to 0.32): a block is registered when the step that fills
it is planned, and stays when its request has given it back, until it is its turn in the queue of free blocks. A request
gives its blocks back tail first; who needs blocks takes them from the front; who finds one takes it out of the middle.

Only blocks that somebody may look for have an identity: those of content that several prompts begin with, and those of
a preempted request. All others are counts in the queue. Blocks that decoding requests take are a lower `free` at first,
and leave the queue when its order matters next (`_settle`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from sim.kvcache import KVCache

if TYPE_CHECKING:
    from sim.request import Request

Keys = Callable[[int], Sequence[Hashable]]
"""Request id -> the content of the leading full blocks of its prompt that others may have too; equal keys, equal
content of that block and of all before it."""


class Block:
    """A block with an identity: its content, and the running requests that hold it."""

    __slots__ = ("holders", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.holders = 1


class PrefixCache(KVCache):
    """`num_blocks` blocks of `block_size` tokens that are kept while there is room; `free` counts what can be evicted.

    `blank_first` is the rule of vLLM 0.32: blocks that are given back without having been filled are used up first.
    """

    __slots__ = ("_blank_first", "_found", "_keys", "_known", "_queue", "_queued", "_twins")

    def __init__(self, num_blocks: int, block_size: int, keys: Keys | None, blank_first: bool) -> None:
        super().__init__(num_blocks, block_size)
        self._keys = keys
        self._blank_first = blank_first
        self._known: dict[Hashable, Block] = {}  # content -> the block registered first
        self._twins: dict[Hashable, list[Block]] = {}  # and others with the same, in order
        self._queue: OrderedDict[object, int] = OrderedDict()  # free blocks: Block -> 1, or an anonymous run -> how many
        self._queued = 0  # blocks in the queue; `free`, once those taken from its front have left it
        self._found: list[Block] = []  # by the last lookup
        self._append(self.usable)

    def lookup(self, request: Request) -> tuple[int, int]:
        """What a waiting request would find: tokens, in full blocks, and how many of these blocks count as free.

        At least its last token is left to be computed, since a step must yield something.
        """
        self._settle()
        if request.keys is None:
            request.keys = () if self._keys is None else self._keys(request.id)
        keys, known = request.keys, self._known
        most = (request.target - 1) // self.block_size
        found: list[Block] = []
        for key in islice(keys, most):
            if (block := known.get(key)) is None:
                break
            found.append(block)
        if request.preemptions and len(found) == len(keys):
            for index in range(len(keys), most):
                if (block := known.get((request.id, index))) is None:
                    break
                found.append(block)
        self._found = found
        idle = 0
        for block in found:
            if not block.holders:
                idle += 1
        return len(found) * self.block_size, idle

    def claim(self, request: Request) -> None:
        """Give `request` the blocks that the lookup just made has found for it."""
        queue, idle = self._queue, 0
        for block in self._found:
            if not block.holders:
                del queue[block]
                idle += 1
            block.holders += 1
        self._queued -= idle
        self.free -= idle
        request.blocks = self._found

    def grow(self, request: Request, before: int, after: int) -> None:
        """A prompt, of which `before` tokens have their blocks, gets those for `after` tokens; full ones are registered."""
        super().grow(request, before, after)
        keys, blocks = request.keys, request.blocks
        assert keys is not None
        for key in keys[len(blocks) : after // self.block_size]:
            self._register(blocks, key)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """Take back the blocks of `tokens` tokens, tail first. The full ones among the first `kept` tokens are
        registered; `again`: the request will look for them."""
        self._settle()
        blocks, full = request.blocks, kept // self.block_size
        blank = self.blocks(tokens) - full
        if again:
            for index in range(len(blocks), full):
                self._register(blocks, (request.id, index))
        if self._blank_first:
            self._append(blank, front=True)
            self._append(full - len(blocks))
        else:
            self._append(blank + full - len(blocks))
        queue, idle = self._queue, 0
        for block in reversed(blocks):
            block.holders -= 1
            if not block.holders:
                queue[block] = 1
                idle += 1
        self._queued += idle
        self.free = self._queued
        request.blocks = []

    def _register(self, blocks: list[Block], key: Hashable) -> None:
        """The next full block of a request, whose identified blocks are `blocks`, holds `key`."""
        block = Block(key)
        blocks.append(block)
        if self._known.setdefault(key, block) is not block:
            self._twins.setdefault(key, []).append(block)

    def _append(self, count: int, front: bool = False) -> None:
        """`count` blocks that nobody will look for join the queue."""
        if count:
            run = object()
            self._queue[run] = count
            self._queued += count
            self.free = self._queued
            if front:
                self._queue.move_to_end(run, last=False)

    def _settle(self) -> None:
        """Take from the front of the queue what has been taken from `free`: what these blocks held is lost."""
        more, queue = self._queued - self.free, self._queue
        while more:
            entry, count = queue.popitem(last=False)
            if count > more:
                queue[entry] = count - more
                queue.move_to_end(entry, last=False)
                break
            more -= count
            if isinstance(entry, Block):
                self._evict(entry)
        self._queued = self.free

    def _evict(self, block: Block) -> None:
        key, twins = block.key, self._twins.get(block.key)
        if twins is None:
            del self._known[key]
            return
        if self._known[key] is block:
            self._known[key] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[key]
