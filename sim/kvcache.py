"""The paged KV cache of one replica: blocks counted, not identified. It knows nothing of requests or time."""

from __future__ import annotations


class KVCache:
    """`num_blocks` blocks of `block_size` tokens. As in vLLM one block is the null block, so N blocks hold N - 1."""

    __slots__ = ("block_size", "free", "usable")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.free = self.usable

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one sequence occupy."""
        return -(-tokens // self.block_size)
