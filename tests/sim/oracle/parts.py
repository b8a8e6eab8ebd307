"""What the naive engine is made of: numbered KV blocks, requests that know every token, steps that were run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf


class Blocks:
    """Physical blocks: the queue of free ones, who holds each, and what the registered ones hold, all before included.

    `caching` False: nothing is registered. `blank_first`: given back unregistered, they go to the front of the queue.
    Requests hold a list of blocks for each of their layers' `tables`; None is a block that was passed by its window.
    """

    def __init__(self, num_blocks, size, caching, blank_first, tables):
        self.size, self.caching, self.blank_first = size, caching, blank_first
        self.kinds = [None] * tables.full + [w for w in tables.windows for _ in range(w.tables)]
        self.late = tables.late
        self.queue = deque(range(1, num_blocks))
        self.holders = [0] * num_blocks
        self.content = [None] * num_blocks
        self.order = []  # registered blocks, the first to be registered first

    @property
    def total(self):
        return len(self.holders) - 1

    @property
    def free(self):
        return len(self.queue)

    @property
    def used(self):
        return self.total - self.free

    def find(self, r):
        """The blocks of the longest known beginning of what `r` has to compute, less its last token."""
        found = []
        while self.caching and (len(found) + 1) * self.size < r.prompt + r.out:
            content = tuple(r.tokens()[: (len(found) + 1) * self.size])
            block = next((b for b in self.order if self.content[b] == content), None)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, found):
        """How many of the blocks that were found nobody holds."""
        return sum(not self.holders[b] for b in found)

    def hold(self, r, found):
        for b in found:
            if not self.holders[b]:
                self.queue.remove(b)
            self.holders[b] += 1
        r.tables = [list(found), *([] for _ in self.kinds[1:])]

    def slide(self, r):
        """`r` gives back what none of its windows reaches any more."""
        computed = r.computed - (r.in_flight if self.late else 0)
        for window, blocks in zip(self.kinds, r.tables, strict=True):
            if window is not None and window.chunked:
                unread = computed // window.size * window.size
            else:
                unread = 0 if window is None else computed - window.size + 1
            for i in range(max(unread, 0) // self.size):
                if blocks[i] is not None:
                    self.drop([blocks[i]])
                    blocks[i] = None

    def need(self, r, tokens):
        """How many blocks `r` lacks to compute up to `tokens` tokens."""
        return sum(max(0, -(-tokens // self.size) - len(blocks)) for blocks in r.tables)

    def take(self, r):
        """As many new blocks as `r` needs for what is computed with this step, or reserved."""
        for blocks in r.tables:
            while len(blocks) * self.size < max(r.computed, r.reserved):
                b = self.queue.popleft()
                if self.content[b] is not None:
                    self.content[b] = None
                    self.order.remove(b)
                self.holders[b] = 1
                blocks.append(b)

    def register(self, r, tokens):
        for i in range(tokens // self.size if self.caching else 0):
            b = r.tables[0][i]
            if self.content[b] is None:
                self.content[b] = tuple(r.tokens()[: (i + 1) * self.size])
                self.order.append(b)

    def keep(self, r, tokens):
        """The first `tokens` tokens of `r` have been computed: registered they are."""

    def allocate(self, pages):
        """They have been taken."""

    make_room = allocate

    def preempt(self, r):
        self.give_back(r)

    def give_back(self, r):
        for blocks in r.tables:
            self.drop([b for b in reversed(blocks) if b is not None])
        r.tables = []

    def drop(self, blocks):
        blank = []
        for b in blocks:
            self.holders[b] -= 1
            if not self.holders[b]:
                (blank if self.blank_first and self.content[b] is None else self.queue).append(b)
        self.queue.extendleft(reversed(blank))


@dataclass(eq=False)
class Naive:
    id: int
    arrival_s: float
    prompt: int
    output: int
    cap: int
    patience_s: float = inf
    priority: int = 0
    entered_s: float = 0.0
    computed: int = 0
    reserved: int = 0  # tokens for which it has blocks from its admission on
    out: int = 0  # output tokens delivered
    placeholders: int = 0  # output tokens in flight
    preemptions: int = 0
    scheduled_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    decoding: bool = False
    done: bool = False
    cancelled_s: float | None = None
    begins: list[object] = field(default_factory=list)  # tokens that its prompt begins with; the others are its own
    tables: list[list[int | None]] = field(default_factory=list)  # of blocks
    in_flight: int = 0  # tokens of steps that are not over
    cached: int | None = None  # tokens found when it was first admitted

    def tokens(self):
        """All that are known: what the prompt begins with, then its own."""
        return [*self.begins, *((self.id, i) for i in range(len(self.begins), self.prompt + self.out))]

    @property
    def rank(self):
        return self.priority, self.arrival_s, self.id

    @property
    def gives_up_s(self):
        return self.arrival_s + self.patience_s


@dataclass
class NaiveStep:
    start_s: float
    end_s: float
    chunks: list[tuple[int, int, int]]
    decodes: int
    kv_tokens: int
    seen: tuple[int, ...]  # of these, what the layers of each window read
    used: int  # blocks, once it was planned and what ended before it has been given back
