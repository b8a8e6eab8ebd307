"""What the layers of a model keep of a sequence, and how vLLM's block pool holds layers that keep different things.

A layer keeps the keys and values of every token ("full"), of a window ("window") or of the chunk that is being computed
("chunk"), or one state of fixed size ("state": Mamba, gated delta net). Layers that keep the same form a group with a
block table of its own, cut so that all groups have about as many layers; a block of the pool holds one group's layers.
Rules: `get_kv_cache_groups` of vllm/v1/core/kv_cache_utils.py, vllm/v1/kv_cache_interface.py and
`get_num_skipped_tokens` of vllm/v1/core/single_type_kv_cache_manager.py (v0.10.2, v0.15.1, v0.19.1, v0.24.0, v0.32.0).

It knows sizes and counts, nothing of requests, GPUs or what is left of their memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from calibrate.engine import EngineSpec
from calibrate.model import ModelSpec
from calibrate.options import family

Kind = Literal["full", "window", "chunk", "state"]
KINDS: tuple[Kind, Kind] = ("window", "chunk")
"""Of a model's windows: sliding ones, and chunked ones."""


NO_RULES = {"even_below": 1.5, "frees_chunks": True, "batches_in_flight": 1, "caps_admission": False,
            "caches_states": False, "keeps_ends": False}  # fmt: skip
"""Of engines of which no model with windows is simulated: all layers are alike, and the rules say nothing."""


