"""What two plans are compared by, ours and an engine's, and what it likely means when they differ."""

from __future__ import annotations

from typing import NamedTuple

from servecast.conformance.plans import Chunk, Plan, Record
from sim.batch import Batch
from sim.state import State

NAMES = {
    "chunks": "prefill chunks", "decodes": "decodes", "kv_tokens": "KV tokens", "running": "running requests",
    "waiting": "waiting requests", "free_blocks": "free KV blocks", "preempted": "preemptions",
}  # fmt: skip


class Composition(NamedTuple):
    """What a plan is compared by. A recomputed last token of a sequence counts as a decode."""

    chunks: tuple[Chunk, ...]
    decodes: int
    kv_tokens: int
    running: int
    waiting: int
    free_blocks: int
    preempted: tuple[int, ...] | None

    def differs_in(self, other: Composition) -> tuple[str, ...]:
        """Names of the parts that are not the same."""
        return tuple(name for name in NAMES if getattr(self, name) != getattr(other, name))

    @property
    def tokens(self) -> int:
        """New tokens of all its requests."""
        return self.decodes + sum(tokens for _, tokens, _ in self.chunks)

    def said(self, name: str) -> str:
        """A part of it for a person."""
        value = getattr(self, name)
        if name == "chunks":
            words = [f"{tokens}@{cached}" for _, tokens, cached in value[:4]]
            return " ".join(words + ["..."] * (len(value) > 4)) or "none"
        return " ".join(map(str, value)) or "none" if name == "preempted" else f"{value:,}"


def composed(record: Record, batch: Batch, state: State) -> Composition:
    """What we planned; whose the chunks are is said if the record says it."""
    single = [c for r, q, c in batch.chunks if q == 1 and c >= r.prompt_tokens]
    return Composition(
        tuple((r.id if record.named else None, q, c) for r, q, c in batch.chunks if q > 1 or c < r.prompt_tokens),
        batch.decodes + len(single),
        batch.kv_tokens * (batch.decodes > 0) + sum(single),
        len(state.running),
        len(state.waiting) + sum(r.over for r in batch.preempted),  # it leaves the queue once its end is known
        state.kv.free,
        tuple(sorted(r.id for r in batch.preempted)),
    )


def recorded(record: Record, plan: Plan) -> Composition:
    """What the engine planned."""

    def single(chunk: Chunk) -> bool:
        index, tokens, cached = chunk
        return index is not None and tokens == 1 and cached >= record.requests[index]["prompt_tokens"]

    alone = [cached for _, _, cached in filter(single, plan.chunks)]
    return Composition(
        tuple(chunk for chunk in plan.chunks if not single(chunk)),
        plan.decodes + len(alone),
        plan.kv_tokens + sum(alone),
        plan.running,
        plan.waiting,
        plan.free_blocks,
        None if plan.preempted is None else tuple(sorted(plan.preempted)),
    )


def reason(record: Record, plan: Plan, ours: Composition, theirs: Composition, blocks: bool) -> str:
    """The likeliest reason why they differ, in words; `blocks`: free blocks can be compared."""
    fields = ours.differs_in(theirs)
    kinds = {k for index, _, _ in plan.chunks if index is not None for k in record.requests[index]["kinds"].split()}
    if plan.prefix_hits:
        return f"{plan.prefix_hits:,} tokens came from the prefix cache; the record does not say what prompts share"
    if not blocks and any(cached for _, _, cached in set(theirs.chunks) - set(ours.chunks)):
        return "a prompt may have been found in the prefix cache; the record does not say what prompts share"
    if fields == ("free_blocks",):
        return "blocks are counted otherwise: another num_gpu_blocks or block_size, or layers with a pool of their own"
    if kinds:
        return f"it computes requests with {', '.join(sorted(kinds))}, which the model does not tell apart"
    if "preempted" in fields:
        return "it had more or fewer free blocks than the model when a request needed one"
    if theirs.tokens > ours.tokens:
        return "it takes more into a step: a larger max_num_batched_tokens or max_num_seqs, or another threshold"
    if theirs.tokens < ours.tokens:
        return "it takes less into a step: a smaller max_num_batched_tokens or max_num_seqs, or a threshold"
    return "no option explains it; is the preset that of the engine's version?"
