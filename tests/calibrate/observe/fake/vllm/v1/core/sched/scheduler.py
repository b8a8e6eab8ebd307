from types import SimpleNamespace

from tests.sim.oracle import Naive, oracle


class Status:
    def __init__(self, name):
        self.name = name


class Request(Naive):
    """A naive request under vLLM's names."""

    structured_output_request = lora_request = pooling_params = kv_transfer_params = None
    mm_features = ()
    status = Status("RUNNING")

    request_id = property(lambda self: f"cmpl-{self.id}")
    arrival_time = property(lambda self: self.arrival_s)
    num_prompt_tokens = property(lambda self: self.prompt)
    max_tokens = property(lambda self: self.cap)
    num_computed_tokens = property(lambda self: self.computed)
    num_output_tokens = property(lambda self: self.out)
    num_tokens = property(lambda self: self.prompt + self.out)


class Scheduler:
    asynchronous = False

    def __init__(self, vllm_config, kv_cache_config):
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.scheduler_config = vllm_config.scheduler_config
        self.block_size = vllm_config.cache_config.block_size
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.max_model_len = 4096
        policy = vllm_config.policy
        self.policy = SimpleNamespace(value=policy.scheduling_policy)
        self.oracle = oracle(policy, None, kv_cache_config.num_blocks, self.block_size, self.asynchronous)
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.oracle.free)
        )
        self.requests, self.finished_req_ids = {}, set()

    running = property(lambda self: self.oracle.running)
    waiting = property(lambda self: self.oracle.waiting)

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.oracle.queue([request])

    def schedule(self):
        fresh = {r.request_id for r in self.waiting if not r.preemptions}
        batch = self.oracle.plan()
        cached = [before for r, _, before, *_ in batch if r.request_id not in fresh]
        self.finished_req_ids = set()
        return SimpleNamespace(
            batch=batch,
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id) for r, *_ in batch if r.request_id in fresh],
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=cached),
            num_scheduled_tokens={r.request_id: n for r, n, *_ in batch},
            total_num_scheduled_tokens=sum(n for _, n, *_ in batch),
            scheduled_spec_decode_tokens={},
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        for r, _, _, _, yields, preemptions in scheduler_output.batch:
            if not yields or r.done:
                continue
            r.out += 1
            r.placeholders -= r.preemptions == preemptions
            if r.out == r.output:
                self._finish(r, "FINISHED_LENGTH_CAPPED" if r.out == r.cap else "FINISHED_STOPPED")

    def finish_requests(self, request_id):
        if request_id in self.requests:
            self._finish(self.requests[request_id], "FINISHED_ABORTED")

    def _finish(self, request, status):
        request.done, request.status = True, Status(status)
        self.oracle.leave(request)
        self._free_request(request)

    def _free_request(self, request):
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    def shutdown(self):
        pass
