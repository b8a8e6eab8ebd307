"""One side of split serving in vLLM's own scheduler: the stage of `vllm_sources`, and a connector.

Real: what a scheduler does with a connector, and its `KVCacheManager`. Ours: the connector, which asks for what NIXL's
asks for (`kv_connector/v1/nixl_connector.py`, from 0.24 `nixl/pull_scheduler.py`) and whose transfers take as long as
the test says; and its worker, which looks which are over when a step is launched.
"""

from __future__ import annotations

from collections import deque

from sim.windows import ONE
from tests.sim.vllm_sources import ModelOutput, Status, VllmRequest

MOST_STEPS = 500
"""Requests may preempt each other for ever."""


class Connector:
    """`pull_s`: how long each request's prompt is on its way, None for those that read it themselves; `keep_s`: how
    long the blocks of each are kept once it is finished, None for those that are not."""

    def __init__(self, pull_s, keep_s):
        self.pull_s, self.keep_s, self.now = pull_s, keep_s, 0.0
        self.begun, self.running = set(), []

    def get_num_new_matched_tokens(self, request, computed):
        if self.pull_s[request.id] is None or request in self.begun:
            return 0, False
        return request.num_prompt_tokens - computed, True

    def update_state_after_alloc(self, request, blocks, external):
        if external:
            self.begun.add(request)
            self.running.append((self.now + self.pull_s[request.id], request, "finished_recving"))

    def request_finished(self, request, block_ids):
        keeps = self.keep_s[request.id] is not None and request.status == Status.FINISHED_LENGTH_CAPPED
        if keeps:
            self.running.append((self.now + self.keep_s[request.id], request, "finished_sending"))
        return keeps, None

    request_finished_all_groups = request_finished

    def poll(self):
        """What the worker of a step that is launched now says."""
        over = sorted((t for t in self.running if t[0] <= self.now), key=lambda transfer: transfer[0])
        self.running = [transfer for transfer in self.running if transfer[0] > self.now]
        return Output(over)

    def get_loaded_kv_cache_group_ids(self, request):
        return ()

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Output:
    """vLLM's KVConnectorOutput."""

    def __init__(self, over):
        self.finished_recving = [r.request_id for _, r, what in over if what == "finished_recving"]
        self.finished_sending = [r.request_id for _, r, what in over if what == "finished_sending"]

    def __bool__(self):
        return bool(self.finished_recving or self.finished_sending)

    def __getattr__(self, name):
        return None


class Loads(Connector):
    """Of each prompt the first `known` tokens are loaded, once."""

    def __init__(self, known, load_s):
        super().__init__(load_s, [None] * len(known))
        self.known = known

    def get_num_new_matched_tokens(self, request, computed):
        more = 0 if request in self.begun else self.known[request.id] - computed
        return max(0, more), more > 0


def run(
    vllm, policy, cost, num_blocks, block_size, asynchronous, requests, pull_s, keep_s, begins=None, connector=None
):
    """As `Vllm.run`, with transfers; those that wait for ever do not finish.

    Before 0.24 a real engine that only keeps blocks does not look for transfers until it computes again; here it does,
    as later ones do. In 0.10 those whose prompts are on their way change their order with each plan, which is not
    modelled: here they keep it, as in later ones.
    """
    it = vllm.build(policy, num_blocks, block_size, asynchronous, begins is not None, ONE)
    it.kv_cache_manager = vllm.kv_manager(num_blocks, block_size, begins is not None, ONE, policy.watermark)
    it.connector, it.block_size, it.prefix_replay_group_ids = connector or Connector(pull_s, keep_s), block_size, ()
    vllm.scheduler.SupportsHMA = Connector
    vllm.queues.FCFSRequestQueue.prepend_requests = lambda self, others: self.extendleft(others)
    everyone = [
        VllmRequest(i, *row, None if begins is None else begins[i], block_size) for i, row in enumerate(requests)
    ]
    for r in everyone:
        r.skip_reading_prefix_cache = False  # 0.32 would not ask its connector either
    arrivals, flight, steps = deque(everyone), deque(), []
    now = busy_until = 0.0
    empty = 0  # batches one after the other
    while True:
        if not it.requests and not flight:
            if not arrivals:
                return everyone, steps
            now = max(now, arrivals[0].arrival_s)
        if len(steps) > MOST_STEPS:
            return everyone, steps
        if empty > 5:  # in vain: nothing happens before the next arrival or end of a transfer
            next_s = [transfer[0] for transfer in it.connector.running] + [r.arrival_s for r in list(arrivals)[:1]]
            if not next_s:
                return everyone, steps
            now, empty = min(next_s), 0
        while arrivals and arrivals[0].arrival_s <= now:
            it.add_request(arrivals.popleft())
        if flight and flight[0][2]:
            steps[-1] = (*steps[-1][:4], vllm._used(it, num_blocks))
        if it.requests or it.finished_req_ids:
            it.connector.now = now
            batch = vllm._step(it, everyone, cost, max(now, busy_until), asynchronous, ONE, None)
            if batch[2]:
                busy_until = batch[0]
                steps.append((batch[0], *batch[4], vllm._used(it, num_blocks)))
            empty = 0 if batch[2] or any(b[2] for b in flight) else empty + 1
            flight.appendleft((*batch, it.connector.poll()))
            more = batch[2] and flight[-1][0] > now
            if vllm.newest:
                more = batch[2] or it.requests or it.finished_req_ids
            if asynchronous and len(flight) < 2 and more:
                continue
        end, output, ids, tokens, _, transfers = flight.pop()
        now = it.connector.now = max(now, end)
        had = [r.num_output_tokens for r in everyone]
        said = ModelOutput(ids, tokens)
        said.kv_connector_output = transfers
        it.update_from_output(output, said)
        for r, before in zip(everyone, had, strict=True):
            if r.num_output_tokens > before:
                r.token_s.append(now)
