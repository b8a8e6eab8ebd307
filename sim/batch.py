"""The batch of one engine step: what a policy plans, and what else would change its mind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.request import NEVER, Request

if TYPE_CHECKING:
    from sim.offload import Loaded


class Batch:
    """The work of one engine step.

    `chunks`: (request, new tokens, tokens already in KV) for each prefill chunk, in batch order. `decodes` sequences
    decode one token each, over `kv_tokens` tokens in KV before the step, and `drafts` drafted tokens besides.
    `paused`: none of those that decode are in it (their number is then 0 here). `skipped`: single decoding requests
    left out; `preempted`: requests that lost their KV to this plan; `pulls`: (request, tokens of it found in the
    cache) for those whose KV begins to come from elsewhere; `joins`: those whose KV has come and that decode from now
    on; `swapped_in`: those that have it back from the host; `copied_blocks`: KV blocks that went there or came back.
    `loads`: who loads a part of its KV from tiers, tier by tier, and who waits for such a load of another. `padding`:
    how many of the `decodes` compute for nobody; `padded`: how many of the chunks, of one token each, have `drafts`
    beside them that nobody made, so that a step without others is one of decodes. `seen`: of `kv_tokens`, those that
    the layers of each window read; empty for models without. An empty batch is no step: who is left out of it stays as
    he was.

    A batch that only decodes is run until something changes, so a policy says what else would change its mind: after
    how many steps it wants to plan again (`most_steps`), how many blocks it wants to see free (`spare_blocks`), or how
    many may be taken (`untouched_blocks`).
    """

    __slots__ = (
        "chunks",
        "copied_blocks",
        "decodes",
        "drafts",
        "joins",
        "kv_tokens",
        "loads",
        "most_steps",
        "padded",
        "padding",
        "paused",
        "preempted",
        "pulls",
        "seen",
        "skipped",
        "spare_blocks",
        "swapped_in",
        "untouched_blocks",
    )

    def __init__(self) -> None:
        self.chunks: list[tuple[Request, int, int]] = []
        self.decodes = 0
        self.drafts = 0
        self.kv_tokens = 0
        self.paused = False
        self.padded = 0
        self.padding = 0
        self.most_steps = NEVER
        self.spare_blocks = 0
        self.untouched_blocks = NEVER
        self.skipped: list[Request] = []
        self.preempted: list[Request] = []
        self.pulls: list[tuple[Request, int]] = []
        self.loads: list[tuple[Request, list[Loaded]]] = []
        self.joins: list[Request] = []
        self.swapped_in: list[Request] = []
        self.copied_blocks = 0
        self.seen: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing in it to compute."""
        return not (self.decodes or self.chunks)
