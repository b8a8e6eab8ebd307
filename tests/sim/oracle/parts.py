"""What the naive engine is made of: numbered KV blocks, requests that know every token, steps that were run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf


class Blocks:
    """Physical blocks: the queue of free ones, who holds each, and of which table and what tokens, from the first on, a
    registered one holds the last.

    `caching` False: nothing is registered. `blank_first`: given back unregistered, they go to the front of the queue.
    Requests hold a list of blocks for each of their layers' `tables`; None is a block that was passed by its window.
    """

    def __init__(self, num_blocks, size, caching, blank_first, tables):
        self.size, self.caching, self.blank_first = size, caching, blank_first
        self.kinds = [w for w in tables.windows for _ in range(w.tables)] + [None] * tables.full
        self.late, self.keeps_ends = tables.late, tables.keeps_ends
        self.drops_last = False  # the last block that is found is computed again all the same
        self.most = inf  # tokens of one request
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
        """The blocks of the longest known beginning of what `r` has to compute, less its last token: those of the first
        table, None where its window has passed. In all tables what the next token reads must be known."""
        most, oldest = (r.prompt + r.out - 1) // self.size if self.caching else 0, self.oldest()
        found = next(rows[0] for n in range(most, -1, -1) if (rows := self.known(r, n, oldest)) is not None)
        if self.drops_last:
            found = found[:-1]
        if None in self.kinds:
            most = next(n for n in range(most, -1, -1) if self.known(r, n, oldest, windows=False) is not None)
            r.junction = most if most > len(found) else 0
        return found

    def oldest(self):
        """Of equal registered blocks, the oldest."""
        return {self.content[b]: b for b in reversed(self.order)}

    def known(self, r, n, oldest, windows=True):
        """For each table the blocks that `r` needs of its first `n`; None if any is lost."""
        rows = []
        for table, window in enumerate(self.kinds):
            if window is not None and not windows:
                continue
            passed = unread(window, n * self.size) // self.size
            rows.append([None] * passed)
            for i in range(passed, n):
                b = oldest.get((table, r.name(i, self.size)))
                if b is None:
                    return None
                rows[-1].append(b)
        return rows

    def idle(self, r, n):
        """How many of the blocks that `r` finds for its first `n` are free, though not for others."""
        return sum(b is not None and not self.holders[b] for row in self.known(r, n, self.oldest()) for b in row)

    def hold(self, r, n):
        r.tables = self.known(r, n, self.oldest())
        for b in (b for row in r.tables for b in row if b is not None):
            if not self.holders[b]:
                self.queue.remove(b)
            self.holders[b] += 1

    def slide(self, r):
        """`r` gives back what none of its windows reaches any more."""
        computed = r.computed - (r.in_flight if self.late else 0)
        for window, blocks in zip(self.kinds, r.tables, strict=True):
            passed = [i for i in range(unread(window, computed) // self.size) if blocks[i] is not None]
            self.drop([blocks[i] for i in reversed(passed)])
            for i in passed:
                blocks[i] = None

    def need(self, r, tokens):
        """How many blocks `r` lacks to compute up to `tokens` tokens."""
        return sum(max(0, -(-tokens // self.size) - len(blocks)) for blocks in r.tables)

    def take(self, r):
        """As many new blocks as `r` needs for what is computed with this step, or reserved."""
        for blocks in r.tables:
            while len(blocks) * self.size < min(max(r.computed, r.reserved), self.most):
                b = self.queue.popleft()
                if self.content[b] is not None:
                    self.content[b] = None
                    self.order.remove(b)
                self.holders[b] = 1
                blocks.append(b)

    def register(self, r, tokens):
        for table, blocks in enumerate(r.tables if self.caching else ()):
            for i, b in enumerate(blocks[: tokens // self.size]):
                if b is not None and self.content[b] is None and self.kept(r, self.kinds[table], i):
                    self.content[b] = table, r.name(i, self.size)
                    self.order.append(b)

    def kept(self, r, window, i):
        """Whether others can find the `i`-th block of `r` in a table with that `window`."""
        if not self.keeps_ends or window is None or window.chunked:
            return True
        reads = -(-(window.size - 1) // self.size)
        return any(end - reads <= i < end for end in ((r.prompt - 1) // self.size, r.junction))

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


def unread(window, computed):
    """The tokens, from the first on, that nobody reads any more once `computed` are computed; `window` None: none."""
    if window is None:
        return 0
    return computed // window.size * window.size if window.chunked else max(0, computed - window.size + 1)


@dataclass(eq=False)
class Naive:
    id: int
    arrival_s: float
    prompt: int
    output: int
    cap: int
    patience_s: float = inf
    first_s: float = inf  # patience without a first token
    retries: int = 0
    backoff_s: float = 0.0
    network_s: float = 0.0
    tries: int = 0  # before this one
    hold_s: float | None = None  # for which its KV stays when it has ended, for `next_id`
    next_id: int = -1
    since_s: float | None = None  # when its client sent the first one, if not at once
    again: bool = False  # given up, and sent once more
    read: int = 0  # tokens computed in steps with prompts
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
    names: list[int] = field(default_factory=list)  # of its full blocks, each with all before it
    junction: int = 0  # blocks known to layers without windows when it was looked up last, if that was more than all
    cached: int | None = None  # tokens found when it was first admitted
    drafts: int = 0  # drafted tokens to be verified in its next step
    verified: int = 0  # steps that it has decoded in
    landed: int = 0  # tokens in KV that are known to be right

    def name(self, i, size):
        """Of what its `i`-th block and all before it hold."""
        while len(self.names) <= i:
            start = len(self.names) * size
            self.names.append(hash((*self.names[-1:], *self.tokens()[start : start + size])))
        return self.names[i]

    def tokens(self):
        """All that are known: what the prompt begins with, then its own."""
        return [*self.begins, *((self.id, self.tries, i) for i in range(len(self.begins), self.prompt + self.out))]

    @property
    def rank(self):
        return self.priority, self.arrival_s, self.id

    @property
    def gives_up_s(self):
        return self.arrival_s + min(self.patience_s, inf if self.token_s else self.first_s)

    def next_try(self):
        """What its client sends after this one was given up, or None."""
        if self.tries == self.retries:
            return None
        self.again = True
        since = self.arrival_s if self.since_s is None else self.since_s
        sent = self.gives_up_s + self.network_s / 2 + self.backoff_s * 2.0**self.tries
        names = (
            "patience_s",
            "first_s",
            "retries",
            "backoff_s",
            "network_s",
            "priority",
            "begins",
            "hold_s",
            "next_id",
        )
        mine = {name: getattr(self, name) for name in names}
        more = type(self)(self.id, sent + self.network_s / 2, self.prompt, self.output, self.cap, **mine)
        return replace(more, tries=self.tries + 1, since_s=since)


@dataclass
class NaiveStep:
    start_s: float
    end_s: float
    chunks: list[tuple[int, int, int]]
    decodes: int
    kv_tokens: int
    seen: tuple[int, ...]  # of these, what the layers of each window read
    used: int  # blocks, once it was planned and what ended before it has been given back
    drafts: int = 0
    out: int = 0  # tokens that it yields