@dataclass(frozen=True, slots=True)
class KVRules:
    """What differs between versions: groups take the larger of two layer counts where it is below `even_below` times
    the smaller; `frees_chunks`: chunked layers give old chunks back; `batches_in_flight`: batches whose tokens a window
    must hold beside itself when the engine schedules asynchronously; `caps_admission`: an admission reserves no more
    than a window can hold; `caches_states`: prefix caching is on by default where layers keep states; `keeps_ends`: a
    prefix cache keeps of a sliding window only what is read at the end of a prompt, and of what prompts share
    (`prefix_cache_retention_interval` 0, the default of vllm/config/cache.py)."""

    even_below: float
    frees_chunks: bool
    batches_in_flight: int
    caps_admission: bool
    caches_states: bool
    keeps_ends: bool

    @property
    def keeps_in_flight(self) -> bool:
        """What a window passes is given back when the step that read it is over, not when the next is planned."""
        return self.batches_in_flight > 1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """`layers` layers of one kind that share a block table, on one rank.

    A block holds `block_size` tokens of a sequence (all decode context parallel ranks together); `size` is the window
    or chunk in tokens, `states` the blocks that a sequence's states take.
    """

    kind: Kind
    layers: int
    block_size: int
    size: int = 0
    states: int = 0

    def skipped_tokens(self, computed: int) -> int:
        """The tokens, from the first on, that no later token attends to once `computed` tokens are."""
        if self.kind == "window":
            return max(0, computed - self.size + 1)
        return computed // self.size * self.size if self.kind == "chunk" else 0

    def held_blocks(self, computed: int, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens (of which `computed` are computed) holds after what it no longer
        needs has been freed: whole blocks, from the front."""
        if self.kind == "state":
            return self.states
        return -(-tokens // self.block_size) - self.skipped_tokens(computed) // self.block_size

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """The most blocks that a sequence of `tokens` tokens can hold, by vLLM's bound for its start-up check: with
        `in_flight` tokens scheduled at a time, a window that begins inside a block takes one more."""
        if self.kind == "state":
            return self.states
        if self.kind == "window":
            return -(-min(self.size - 1 + in_flight, tokens) // self.block_size) + 1
        held = min(self.size + in_flight, tokens) if self.kind == "chunk" else tokens
        return -(-held // self.block_size)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The pool of one rank: any group's blocks are `block_bytes`. `in_flight` tokens are scheduled at a time."""

    groups: tuple[KVGroup, ...]
    block_bytes: int
    in_flight: int

    @property
    def block_size(self) -> int:
        """Tokens of a block; of the group with the smallest."""
        return min(group.block_size for group in self.groups)

    def blocks(self, tokens: int) -> int:
        """The most blocks that one sequence of `tokens` tokens takes from the pool."""
        return sum(group.most_blocks(tokens, self.in_flight) for group in self.groups)

    def held_blocks(self, computed: int, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens holds once `computed` of them are computed."""
        return sum(group.held_blocks(computed, tokens) for group in self.groups)

    def longest(self, blocks: int, most: int) -> int:
        """The most tokens, up to `most`, of one sequence that `blocks` blocks hold; 0 where they hold none."""
        low, high = 0, most + 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks(middle) <= blocks else (low, middle)
        return low


def kv_rules(engine: EngineSpec) -> KVRules:
    """The rules of an engine preset (`kv_groups` in its catalogue file)."""
    return KVRules(**family(engine.engine)["presets"][engine.preset].get("kv_groups", NO_RULES))


def keeps_everything(model: ModelSpec, engine: EngineSpec) -> bool:
    """Whether all layers' blocks are kept as if they saw everything: without vLLM's hybrid KV cache manager, where some
    layers do see everything (`unify_hybrid_kv_cache_specs`)."""
    some = model.attention_layers > sum(window.layers for window in model.windows)
    return some and bool(engine.options.get("disable_hybrid_kv_cache_manager"))


def kv_pool(model: ModelSpec, engine: EngineSpec, tp: int = 1, dcp: int = 1, pp: int = 1) -> KVPool:
    """The groups that a served model's layers form on one of `tp` ranks; of `pp` stages the one with most layers.
    `dcp`: decode context parallel ranks, over which the tokens of a block are spread."""
    rules = kv_rules(engine)
    in_flight = engine.max_num_batched_tokens * (rules.batches_in_flight if engine.async_scheduling else 1)
    token_bytes = model.kv_layer_bytes(tp)
    block_size, states = engine.block_size, 0
    found: list[KVGroup] = []
    if recurrent := model.recurrent:
        # keys and values of a block fill at least what a state takes, which is padded to them: one size for all
        state = recurrent.bytes_on_rank(tp, model.dtype_bytes)
        block_size = engine.block_size * -(-state // (engine.block_size * token_bytes))
        asked = rules.caches_states or engine.sources["enable_prefix_caching"] == "user"
        states = 2 if engine.enable_prefix_caching and asked else 1  # the newest, and the last that others can find
        found.append(KVGroup("state", recurrent.layers, block_size, states=states))
    windowed = 0
    whole = keeps_everything(model, engine)
    for window in model.windows:
        if whole or (window.chunked and not rules.frees_chunks):
            continue
        found.append(KVGroup(KINDS[window.chunked], window.layers, block_size, window.size))
        windowed += window.layers
    if full := model.attention_layers - windowed:
        found.insert(0, KVGroup("full", full, block_size))
    groups = [part for group in found for part in _cut(group, _group_size(found, rules))]
    if pp > 1:
        groups = [replace(group, layers=-(-group.layers // pp)) for group in groups]
    page = block_size * token_bytes
    if dcp > 1:
        groups = [replace(group, block_size=group.block_size * dcp) for group in groups]
    return KVPool(tuple(groups), page * max(group.layers for group in groups), in_flight)


def _group_size(found: list[KVGroup], rules: KVRules) -> int:
    """Layers of a group: the fewest of any kind, or the most where that pads less."""
    counts = [group.layers for group in found]
    fewest, most = min(counts), max(counts)
    return most if most < fewest * rules.even_below else fewest


def _cut(group: KVGroup, size: int) -> list[KVGroup]:
    """The group in parts of at most `size` layers: every n-th layer to each of n parts."""
    parts = -(-group.layers // size)
    return [replace(group, layers=(group.layers - i + parts - 1) // parts) for i in range(parts)]
