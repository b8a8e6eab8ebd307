"""The paged KV cache of one replica: blocks counted, not identified. It knows nothing of time.

Its verbs are those of `sim.prefixcache.PrefixCache` and `sim.radixcache.RadixCache`, in which blocks are kept and found
again; here nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from sim.request import NEVER

if TYPE_CHECKING:
    from sim.decodes import Decodes
    from sim.request import Request
    from sim.windowdecodes import WindowDecodes

_NOTHING = (0, 0)


class KVCache:
    """`num_blocks` blocks of `block_size` tokens. As in vLLM one block is the null block, so N blocks hold N - 1.

    `free` may be lowered from outside by as many blocks as running requests newly need.
    """

    __slots__ = ("block_size", "free", "usable")

    grows = True
    """Whether decoding requests take blocks as they go."""
    tables = 1
    """Block tables of a sequence: each takes a block where the sequence grows into one."""
    keeps_computed = False
    """Whether it is told when the step of a prompt has ended: `keep`."""
    loads: Literal["", "async", "sync"] = ""
    """How what it does not find may be loaded from elsewhere: see `sim.offload`."""
    prefetches = False
    """Whether it does something when a request comes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.free = self.usable

    @property
    def shared(self) -> int:
        """Blocks that several running requests hold, counted for each but one of them."""
        return 0

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one sequence occupy."""
        return -(-tokens // self.block_size)

    def needed(self, before: int, after: int) -> int:
        """Blocks that a sequence needs for `after` tokens besides those of its first `before`."""
        size = self.block_size
        return -(-after // size) + (-before // size)

    def reserved(self, found: int, first: int, last: int) -> int:
        """Blocks that must be free to admit a request, of whose tokens `found` were found, when it first computes up to
        `first` and `last` are to be reserved."""
        return self.needed(found, last)

    def fits(self, prompt: int, tokens: int, room: int) -> bool:
        """Whether a request of `prompt` prompt tokens can come to hold `tokens` tokens in `room` blocks."""
        return self.blocks(tokens) <= room

    def watch(self, decodes: WindowDecodes) -> None:
        """These are the requests whose windows slide while they decode."""

    def slide(self, request: Request, tokens: int) -> None:
        """`request` gives back what is passed once `tokens` of its tokens are computed; here, nothing."""

    def slide_all(self, decodes: WindowDecodes) -> None:
        """All decodes of the step that is being planned give back what their windows have passed."""
        self.free += decodes.given_back(decodes.step)

    def untouched(self) -> int:
        """How many blocks can be taken before the request just looked up, which did not fit, may do so for that."""
        return NEVER

    def lookup(self, request: Request) -> tuple[int, int]:
        """What a waiting request would find: tokens, in full blocks, and how many of these blocks count as free."""
        return _NOTHING

    def claim(self, request: Request) -> None:
        """Give `request` the blocks that the lookup just made has found for it."""

    def grow(self, request: Request, before: int, after: int) -> None:
        """A prompt, of which `before` tokens have their blocks, gets those for `after` tokens."""
        size = self.block_size
        self.free -= -(-after // size) + (-before // size)

    def decode(self, decodes: Decodes, step: int, steps: int) -> None:
        """Those that decode get the blocks of `steps` steps from `step` on."""
        self.free -= decodes.demand_over(step, steps)

    def hold(self, request: Request, before: int, after: int) -> None:
        """As `grow`, but what the blocks hold comes later."""
        self.grow(request, before, after)

    def filled(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a prompt are in the blocks that it has."""

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """Take back the blocks of `tokens` tokens. A cache keeps the full ones among the first `kept` tokens; `again`:
        the request will look for them."""
        self.free -= -tokens // self.block_size

    def preempt(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """As `release`, of a request that has lost its place."""
        self.release(request, tokens, kept, again)

    def keep(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a running request have been computed."""

    def longest_first(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Waiting requests, by how much of them is found."""
        return waiting

    def make_room(self, blocks: int) -> None:
        """Whoever takes blocks from `free` asks for `blocks` blocks: see `sim.radixcache`."""


class Reserved(KVCache):
    """Blocks are taken at admission, for as many tokens as the policy says (`Request.reserved_tokens`)."""

    __slots__ = ()

    def grow(self, request: Request, before: int, after: int) -> None:
        """A request that is admitted gets all its blocks at once."""
        if before == 0:
            self.free -= self.blocks(request.reserved_tokens)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """Take back what was reserved, and what decoding has taken beyond it."""
        self.free += self.blocks(max(tokens, request.reserved_tokens))


class ReservedToTheEnd(Reserved):
    """As much is reserved as a request can ever need."""

    __slots__ = ()

    grows = False
