"""Runs SGLang's own sources, when they are at hand, without a GPU and without torch.

`SERVECAST_SGLANG_SOURCES` names a folder with `0.5.9/sglang`, an unpacked wheel. Real: `RadixCache` with its eviction,
`evict_from_tree_cache`, `SchedulePolicy` and `PrefillAdder`. Ours: every other module (a stub), tensors (numpy's), the
table of who has which pages, and the list of the available ones.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

SRT = Path(os.environ.get("SERVECAST_SGLANG_SOURCES", "nowhere")) / "0.5.9/sglang/srt"


class Stub(ModuleType):
    """A module of which every name is a class of nothing, but for the few that are called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        called = {"get_bool_env_var": lambda *_: False, "is_nsa_prefill_cp_in_seq_split": lambda: False,
                  "jit": lambda function: function}  # fmt: skip
        return called.get(name, type(name, (), {}))


class Tensor(np.ndarray):
    """Enough of torch's."""

    def clone(self):
        return self.copy()

    def to(self, dtype, copy):
        return self.astype(dtype, copy=copy)


def tensor(values, dtype=np.int64, device=None):
    return np.asarray(values, dtype).view(Tensor)


def torch():
    made = Stub("torch")
    made.int64, made.bool, made.tensor, made.device = np.int64, np.bool_, tensor, str
    made.empty = lambda shape, dtype, device=None: np.empty(shape, dtype).view(Tensor)
    made.cat = lambda values: np.concatenate(values).view(Tensor)
    return made


def load(path, **real):
    """The module `path` under srt/; what it imports is stubbed, but for the `real` modules, by their last names."""
    file = SRT / path
    source = file.read_text("utf-8")
    words = [line.split() for line in source.splitlines() if line.startswith(("from sglang", "import t"))]
    names = [word[1] for word in words if word[1].partition(".")[0] in ("sglang", "torch", "triton")]
    before = {name: sys.modules.get(name) for name in (*names, file.stem)}
    module = ModuleType(file.stem)
    try:
        for name in names:
            sys.modules[name] = torch() if name == "torch" else real.get(name.rpartition(".")[2]) or Stub(name)
        sys.modules[file.stem] = module
        exec(compile(source, str(file), "exec"), module.__dict__)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module


class Sources:
    """SGLang's modules, each with those that it needs. Their clock says a later time whenever it is asked."""

    def __init__(self):
        base, strategies = load("mem_cache/base_prefix_cache.py"), load("mem_cache/evict_policy.py")
        params = load("mem_cache/cache_init_params.py")
        self.cache = load(
            "mem_cache/radix_cache.py", base_prefix_cache=base, evict_policy=strategies, cache_init_params=params
        )
        self.cache.time = SimpleNamespace(monotonic=count().__next__, perf_counter=lambda: 0.0)
        self.common = load("mem_cache/common.py", base_prefix_cache=base)
        self.policy = load("managers/schedule_policy.py", base_prefix_cache=base, radix_cache=self.cache)


class Pages:
    """Which pages are available, and the row of each running request with the places of its tokens."""

    device = "cpu"

    def __init__(self, total, size):
        self.size, self.available, self.rows = size, list(range(total)), {}
        self.req_to_token = self

    def available_size(self):
        return len(self.available) * self.size

    def free(self, places):
        pages = np.unique(places // self.size).tolist()
        assert not set(pages) & set(self.available)
        self.available += pages

    def __getitem__(self, at):
        row, part = at
        return self.rows[row][part]

    def write(self, at, places):
        row, part = at
        self.rows[row][part] = places

    def extend(self, row, tokens):
        """The row gets pages for so many tokens in all."""
        while len(self.rows[row]) < tokens:
            page = self.available.pop()
            self.rows[row] = tensor([*self.rows[row], *range(page * self.size, (page + 1) * self.size)])


class Tree:
    """SGLang's RadixCache in the place of `tests.sim.oracle.radix.Radix`."""

    def __init__(self, sources, num_blocks, size):
        self.sources, self.size, self.total = sources, size, num_blocks - 1
        self.pages = Pages(self.total, size)
        self.reqs, self.asked = {}, []
        params = sources.cache.CacheInitParams(False, self.pages, self.pages, size)
        self.cache = sources.cache.RadixCache(params)
        self.cache.is_chunk_cache = lambda: False
        self.cache.update_eviction_metrics = self.count
        self.evicted = 0

    def count(self, tokens, start_s):
        self.evicted += tokens

    @property
    def free(self):
        return (self.pages.available_size() + self.cache.evictable_size()) // self.size

    @property
    def used(self):
        return self.total - self.free

    def find(self, r):
        key = self.sources.cache.RadixKey(r.tokens()[:-1])
        self.found = self.cache.match_prefix(self.sources.cache.MatchPrefixParams(key=key))
        return self.found.device_indices[:: self.size]

    def idle(self, r, n):
        last = self.found.last_device_node
        delta = self.cache.inc_lock_ref(last)
        self.cache.dec_lock_ref(last)
        return -delta // self.size

    def hold(self, r, n):
        places, last = self.found.device_indices, self.found.last_device_node
        self.cache.inc_lock_ref(last)
        self.pages.rows[r.id] = places
        self.reqs[r] = SimpleNamespace(
            req_pool_idx=r.id, extra_key=None, cache_protected_len=len(places), last_node=last, prefix_indices=places,
            pop_committed_kv_cache=lambda: r.computed, output_ids=[],
        )  # fmt: skip

    def take(self, r):
        self.asked.append(r)

    def register(self, r, tokens):
        pass

    def slide(self, r):
        pass

    def allocate(self, pages):
        self.make_room(pages)
        for r in self.asked:
            self.pages.extend(r.id, r.computed)
        self.asked = []

    def make_room(self, pages):
        self.sources.common.evict_from_tree_cache(self.cache, pages * self.size)

    def keep(self, r, tokens):
        self.reqs[r].fill_ids = r.tokens()[:tokens]
        self.cache.cache_unfinished_req(self.reqs[r])

    def give_back(self, r, is_insert=True):
        if r in self.reqs:
            req = self.reqs.pop(r)
            req.origin_input_ids = r.tokens()[: r.computed]
            self.cache.cache_finished_req(req, is_insert=is_insert)
            del self.pages.rows[r.id]

    def preempt(self, r):
        self.give_back(r, is_insert=False)

    def longest_first(self, waiting):
        """As `lpm` sorts the queue."""
        policy = self.sources.policy.SchedulePolicy("lpm", self.cache, False, False, False)
        queue = [SimpleNamespace(rid=r.id, r=r, origin_input_ids=r.tokens(), output_ids=[], extra_key=None)
                 for r in waiting]  # fmt: skip
        policy.calc_priority(queue)
        return [each.r for each in queue]
