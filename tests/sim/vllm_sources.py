"""Runs vLLM's own scheduler sources, when they are at hand, on a stage set for them.

`SERVECAST_VLLM_SOURCES` names a folder with unpacked wheels, one a version (`0.19.1/vllm/v1/core/sched/scheduler.py`).
Real: `Scheduler`, `AsyncScheduler`, their queues and outputs, and for prefix caching and windows the `KVCacheManager`
with all below it. Ours: every other module (a mock), a request without token ids, without these two a KV manager that
only counts blocks, and the engine core's loop with one batch in flight, or two.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections import deque
from pathlib import Path
from unittest.mock import MagicMock

from sim.windows import ONE
from tests.sim.oracle.pipeline import Clocks

CORE = "vllm.v1.core"
SCHED = f"{CORE}.sched"
REAL = {
    SCHED,
    *(f"{SCHED}.{name}" for name in ("scheduler", "async_scheduler", "output", "interface", "request_queue", "utils")),
    *(f"{CORE}.{name}" for name in ("kv_cache_manager", "block_pool", "kv_cache_utils", "kv_cache_coordinator",
                                    "single_type_kv_cache_manager")),
}  # fmt: skip
EOS, OTHER = 2, 7


class Status(enum.IntEnum):
    """vLLM's RequestStatus: the order of the names is its own, what comes after PREEMPTED is finished."""

    WAITING = 1
    WAITING_FOR_FSM = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11
    FINISHED_IGNORED = 12
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 20

    @staticmethod
    def is_finished(status):
        return Status.PREEMPTED < status < Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


