"""A policy that is watched: each of its plans is checked before anything comes of it. For policies that users write."""

from __future__ import annotations

import traceback

from servecast.errors import ServecastError
from sim.batch import Batch
from sim.kvcache import KVCache
from sim.schedulers.policy import Scheduler
from sim.state import State


class Audited(Scheduler):
    """Plans as `policy` does, which the user calls `name`, of at most `max_tokens` tokens and `max_seqs` requests.

    Raises ServecastError with the step, what was planned, and the state, for a plan that is over a limit, holds a
    request twice or one that does not run, or does not take the blocks that its requests need; and for any exception.
    Whether the blocks are right costs a look at every running request, so it is asked of a plain paged cache only.
    """

    def __init__(self, policy: Scheduler, name: str, max_tokens: int, max_seqs: int) -> None:
        self._policy, self._name = policy, name
        self._max_tokens, self._max_seqs = max_tokens, max_seqs
        self.cache, self.reserves, self.overruns = policy.cache, policy.reserves, policy.overruns
        self.longest_prompt = policy.longest_prompt

    def __str__(self) -> str:
        return self._name

    @property
    def by_priority(self) -> bool:
        """As the policy has it."""
        return self._policy.by_priority

    def room(self, kv: KVCache) -> int:
        """As the policy has it."""
        return self._policy.room(kv)

    def arrival_matters(self, state: State) -> bool:
        """As the policy has it."""
        return self._policy.arrival_matters(state)

    def plan(self, state: State) -> Batch:
        """The policy's plan, if nothing is wrong with it."""
        try:
            batch = self._policy.plan(state)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ServecastError(
                f"{self._name}.plan failed in step {state.step}: {type(error).__name__}: {error} "
                f"({last.filename}:{last.lineno}); {_seen(state)}"
            ) from error
        if not isinstance(batch, Batch):
            raise ServecastError(f"{self._name}.plan gave {batch!r}; expected a sim.state.Batch")
        if problems := self._problems(state, batch):
            raise ServecastError(
                *(f"{self._name}.plan, step {state.step}: {problem}; {_seen(state)}" for problem in problems)
            )
        return batch

    def _problems(self, state: State, batch: Batch) -> list[str]:
        kv, decodes, problems = state.kv, state.decodes, []
        tokens = batch.decodes + sum(n for _, n, _ in batch.chunks)
        if tokens > self._max_tokens:
            problems.append(f"{tokens} tokens in a step that may have {self._max_tokens}")
        if len(state.running) > self._max_seqs:
            problems.append(f"{len(state.running)} running requests, of which there may be {self._max_seqs}")
        seen = set()
        for request, n, _ in batch.chunks:
            if request in seen:
                problems.append(f"{request} is planned twice")
            if request.decoding or n <= 0:
                problems.append(f"{request} has a chunk of {n} tokens{', but it decodes' * request.decoding}")
            if state.running.get(request.ticket) is not request:
                problems.append(f"{request} is planned but does not run, and owns no blocks")
            seen.add(request)
        if not batch.paused and batch.decodes != decodes.count - len(batch.skipped) + batch.padding:
            problems.append(
                f"{batch.decodes} decodes, but {decodes.count} requests decode and {len(batch.skipped)} are skipped; "
                "take state.decodes.count, or pause them all (batch.paused)"
            )
        elif not batch.paused and not batch.skipped and not batch.padding and batch.kv_tokens != decodes.kv_tokens:
            problems.append(f"decodes over {batch.kv_tokens} KV tokens; they have {decodes.kv_tokens}")
        if batch.paused and batch.decodes:
            problems.append(f"{batch.decodes} decodes in a step that pauses them all")
        if min(batch.most_steps, batch.spare_blocks + 1) < 1:
            problems.append("most_steps must be 1 or more, spare_blocks 0 or more")
        if kv.free < 0:
            problems.append(f"{-kv.free} more KV blocks than there are")
        elif type(kv) is KVCache and not problems and (used := kv.usable - kv.free) != (need := _need(state, batch)):
            problems.append(
                f"{used} KV blocks are taken, but the running requests need {need}: "
                + ("blocks are not given back" if used > need else "decodes take kv.free -= state.decodes.demand(step)")
            )
        return problems


def _need(state: State, batch: Batch) -> int:
    """Blocks of all that run, what the plan computes included."""
    left_out, step = set(batch.skipped), state.decodes.step
    total = 0
    for request in state.running.values():
        if request.decoding:
            late = request in left_out and not batch.empty
            total += state.kv.blocks(step + late + request.kv_offset + (not batch.paused and request not in left_out))
        else:
            total += state.kv.blocks(request.computed)
    return total


def _seen(state: State) -> str:
    """What there was to plan from."""
    kv = state.kv
    return (
        f"{len(state.waiting)} waiting, {len(state.running)} running ({len(state.prefilling)} in their prompt, "
        f"{state.decodes.count} decoding), {kv.free} of {kv.usable} KV blocks free"
    )
