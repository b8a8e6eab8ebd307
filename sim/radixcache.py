"""A KV cache that keeps what was computed in a radix tree, as SGLang does (`mem_cache/radix_cache.py`, 0.5.9).

A node holds the pages that follow those of its parent, as many as were put there at once; it is split where a prompt
leaves it. What a step has computed joins the tree when its result is known: a prompt, at its end all of a request; the
prompt that is cut when the next step is planned. Pages that the tree had by then are given back. A running request
locks the nodes that it computes upon. Who needs pages evicts whole leaves that nobody locks, the least recently used
first, and asks for all that a step takes, not only for what is missing.

A page is known by its content's number (`sim.prefixcache.Path`; negative: one request's own) and its place. `free` is
lowered by those who take pages, as in every cache; `make_room` evicts for them, after the fact but before the tree is
looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from sim.kvcache import KVCache
from sim.prefixcache import Path, own_content
from sim.request import NEVER

if TYPE_CHECKING:
    from sim.decodes import Decodes
    from sim.request import Request

UNKNOWN, ALIKE = 32, 32
"""Of waiting prompts of which at most so many tokens are cached, those that begin with so many tokens of one ahead of
them are put off (IN_BATCH_PREFIX_CACHING_*_THRESHOLD)."""


class Node:
    """Pages from the end of its `parent` to before `end`: its `parts` say of which content up to which page.

    `children` by the content of their first page; `locks`: running requests that hold it; `used`: when last, in looks
    at the tree; `queued`: it is in the heap of leaves.
    """

    __slots__ = ("children", "end", "locks", "parent", "parts", "queued", "used")

    def __init__(self, parent: Node | None, parts: list[tuple[int, int]], end: int, locks: int, used: int) -> None:
        self.parent: Node = parent or self
        self.parts = parts
        self.end = end
        self.locks = locks
        self.used = used
        self.children: dict[int, Node] = {}
        self.queued = False


class RadixCache(KVCache):
    """`num_blocks` pages, one of which is not used, of `block_size` tokens; `free` counts what can be evicted.

    `paths`: request id -> what its prompt begins with, ends in tokens; None where nobody knows.
    """

    __slots__ = ("_available", "_evictable", "_found", "_leaves", "_looks", "_paths", "_root")

    keeps_computed = True

    def __init__(self, num_blocks: int, block_size: int, paths: Callable[[int], Path] | None) -> None:
        super().__init__(num_blocks, block_size)
        self._paths = paths
        self._root = self._found = Node(None, [], 0, 1, 0)
        self._available = self.free  # pages that hold nothing
        self._evictable = 0  # pages of nodes that nobody locks
        self._leaves: list[tuple[int, int, Node]] = []  # a heap, by a time since which they may have been used
        self._looks = 0

    def lookup(self, request: Request) -> tuple[int, int]:
        """What a waiting request finds, its last token left out: tokens, and how many of their pages count as free."""
        node = self._found = self._match(request, (request.target - 1) // self.block_size)
        tokens, idle = node.end * self.block_size, 0
        while not node.locks:
            idle += node.end - node.parent.end
            node = node.parent
        return tokens, idle

    def claim(self, request: Request) -> None:
        """`request` locks what the lookup just made has found for it."""
        self._lock(request, self._found)

    def longest_first(self, waiting: Iterable[Request]) -> list[Request]:
        """Who finds most goes first; of those that find little but begin alike all but the first go last."""
        ahead: dict[int, int] = {}  # content -> how many tokens up to its end some prompt ahead begins with
        finds: dict[Request, float] = {}
        for request in waiting:
            tokens = self._match(request, request.target // self.block_size).end * self.block_size
            finds[request] = -tokens
            if tokens > UNKNOWN or self._paths is None:
                continue
            path, alike = self._paths(request.id), 0
            for content, end in path:
                if content not in ahead:
                    break
                alike = min(end, ahead[content])
            if alike >= ALIKE:
                finds[request] = inf
            else:
                for content, end in path:
                    ahead[content] = max(end, ahead.get(content, 0))
        return sorted(finds, key=finds.__getitem__)

    def keep(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a running request, its prompt so far, have been computed: others find them."""
        node = self._insert(request, tokens)
        self._lock(request, node)

    def release(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """All that a request has computed, `tokens` tokens, joins the tree; it locks nothing any more."""
        node = self._insert(request, tokens)
        self._give_back(self.blocks(tokens) - tokens // self.block_size)
        self._unlock(request)
        self._queue(node)

    def preempt(self, request: Request, tokens: int, kept: int, again: bool) -> None:
        """A request is retracted. What it has computed since its prompt is lost, its prompt stays in the tree."""
        self._give_back(self.blocks(tokens) - (request.node or self._root).end)
        self._unlock(request)

    def make_room(self, blocks: int) -> None:
        """Evict `blocks` pages if there were not as many before some were taken from `free`, and take those."""
        if self._available < blocks:
            self._evict(blocks)
        self._available = self.free - self._evictable

    def decode(self, decodes: Decodes, step: int, steps: int) -> None:
        """Take the pages of `steps` decode steps. Before each, it is seen to that there is one for every request."""
        count = decodes.count
        while steps:
            sure = min(steps, self._available // count)
            if sure:
                self.free -= decodes.demand_over(step, sure)
                self._available = self.free - self._evictable
            else:
                sure, need = 1, decodes.demand(step)
                self.make_room(need)
                self.free -= need
                self.make_room(count)
            step, steps = step + sure, steps - sure

    def _match(self, request: Request, pages: int) -> Node:
        """The node at the end of what the tree has of the first `pages` pages of a request; a part of one is split
        off."""
        if request.path is None:
            request.path = self._pages(request)
        path = iter(request.path)
        node, at, looked = self._root, 0, self._looks + 1
        self._looks = looked
        content, stop = next(path)
        while at < pages:
            child = node.children.get(content)
            if child is None:
                break
            child.used = looked
            for other, end in child.parts:
                if other != content:
                    break
                at = min(end, stop, pages)
                if at == stop:
                    content, stop = next(path)
                if at < end:
                    break
            if at < child.end:
                return self._split(child, at)
            node = child
        return node

    def _split(self, node: Node, at: int) -> Node:
        """A new node for the pages of `node` before `at`; the others stay where they were."""
        first = Node(node.parent, _parts(node.parts, node.parent.end, at), at, node.locks, node.used)
        node.parent.children[node.parts[0][0]] = first
        node.parts = _parts(node.parts, at, node.end)
        node.parent = first
        first.children[node.parts[0][0]] = node
        return first

    def _insert(self, request: Request, tokens: int) -> Node:
        """The tree gets the full pages of a request's first `tokens` tokens; those that it has come back."""
        pages = tokens // self.block_size
        node = self._match(request, pages)
        self._give_back(node.end - (request.node or self._root).end)
        more = pages - node.end
        if more:
            assert request.path is not None
            self._looks += 1  # a leaf is newer than what was cut from the branch
            leaf = Node(node, _parts(request.path, node.end, pages), pages, 0, self._looks)
            node.children[leaf.parts[0][0]] = node = leaf
            self._evictable += more
            self.free += more
        return node

    def _lock(self, request: Request, node: Node) -> None:
        """`request`, which locks the way to its last node, locks that to `node` from there."""
        held, request.node = request.node or self._root, node
        while node is not held:
            if not node.locks:
                pages = node.end - node.parent.end
                self._evictable -= pages
                self.free -= pages
            node.locks += 1
            node = node.parent

    def _unlock(self, request: Request) -> None:
        node, request.node = request.node or self._root, None
        while node is not self._root:
            node.locks -= 1
            if not node.locks:
                pages = node.end - node.parent.end
                self._evictable += pages
                self.free += pages
                self._queue(node)
            node = node.parent

    def _queue(self, node: Node) -> None:
        """`node` may be evicted from now on, if it is a leaf that nobody locks."""
        if not (node.queued or node.locks or node.children):
            node.queued = True
            heappush(self._leaves, (node.used, id(node), node))

    def _evict(self, pages: int) -> None:
        """Leaves that nobody locks are lost, until `pages` pages have become available."""
        leaves = self._leaves
        while pages > 0 and leaves:
            used, _, node = heappop(leaves)
            node.queued = False
            if node.used > used:
                self._queue(node)
            elif not node.locks and not node.children:
                parent = node.parent
                size = node.end - parent.end
                pages -= size
                self._evictable -= size
                self._available += size
                del parent.children[node.parts[0][0]]
                self._queue(parent)

    def _give_back(self, pages: int) -> None:
        self._available += pages
        self.free += pages

    def _pages(self, request: Request) -> list[tuple[int, int]]:
        """What a request holds by the page: what its prompt begins with, then its own."""
        parts, at = [], 0
        for content, tokens in () if self._paths is None else self._paths(request.id):
            end = tokens // self.block_size
            if end > at:
                parts.append((content, end))
                at = end
        return [*parts, (own_content(request), NEVER)]


def _parts(parts: Path, start: int, end: int) -> list[tuple[int, int]]:
    """The `parts` of the pages from `start` to before `end`."""
    cut = []
    for content, stop in parts:
        if stop > start:
            cut.append((content, min(stop, end)))
            if stop >= end:
                break
    return cut