class Params:
    """Sampling parameters of which everything is off."""

    min_tokens, eos_token_id, stop_token_ids, ignore_eos, max_tokens = 0, EOS, (), False, 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class VllmRequest:
    """What the scheduler asks of a request, and what the test wants to know of it afterwards."""

    __hash__ = object.__hash__
    _OFF = (
        "lora_request structured_output_request trace_headers pooling_params stop_reason streaming_queue replay_start "
        "kv_transfer_params spec_decode_metrics ec_transfer_params prefill_stats"
    )
    _ZERO = (
        "num_computed_tokens num_output_placeholders num_preemptions num_external_computed_tokens client_index "
        "priority num_nans_in_logits num_stale_output_tokens num_in_flight_tokens next_decode_eligible_step "
        "last_sched_seq prefix_cache_hit_tokens shared_prefix_boundary async_tokens_to_discard"
    )
    _FALSE = (
        "has_encoder_inputs discard_latest_async_tokens use_structured_output resumable is_prefill_chunk "
        "drop_stale_output"
    )

    def __init__(self, id, arrival, prompt, output, cap, priority=0, begins=None, block_size=1):
        self.__dict__.update(dict.fromkeys(self._OFF.split()) | dict.fromkeys(self._ZERO.split(), 0))
        self.__dict__.update(dict.fromkeys(self._FALSE.split(), False))
        self.arrival_s, self.priority = arrival, priority
        arrival += id * 1e-9  # real arrivals never tie: vLLM's victim among equals would be any
        self.rank = priority, arrival
        self.request_id, self.arrival_time, self.num_prompt_tokens, self.max_tokens = str(id), arrival, prompt, cap
        self.output, self.output_token_ids, self.spec_token_ids, self.mm_features = output, [], [], []
        self.status, self.sampling_params, self.eos_token_id, self.num_cached_tokens = Status.WAITING, Params(), EOS, -1
        self.mm_kwargs, self.mm_hashes, self.mm_positions, self.skip_reading_prefix_cache = [], [], [], True
        self.id, self.begins, self.block_size, self._hashes, self.cached = id, begins, block_size, [], None
        self.skip_reading_prefix_cache = begins is None
        self.token_s, self.scheduled_s, self.decoding, self.preempted = [], None, False, 0
        self.verified, self.landed, self.out = (
            0,
            0,
            0,
        )  # steps decoded in; what is right in KV, and of the output, by plan

    num_tokens = property(lambda self: self.num_prompt_tokens + len(self.output_token_ids))
    num_tokens_with_spec = property(lambda self: self.num_tokens + len(self.spec_token_ids))
    num_output_tokens = property(lambda self: len(self.output_token_ids))

    @property
    def block_hashes(self):
        """A name for what each full block and all before it hold: what the prompt begins with, then its own tokens."""
        for i in range(len(self._hashes), self.num_tokens // self.block_size):
            end = (i + 1) * self.block_size
            tokens = [*self.begins, *((self.id, p) for p in range(len(self.begins), end))][:end]
            self._hashes.append(hashlib.sha256(repr(tokens).encode()).digest())
        return self._hashes

    def __lt__(self, other):
        return self.rank < other.rank

    def append_output_token_ids(self, ids):
        self.output_token_ids.extend(ids if isinstance(ids, list) else [ids])

    def is_finished(self):
        return Status.is_finished(self.status)

    def get_finished_reason(self):
        return str(self.status)

    def take_events(self):
        return None

    def take_prefill_stats(self):
        return None

    def record_event(self, *args):
        pass

    def __getattr__(self, name):
        if name in ("all_token_ids", "_all_token_ids", "_output_token_ids", "prompt_token_ids",
                    "prompt_embeds", "cache_salt", "shared_prefix_boundary", "prompt_is_token_ids"):  # fmt: skip
            return MagicMock()
        raise AttributeError(name)


class Spec:
    """Anything that describes a KV cache."""

    value = None

    def __init__(self, *args, **facts):
        self.__dict__.update(facts)


class Blocks:
    blocks = ((),)

    def get_block_ids(self, *args, **kwargs):
        return ((),)

    def __add__(self, other):
        return self


class CountingKV:
    """vLLM's KVCacheManager as far as it decides: blocks per request, none shared."""

    enable_caching, usage = False, 0

    def __init__(self, num_blocks, block_size, lookups, watermark):
        self.watermark_blocks = int(watermark * num_blocks)
        self.free_blocks, self.size, self.held = num_blocks - 1, block_size, {}
        self.empty_kv_cache_blocks, self.block_pool, self.lookups = Blocks(), MagicMock(), lookups

    def need(self, request, tokens):
        return -(-tokens // self.size) - self.held.get(request.request_id, 0)

    def allocate_slots(
        self, request, num_new_tokens, *args, full_sequence_must_fit=False, has_scheduled_reqs=True,
        num_lookahead_tokens=0, **kwargs,
    ):  # fmt: skip
        waits = request.status.name in ("WAITING", "PREEMPTED")
        spare = self.watermark_blocks if has_scheduled_reqs and waits else 0
        if full_sequence_must_fit and self.need(request, request.num_tokens) + spare > self.free_blocks:
            return None
        blocks = max(0, self.need(request, request.num_computed_tokens + num_new_tokens + num_lookahead_tokens))
        if blocks + spare > self.free_blocks:
            return None
        self.free_blocks -= blocks
        self.held[request.request_id] = self.held.get(request.request_id, 0) + blocks
        return Blocks()

    def can_fit_full_sequence(self, request, **kwargs):
        return self.need(request, request.num_tokens) <= self.free_blocks

    def free(self, request):
        self.free_blocks += self.held.pop(request.request_id, 0)

    def get_computed_blocks(self, request):
        return (Blocks(), *[0] * self.lookups)

    def get_num_common_prefix_blocks(self, *args):
        return [0]

    def get_blocks(self, *args):
        return Blocks()

    create_empty_block_list = get_blocks

    def get_block_ids(self, *args):
        return ((),)

    def take_kv_cache_block_copies(self):
        return None, None

    def __getattr__(self, name):
        return MagicMock(return_value=None)


class ModelOutput:
    """The tokens that a step sampled, by request."""

    def __init__(self, ids, tokens):
        self.prompt_logprobs_dict = self.prompt_token_id_logprobs_dict = self.prompt_token_id_logprobs = {}
        self.sampled_token_ids, self.req_id_to_index = tokens, {id: i for i, id in enumerate(ids)}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class _Stage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the scheduler's modules from the sources and mocks everything else that they import."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("vllm", "torch", "transformers", "msgspec"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        if spec.name in REAL:
            return None
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        if module.__name__ not in REAL:
            return
        path = self.root / f"{module.__name__.replace('.', '/')}.py"
        if not path.exists():
            path = path.with_suffix("") / "__init__.py"
            module.__path__ = [str(path.parent)]
        text = path.read_text(encoding="utf-8")
        later = "" if "from __future__" in text else "from __future__ import annotations\n"
        exec(compile(later + text, str(path), "exec"), module.__dict__)


class Vllm:
    """The schedulers of the sources under `root`; one version a process, since modules are global."""

    def __init__(self, root: Path):
        self.newest = (root / "vllm/config/watermarking.py").exists()  # 0.32: its loop fills the batch queue earlier
        text = (root / "vllm/v1/core/sched/async_scheduler.py").read_text(encoding="utf-8")
        self.staggers = "next_decode_eligible_step" in text  # from 0.24
        sys.meta_path.insert(0, _Stage(root))
        self._put("vllm.v1.request", Request=VllmRequest, RequestStatus=Status, StreamingUpdate=MagicMock())
        numbers = {
            "cdiv": lambda a, b: -(-a // b),
            "round_up": lambda a, b: -(-a // b) * b,
            "round_down": lambda a, b: a // b * b,
        }  # fmt: skip
        self._put("vllm.utils.math_utils", **numbers)
        importlib.import_module("vllm.utils").cdiv = numbers["cdiv"]  # where 0.10 has it
        self._put("vllm.v1.kv_cache_interface")
        interface = sys.modules["vllm.v1.kv_cache_interface"]
        interface.__getattr__ = functools.cache(lambda name: type(name, (Spec,), {}))
        interface.iter_layer_specs = lambda spec: (spec,)  # 0.32 asks it
        self._put("vllm._bc_linter", bc_linter_include=lambda c: c, bc_linter_skip=lambda c: c)
        self._put("vllm.v1.utils", record_function_or_nullcontext=lambda name: contextlib.nullcontext())
        importlib.import_module("vllm").bc_linter_include = lambda c: c
        importlib.import_module("vllm").envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None  # 0.24 asks it
        self.scheduler = importlib.import_module(f"{SCHED}.scheduler")
        self.asynchronous = importlib.import_module(f"{SCHED}.async_scheduler")
        self.manager = importlib.import_module(f"{CORE}.kv_cache_manager").KVCacheManager
        managers = importlib.import_module(f"{CORE}.single_type_kv_cache_manager")
        kinds = {
            "FullAttentionSpec": managers.FullAttentionManager,
            "SlidingWindowSpec": managers.SlidingWindowManager,
            "ChunkedLocalAttentionSpec": managers.ChunkedLocalAttentionManager,
        }
        registry = importlib.import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry  # 0.24 and 0.32 ask it
        registry.get_manager_class = lambda spec, *role: kinds[type(spec).__name__]
        self.queues = importlib.import_module(f"{SCHED}.request_queue")

    @staticmethod
    def _put(name, **members):
        module = types.ModuleType(name)
        module.__dict__.update(members, __getattr__=lambda _: MagicMock())
        sys.modules[name] = module

    def kv_manager(self, num_blocks, block_size, caching, tables, watermark, drops_last=False):
        """vLLM's own KVCacheManager, with or without prefix caching, for all of a model's block tables."""
        interface = sys.modules["vllm.v1.kv_cache_interface"]
        facts = {
            "block_size": block_size, "dcp_sharded": False, "prefix_cacheable": True, "sliding_window": None,
            "attention_chunk_size": None, "storage_block_size": block_size, "page_size_bytes": 1,
            "extra_retained_tokens": 0, "prefix_replay_tokens": 0,
        }  # fmt: skip
        full, specs = interface.FullAttentionSpec(**facts), []
        for window in tables.windows:
            kind = interface.ChunkedLocalAttentionSpec if window.chunked else interface.SlidingWindowSpec
            facts["attention_chunk_size" if window.chunked else "sliding_window"] = window.size
            spec = kind(**facts)
            spec.max_admission_blocks_per_request = lambda most=window.most, **_: most
            specs += [spec] * window.tables
        specs += [full] * tables.full
        groups = [
            types.SimpleNamespace(
                kv_cache_spec=spec, is_eagle_group=drops_last, layer_names=[], role=None, enable_caching=caching
            )
            for spec in specs
        ]
        config = types.SimpleNamespace(
            num_blocks=num_blocks, kv_cache_groups=groups, has_mamba_layers=False, kv_cache_tensors=[],
            needs_kv_cache_zeroing=False, prefix_cache_retention_interval=0 if tables.keeps_ends else None,
        )  # fmt: skip
        known = inspect.signature(self.manager).parameters
        options = {"hash_block_size": block_size, "scheduler_block_size": block_size, "enable_caching": caching,
                   "watermark": watermark, "use_eagle": drops_last}  # fmt: skip
        return self.manager(config, 10**9, **{name: value for name, value in options.items() if name in known})

    def build(self, policy, num_blocks, block_size, asynchronous, caching, tables, drafting=None, drops_last=False):
        """A scheduler with `policy`'s options and everything else off, but perhaps prefix `caching`."""
        kind = self.asynchronous.AsyncScheduler if asynchronous else self.scheduler.Scheduler
        kind.make_stats = lambda *args, **kwargs: None
        it = kind.__new__(kind)
        order = self.queues.SchedulingPolicy(policy.scheduling_policy)
        off = (
            "connector connector_prefix_cache_stats ec_connector lora_config finished_req_ids_dict perf_metrics "
            "aux_output_connector dynamic_sd_lookup kv_metrics_collector _kv_fetch_stages return_sampling_mask "
            "model_uses_mrope"
        )
        false = (
            "log_stats use_eagle use_pp use_v2_model_runner need_mamba_block_aligned_split needs_kv_cache_zeroing "
            "has_mamba_layers is_encoder_decoder is_mm_encoder_only defer_block_free requires_kv_delivery "
            "prefill_capacity_bound adaptive_long_prefill_threshold enable_return_routed_experts"
        )
        zero = (
            "num_waiting_for_streaming_input max_num_encoder_input_tokens num_spec_tokens num_lookahead_tokens "
            "num_prefill_lookahead current_step sched_step_seq processed_step_seq _spec_decode_step_blocks "
            "prefix_replay_tokens"
        )
        sets = (
            "finished_req_ids prev_step_scheduled_req_ids failed_recving_kv_req_ids finished_recving_kv_req_ids "
            "deferred_waiting _inflight_prefills reset_preempted_req_ids grammar_compile_error_reqs "
            "encoder_cache_mismatch_reqs"
        )
        it.__dict__.update(dict.fromkeys(off.split()) | dict.fromkeys(false.split(), False))
        it.__dict__.update(dict.fromkeys(zero.split(), 0) | {n: set() for n in sets.split()})
        mocks = "encoder_cache_manager kv_event_publisher cache_config parallel_config observability_config"
        it.__dict__.update({n: MagicMock() for n in mocks.split()})
        queues = ("waiting", "skipped_waiting", "kv_holding_waiting")
        it.__dict__.update({n: self.queues.create_request_queue(order) for n in queues})
        it.policy, it.requests, it.running, it.deferred_frees = order, {}, [], deque()
        it.max_num_running_reqs = it.max_num_active_reqs = policy.max_num_seqs
        it.max_num_scheduled_tokens, it.max_model_len = policy.max_num_batched_tokens, 10**9
        it.scheduler_reserve_full_isl = policy.scheduler_reserve_full_isl
        it.scheduler_config = types.SimpleNamespace(
            max_num_batched_tokens=policy.max_num_batched_tokens,
            max_num_seqs=policy.max_num_seqs,
            long_prefill_token_threshold=policy.long_prefill_token_threshold,
            enable_chunked_prefill=policy.enable_chunked_prefill,
            chunked_prefill_enabled=policy.enable_chunked_prefill,
            async_scheduling=asynchronous,
        )
        it.kv_cache_manager = (
            self.kv_manager(num_blocks, block_size, caching, tables, policy.watermark, drops_last)
            if caching or tables.windows
            else CountingKV(num_blocks, block_size, 2 if self.newest else 1, policy.watermark)
        )
        it.kv_cache_config = types.SimpleNamespace(kv_cache_groups=[1])
        it._pause_state = getattr(self.scheduler, "PauseState", MagicMock()).UNPAUSED
        it.structured_output_manager = MagicMock(
            should_advance=lambda request: False, validate_tokens=lambda request, tokens: tokens
        )
        it.vllm_config = MagicMock(speculative_config=None)
        it.vllm_config.model_config.enable_return_routed_experts = False
        it.recompute_kv_load_failures, it.num_sampled_tokens_per_step = True, 1
        it.decode_stagger = it.pp_size = 1
        it.spec_decode_metrics_level, it._spec_token_placeholders = "none", []
        if drafting is not None:
            it.num_spec_tokens, it.num_lookahead_tokens = drafting.tokens, drafting.lookahead
            it._spec_token_placeholders, it.max_model_len = [-1] * drafting.tokens, drafting.max_model_len
            it.vllm_config.speculative_config = types.SimpleNamespace(max_num_new_slots_for_drafting=policy.draft_slots)
        return it

    def run(self, policy, cost, num_blocks, block_size, asynchronous, requests, begins=None, tables=ONE, stages=None,
            drafting=None, drops_last=False):  # fmt: skip
        """(requests, steps as (end, decodes, KV, prefill tokens, blocks in use)) of (arrival, prompt, output, cap,
        priority) rows.

        `begins`: the tokens that each prompt begins with, for prefix caching. Blocks are those of vLLM's own manager,
        where it runs, as the naive engine counts them. `stages`: those of a pipeline, which take what they say in place
        of `cost`; from 0.24 its asynchronous engines are those of the V2 model runner.
        """
        caching = begins is not None
        it = self.build(policy, num_blocks, block_size, asynchronous, caching, tables, drafting, drops_last)
        depth, clocks = 2 if asynchronous else 1, None
        if stages is not None:
            it.use_pp, it.pp_size = True, stages.depth
            it.decode_stagger = it.pp_size
            it.use_v2_model_runner = staggered = asynchronous and self.staggers
            depth, clocks = stages.depth + staggered, Clocks(stages, staggered)
        everyone = [
            VllmRequest(i, *row, None if begins is None else begins[i], block_size) for i, row in enumerate(requests)
        ]
        arrivals, flight, steps = deque(everyone), deque(), []
        now = busy_until = 0.0

        def has_requests():
            return bool(it.running or it.waiting or it.skipped_waiting or it.kv_holding_waiting or it.finished_req_ids)

        while True:
            if not has_requests() and not flight:
                if not arrivals:
                    return everyone, steps
                now = max(now, arrivals[0].arrival_s)
            while arrivals and arrivals[0].arrival_s <= now:
                it.add_request(arrivals.popleft())
            if flight and flight[0][2]:
                steps[-1] = (*steps[-1][:4], self._used(it, num_blocks))
            if has_requests():
                start = now if clocks else max(now, busy_until)
                batch = self._step(it, everyone, cost, start, asynchronous, tables, clocks, drafting)
                if batch[2]:
                    busy_until = batch[0]
                    steps.append((batch[0], *batch[4], self._used(it, num_blocks)))
                flight.appendleft(batch)
                more = batch[2] and flight[-1][0] > now
                if self.newest:
                    more = batch[2] or has_requests()
                if len(flight) < depth and more:
                    continue
            end, output, ids, tokens, _ = flight.pop()
            now = max(now, end)
            had = [r.num_output_tokens for r in everyone]
            it.update_from_output(output, ModelOutput(ids, tokens))
            if drafting is not None and not asynchronous:
                drafts = {id: self._drafted(it.requests[id], drafting) for id in ids if id in it.requests}
                drafts = {id: n for id, n in drafts.items() if not it.requests[id].is_prefill_chunk}
                drafts = {id: n for id, n in drafts.items() if it.requests[id].decoding}  # which 0.10 does not know
                it.update_draft_token_ids(types.SimpleNamespace(
                    req_ids=list(drafts), draft_token_ids=[[OTHER] * n for n in drafts.values()]
                ))  # fmt: skip
            for r, before in zip(everyone, had, strict=True):
                if r.num_output_tokens > before:
                    r.token_s.append(now)

    @staticmethod
    def _drafted(r, drafting):
        return int(drafting.draws(r.id, r.output + 2)[0][r.verified])

    @staticmethod
    def _used(it, num_blocks):
        manager = it.kv_cache_manager
        free = manager.free_blocks if isinstance(manager, CountingKV) else manager.block_pool.get_num_free_blocks()
        return num_blocks - 1 - free

    @staticmethod
    def _step(it, everyone, cost, start, asynchronous, tables, clocks, drafting=None):
        """Plan one step and price it: (end, scheduler output, request ids, tokens, (decodes, KV, prefill tokens))."""
        before = {r.request_id: (r.num_computed_tokens, r.num_output_placeholders) for r in everyone}
        running = {r.request_id for r in it.running}
        output = it.schedule()
        still = {r.request_id for r in it.running}
        for r in everyone:
            if r.request_id in running - still:
                r.decoding, r.preempted = False, r.preempted + 1
                r.spec_token_ids = []  # 0.10 keeps them, and verifies them with the end of its prompt: not modelled
        chunks, kv, tokens, decoding, yielding, fresh = [], [], [], [], [], []
        drafts = padded = 0
        for id, n in output.num_scheduled_tokens.items():
            r, (computed, placeholders) = it.requests[id], before[id]
            computed = r.num_computed_tokens - n  # what was found in the cache included
            r.cached = computed if r.cached is None else r.cached
            yields = r.num_output_placeholders > placeholders if asynchronous else r.num_computed_tokens >= r.num_tokens
            gained = 1
            if r.decoding:
                if drafting is not None:
                    computed, drafts = r.landed, drafts + n - 1
                    gained = min(n, int(drafting.draws(r.id, r.output + 2)[1][r.verified]))
                    r.verified, r.landed = r.verified + 1, r.landed + gained
                kv.append(computed)
                decoding.append(id)
            else:
                in_vain = len(output.scheduled_spec_decode_tokens.get(id, ()))
                drafts, padded = drafts + in_vain, padded + (in_vain > 0)
                chunks.append((n - in_vain, computed))
                r.landed = computed + n - in_vain
            if yields:
                yielding.append(id)
            r.decoding = r.decoding or yields
            if r.scheduled_s is None:
                fresh.append(r)
            position = r.num_output_tokens + (r.num_output_placeholders if asynchronous else 1)
            if drafting is not None:
                position = r.out + 1
                r.out += gained if yields else 0
            stops = [EOS if position + i == r.output < r.max_tokens else OTHER for i in range(gained)]
            tokens.append(stops if yields else [])
        shape = len(kv), sum(kv), sum(n for n, _ in chunks)
        seen = tuple(sum(map(window.seen, kv)) for window in tables.windows)
        if padded == len(chunks) and not clocks:
            chunks, kv = [], kv + [computed for _, computed in chunks]
        end = start + cost.step_s(chunks, len(kv), sum(kv), seen, drafts) if tokens and not clocks else start
        if tokens and clocks:
            start, end = clocks.launch(start, chunks, kv, decoding, yielding)
        for r in fresh:
            r.scheduled_s = start
        return end, output, list(output.num_scheduled_tokens), tokens, shape
