"""Requests that load a part of their KV from tiers (`sim.offload`), and those that wait for what another one loads.

As vLLM's scheduler does with a connector that loads asynchronously (`WAITING_FOR_REMOTE_KVS`, 0.24): a request gets the
blocks for what it loads when its turn comes, and a place once that has come; who would load the same meanwhile waits,
and looks again then. Where steps wait for loads, it has its place at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from sim.offload import Loaded, TieredCache

if TYPE_CHECKING:
    from sim.batch import Batch
    from sim.request import Request
    from sim.state import State
    from sim.steplog import Log


def tiered(state: State) -> TieredCache:
    """Its KV cache, which has tiers."""
    return cast(TieredCache, state.kv)


def known_to(state: State, found: int) -> int:
    """How many tokens of the head of the queue would be known with what tiers have beyond those `found`."""
    return tiered(state).beyond(state.waiting[0], found)


def planned(state: State, batch: Batch, log: Log, replica: int) -> Iterator[tuple[Request, float]]:
    """A plan was made: what it computes is offered to tiers, what it loads is on its way. Yields who waits for what it
    loads, and until when."""
    cache = tiered(state)
    cache.planned(batch.chunks)
    cache.now_s = begin = cache.begin_s
    for request, rows in batch.loads:
        for row in rows:
            log.load(request.id, replica, row.tier, row.tokens, begin, row.end_s)
        if request in state.loading:
            yield request, max(row.end_s for row in rows)


def load_or_wait(state: State, batch: Batch, found: int, known: int, free: int, whole: bool) -> bool:
    """The head of the queue begins to load what lies between `found` and `known`, if `free` blocks are enough beside
    those that prompts still need, and for the `whole` of its own; or waits for who loads a part of that. False: it does
    neither."""
    request, needed = state.waiting[0], state.kv.needed
    if (other := tiered(state).awaited(request, found, known)) is not None:
        wait_for(state, batch, other)
        return True
    if whole and needed(found, request.target) > free:
        return False
    if needed(found, known) > free - reserved(state):
        batch.most_steps = 1  # with less to load, or nothing, it might be admitted
        return False
    load(state, batch, found, known)
    return True


def load(state: State, batch: Batch, found: int, known: int) -> None:
    """The head of the queue gets the blocks for `known` tokens, of which the lookup just made has `found` some; the
    others begin to come."""
    request = state.waiting.popleft()
    if found:
        state.kv.claim(request)
    state.kv.hold(request, found, known)
    begins(state, batch, request, found, known)
    request.computed = min(known, request.target - 1)
    request.arriving = known
    request.ticket = state.tickets
    state.tickets += 1
    state.pulling[request] = state.loading[request] = None


def begins(state: State, batch: Batch, request: Request, found: int, known: int) -> None:
    """A request gets its first blocks, and loads what lies between `found` and `known`, if anything."""
    cache = tiered(state)
    request.awaited = False
    cache.admitted(request)
    if known > found:
        batch.loads.append((request, cache.load(request, found, known)))
        if not request.preemptions:
            request.cached_tokens = min(known, request.target - 1)


def wait_for(state: State, batch: Batch, other: Request) -> None:
    """The head of the queue waits for what `other` loads. It keeps its place among those who did so."""
    request = state.waiting.popleft()
    if not request.awaited:
        request.awaited = True
        request.ticket = state.tickets
        state.tickets += 1
    state.pulling[request] = None
    state.awaiting.setdefault(other, []).append(request)
    batch.loads.append((request, [Loaded(-1, 0, tiered(state).comes_s(other))]))


def has_loaded(state: State, request: Request) -> None:
    """What it loads is there, of which others may have waited for a part."""
    tiered(state).arrived(request)
    if request.over:
        del state.loading[request]
    for other in state.awaiting.pop(request, ()):
        del state.pulling[other]
        if not other.over:
            state.enqueue(other)


def reserved(state: State) -> int:
    """Blocks that prompts which run or load still need."""
    needed = state.kv.needed
    running = sum(needed(request.computed, request.target) for request in state.prefilling.values())
    return running + sum(needed(request.arriving, request.target) for request in state.loading)
