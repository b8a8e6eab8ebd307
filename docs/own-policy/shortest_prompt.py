"""A scheduler policy of your own, to be read in ten minutes: the shortest waiting prompt goes first.

Run it: servecast run docs/own-policy/scenario.yaml. Every plan is checked; a mistake is named, with step and state.
"""

from sim.batch import Batch
from sim.schedulers import Scheduler
from sim.state import State


class ShortestPrompt(Scheduler):
    # The engine's options that you ask for by name are given to you (and those with a default are yours).
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, patience: int = 50) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.patience = patience  # so many admissions may pass by the one at the head of the queue
        self.passed = 0

    # Called before every engine step, in each replica for a policy of its own, so that `self` may remember things.
    # `state` has the queue (`waiting`), who runs (`running`, of whom `prefilling` have an incomplete prompt), the
    # requests that decode, as sums only (`decodes`), and the KV cache (`kv`). A request shows prompt_tokens and
    # max_tokens, the client's cap; how long its answer will be, nobody knows.
    def plan(self, state: State) -> Batch:
        batch, kv, decodes = Batch(), state.kv, state.decodes

        # 1. Everybody who decodes gets a token, and the block that it may need. Who came last goes back to the queue,
        #    to be computed again, while there are too few blocks.
        while decodes.demand(decodes.step) > kv.free:
            state.preempt(batch, state.running[next(reversed(state.running))])
        kv.free -= decodes.demand(decodes.step)
        batch.decodes, batch.kv_tokens = decodes.count, decodes.kv_tokens
        budget = self.max_num_batched_tokens - decodes.count

        # 2. Prompts under way go on. `state.prefill` takes their blocks.
        for request in list(state.prefilling.values()):
            tokens = min(request.target - request.computed, budget, kv.free * kv.block_size)
            if tokens > 0:
                state.prefill(batch, request, tokens)
                budget -= tokens

        # 3. The shortest prompt of those that wait, unless the first has let too many pass. `state.admit` takes the
        #    head of the queue, so we move our choice there.
        while state.waiting and not batch.preempted and budget > 0 and len(state.running) < self.max_num_seqs:
            first = state.waiting[0]
            chosen = first if self.passed >= self.patience else min(state.waiting, key=lambda r: r.target)
            if kv.blocks(chosen.target) > kv.free:
                break
            self.passed = 0 if chosen is first else self.passed + 1
            state.waiting.remove(chosen)
            state.waiting.appendleft(chosen)
            tokens = min(chosen.target, budget)
            state.admit(batch, tokens)
            budget -= tokens
        return batch
