"""SGLang's radix cache as it is: nodes with the tokens and the numbers of their pages, looked at one by one."""

from __future__ import annotations

from itertools import count

from sim import radixcache


class Node:
    def __init__(self, parent, key, pages, used):
        self.parent, self.key, self.pages, self.used, self.children = parent, key, pages, used, []

    @property
    def way(self):
        """The nodes from the root's child to this one."""
        return [] if self.parent is None else [*self.parent.way, self]


class Radix:
    """As `tests.sim.oracle.parts.Blocks`. A node's key is a list of pages, each a tuple of tokens."""

    def __init__(self, num_blocks, size):
        self.size, self.total, self.clock = size, num_blocks - 1, count(1)
        self.available = list(range(self.total))
        self.root = Node(None, [], [], 0)
        self.last = {}  # running request -> the last node that it locks
        self.asked = []  # requests that have yet to get their pages for this step

    @property
    def nodes(self):
        found, todo = [], [self.root]
        while todo:
            todo += (node := todo.pop()).children
            found.append(node)
        return found[1:]

    @property
    def locked(self):
        return {node for last in self.last.values() for node in last.way}

    @property
    def free(self):
        locked = self.locked
        return len(self.available) + sum(len(node.pages) for node in self.nodes if node not in locked)

    @property
    def used(self):
        return self.total - self.free

    def key(self, r, tokens):
        """The full pages of the first `tokens` tokens of `r`."""
        known = [*r.begins, *((r.id, i) for i in range(len(r.begins), tokens))]
        return [tuple(known[i : i + self.size]) for i in range(0, tokens // self.size * self.size, self.size)]

    def match(self, key):
        """The node at the end of what is found of `key`, split off if it must be."""
        node, now = self.root, next(self.clock)
        while key and (child := next((c for c in node.children if c.key[0] == key[0]), None)):
            child.used = now
            n = next((i for i, (a, b) in enumerate(zip(child.key, key, strict=False)) if a != b), None)
            n = min(len(child.key), len(key)) if n is None else n
            if n < len(child.key):
                new = Node(node, child.key[:n], child.pages[:n], next(self.clock))
                node.children[node.children.index(child)] = new
                child.parent, child.key, child.pages, new.children = new, child.key[n:], child.pages[n:], [child]
                child = new
            node, key = child, key[n:]
        return node

    def pages(self, node):
        return [page for each in node.way for page in each.pages]

    def insert(self, r, tokens):
        """Pages of `r` join the tree, but for those that it has, which are available again."""
        key = self.key(r, tokens)
        node = self.match(key)
        there = len(self.pages(node))
        self.available += r.tables[0][len(self.pages(self.last[r])) : there]
        if there < len(key):
            leaf = Node(node, key[there:], r.tables[0][there : len(key)], next(self.clock))
            node.children.append(leaf)
        return key

    def find(self, r):
        self.found = self.match(self.key(r, r.prompt + r.out - 1))
        return self.pages(self.found)

    def idle(self, r, n):
        return n - sum(len(node.pages) for node in self.found.way if node in self.locked)

    def hold(self, r, n):
        self.last[r] = self.found if n else self.root
        r.tables = [list(self.pages(self.found))[:n]]

    def take(self, r):
        self.asked.append(r)

    def register(self, r, tokens):
        pass

    def allocate(self, pages):
        """Everybody who asked gets what he lacks, after room has been made for `pages` pages."""
        self.make_room(pages)
        for r in self.asked:
            while len(r.tables[0]) * self.size < r.computed:
                r.tables[0].append(self.available.pop())
        self.asked = []

    def make_room(self, pages):
        """If not so many pages are available, evict so many: leaf by leaf, the longest not used first."""
        if len(self.available) >= pages:
            return
        while pages > 0:
            locked = self.locked
            leaves = [node for node in self.nodes if not node.children and node not in locked]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.used)
            leaf.parent.children.remove(leaf)
            self.available += leaf.pages
            pages -= len(leaf.pages)

    def keep(self, r, tokens):
        """The first `tokens` tokens of `r`, which goes on, are there for others."""
        key = self.insert(r, tokens)
        self.last[r] = node = self.match(key)
        r.tables[0][: len(key)] = self.pages(node)

    def give_back(self, r):
        if r.tables:
            key = self.insert(r, r.computed)
            self.available += r.tables[0][len(key) :]
            del self.last[r]
            r.tables = []

    def preempt(self, r):
        self.available += r.tables[0][len(self.pages(self.last.pop(r))) :]
        r.tables = []

    def slide(self, r):
        pass

    def longest_first(self, waiting):
        """Who finds most goes first; of those that find little and begin alike all but the first go last."""
        finds, ahead = {}, []
        for r in waiting:
            finds[r] = -len(self.pages(self.match(self.key(r, r.prompt + r.out)))) * self.size
            if -finds[r] <= radixcache.UNKNOWN:
                if max([in_common(r.tokens(), each) for each in ahead], default=0) >= radixcache.ALIKE:
                    finds[r] = float("inf")
                else:
                    ahead.append(r.tokens())
        return sorted(waiting, key=finds.__getitem__)


def in_common(a, b):
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
