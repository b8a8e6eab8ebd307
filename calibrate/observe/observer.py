"""Writes down what vLLM's scheduler does, step by step. It decides nothing, and never disturbs the engine.

Put this file where vLLM starts (it needs nothing but vLLM, 0.10 to 0.32) and start it so:

    PYTHONPATH=. SERVECAST_OBSERVE=steps.jsonl vllm serve MODEL ... --scheduler-cls observer.Observer

The record is JSON lines: an object with the engine's facts, then arrays that begin with a letter. Times are seconds of
the monotonic clock since the header; `plan` counts calls of schedule(), `update` those of update_from_output().

    ["q", request, plan, t, prompt, max_tokens, noted, priority, kinds]
          a request reached the scheduler: the first plan that can see it; the unix time that vLLM noted as its arrival;
          what is special about it ("structured lora")
    ["s", plan, updates, begin, planned, update, end, chunks, decodes, kv, running, waiting, free, lost, hits, drafts]
          a step, once it is over: updates made before its plan; schedule() in, out, update_from_output() in, out;
          [request, new tokens, tokens in KV] of each prompt chunk; decoding requests and their tokens in KV; requests
          running and waiting and free blocks after the plan; who lost his KV to it; tokens that admitted requests found
          in the prefix cache; draft tokens of speculative decoding
    ["f", request, plan, update, t, output_tokens, status]
          a request is over: the first plan without it
    ["e", t, why]
          the end: "shutdown", "exit", or what the observer did not understand

No thread, no loop over the decoding requests, one write a second and whenever the engine is idle. vLLM versions that
replace --scheduler-cls where asynchronous scheduling is asked for (0.10.2 does) can be observed without it only.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMAT = 1
FLUSH_S = 1.0


class Observer:
    """vLLM's own scheduler, the asynchronous one where the engine is, which reports to a `Record`."""

    _record: Record | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Observer:
        """An instance of `cls` on top of the scheduler class that the engine would have taken."""
        if cls is Observer:
            cls = observed(scheduler_class(kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]))
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        base.__init__(*args, **kwargs)
        self.observe()

    def observe(self) -> None:
        """Begin the record."""
        try:
            self._record = Record(self)
        except Exception as error:
            print(f"servecast: not observing this engine: {error!r}", file=sys.stderr, flush=True)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        if self._record:
            self._record.reached(request)
        return base.add_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        record = self._record
        if not record:
            return base.schedule(*args, **kwargs)
        record.begins()
        begin = time.monotonic()
        output = base.schedule(*args, **kwargs)
        record.planned(begin, time.monotonic(), output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        begin = time.monotonic()
        outputs = base.update_from_output(scheduler_output, *args, **kwargs)
        if self._record:
            self._record.updated(scheduler_output, begin, time.monotonic())
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        if self._record:
            self._record.finished(request)
        return base._free_request(request, *args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        if self._record:
            self._record.end("shutdown")
        return base.shutdown(*args, **kwargs)


def scheduler_class(config: Any) -> type:
    """The scheduler that vLLM takes for this configuration when none is named."""
    asynchronous = bool(getattr(config.scheduler_config, "async_scheduling", False))
    if getattr(config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler

        name = "DiffusionAsyncScheduler" if asynchronous else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name)  # type: ignore[no-any-return]
    if asynchronous:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler  # type: ignore[no-any-return]
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler  # type: ignore[no-any-return]


def observed(base: type) -> type[Observer]:
    """An observer on top of a scheduler class; TypeError when it lacks a method that is watched."""
    for name in ("add_request", "schedule", "update_from_output", "_free_request", "get_request_counts"):
        if not hasattr(base, name):
            raise TypeError(f"{base.__name__} has no method {name}")
    return types.new_class("Observer", (Observer, base))


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """`method` of a Record that ends the record, in place of raising, when it meets something unknown."""

    def safe(record: Record, *args: Any) -> None:
        try:
            if record.scheduler._record is record:
                method(record, *args)
        except Exception as error:
            record.end(f"{method.__name__}: {error!r}")

    return safe


class Record:
    """The file, and what has to be remembered to write it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.zero = self.flushed = time.monotonic()
        self.index: dict[str, int] = {}  # requests in the engine
        self.requests = self.plans = self.updates = 0
        self.incomplete: dict[str, bool] = {}  # chunks still to come; True: preempted, and not admitted since
        self.before: list[Any] = []
        self.flight: deque[tuple[Any, str, str]] = deque()  # outputs on their way, and their lines' two halves
        self.lines = [json.dumps(header(scheduler))]
        self.free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        self.file = _open(os.environ.get("SERVECAST_OBSERVE") or "servecast_steps.jsonl", scheduler)
        self.flush()
        atexit.register(self.end, "exit")

    @_safely
    def reached(self, request: Any) -> None:
        """`request` is handed to the scheduler."""
        if request.request_id in self.index:
            raise ValueError("a request goes on under the same name (streamed input)")
        self.index[request.request_id] = self.requests
        line = [
            "q", self.requests, self.plans, round(time.monotonic() - self.zero, 6), request.num_prompt_tokens,
            request.max_tokens, request.arrival_time, getattr(request, "priority", 0), _kinds(request),
        ]  # fmt: skip
        self.requests += 1
        self.lines.append(json.dumps(line))

    @_safely
    def begins(self) -> None:
        """schedule() is about to run."""
        self.before = self.scheduler.running[:]

    @_safely
    def planned(self, begin: float, end: float, output: Any) -> None:
        """schedule() has run. Only requests with chunks are looked at; the decodes are what is left of the sums."""
        scheduler, tokens, drafts = self.scheduler, output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        new = {request.req_id for request in output.scheduled_new_reqs}
        chunks = self._chunks(output, new)
        kv, hits = sum(output.scheduled_cached_reqs.num_computed_tokens), 0
        for name, (_, _, had) in chunks.items():
            if name not in new:
                kv -= had
            if self.incomplete.pop(name, False) or name in new:
                hits += had
            request = scheduler.requests[name]
            if request.num_computed_tokens < request.num_tokens:
                self.incomplete[name] = False
        lost = self._lost()
        running, waiting = len(scheduler.running), scheduler.get_request_counts()[1]
        begin, end = begin - self.zero, end - self.zero
        first = f'["s",{self.plans},{self.updates},{begin:.6f},{end:.6f},'
        second = (
            f"{list(chunks.values())},{len(tokens) - len(chunks)},{kv},{running},{waiting},{self.free_blocks()},{lost},"
            f"{hits},{sum(map(len, drafts.values())) if drafts else 0}]"
        )
        self.flight.append((output, first, second))
        self.plans += 1

    def _chunks(self, output: Any, new: set[str]) -> dict[str, list[int]]:
        """Name -> [request, new tokens, tokens in KV] of those whose prompt was not complete, in the batch's order."""
        index, requests, tokens = self.index, self.scheduler.requests, output.num_scheduled_tokens
        found, left = {}, output.total_num_scheduled_tokens
        for name in (*new, *self.incomplete):
            if name in tokens and name not in found:
                n = tokens[name]
                left -= n
                found[name] = [index[name], n, requests[name].num_computed_tokens - n]
        drafts = output.scheduled_spec_decode_tokens
        if left - sum(map(len, drafts.values())) != len(tokens) - len(found):  # there are some that nothing announced
            for name, n in tokens.items():
                had = requests[name].num_computed_tokens - n
                if name not in drafts and (n > 1 or had < requests[name].num_prompt_tokens):
                    found[name] = [index[name], n, had]
        return {name: found[name] for name in tokens if name in found} if len(found) > 1 else found

    def _lost(self) -> list[int]:
        """Who was running before the plan and is not now; a plan that preempts admits nobody."""
        running = self.scheduler.running
        if len(running) >= len(self.before):
            return []
        still = set(map(id, running))
        lost = [request.request_id for request in self.before if id(request) not in still]
        self.incomplete.update(dict.fromkeys(lost, True))
        return [self.index[name] for name in lost]

    @_safely
    def updated(self, output: Any, begin: float, end: float) -> None:
        """update_from_output() has run."""
        begin, end = begin - self.zero, end - self.zero
        while True:
            of, first, second = self.flight.popleft()
            self.lines.append(f"{first}{begin:.6f},{end:.6f},{second}")
            self.updates += 1
            if of is output:
                break
        if not self.scheduler.running or end + self.zero - self.flushed > FLUSH_S:
            self.flush()

    @_safely
    def finished(self, request: Any) -> None:
        """`request` leaves the scheduler."""
        index = self.index.pop(request.request_id)
        self.incomplete.pop(request.request_id, None)
        now, status = time.monotonic() - self.zero, request.status.name.lower().removeprefix("finished_")
        line = ["f", index, self.plans, self.updates, round(now, 6), request.num_output_tokens, status]
        self.lines.append(json.dumps(line))

    def flush(self) -> None:
        """Write what there is."""
        data, self.lines = "".join(f"{line}\n" for line in self.lines).encode(), []
        os.write(self.file, data)
        self.flushed = time.monotonic()

    def end(self, why: str) -> None:
        """Observe no more. Never raises."""
        if self.scheduler._record is not self:
            return
        self.scheduler._record = None
        try:
            atexit.unregister(self.end)
            self.lines.append(json.dumps(["e", round(time.monotonic() - self.zero, 6), why]))
            self.flush()
            os.close(self.file)
        except Exception as error:
            why = f"{why}; {error!r}"
        if why not in ("shutdown", "exit"):
            print(f"servecast: observes no more: {why}", file=sys.stderr, flush=True)


def header(scheduler: Any) -> dict[str, Any]:
    """What is known of the engine, by vLLM's names of the options; what this version does not have is left out."""
    config, scheduling = scheduler.vllm_config, scheduler.scheduler_config
    places: dict[str, tuple[Any, ...]] = {
        "model": (config, "model_config", "model"),
        "dtype": (config, "model_config", "dtype"),
        "quantization": (config, "model_config", "quantization"),
        "enforce_eager": (config, "model_config", "enforce_eager"),
        "kv_cache_dtype": (config, "cache_config", "cache_dtype"),
        "enable_prefix_caching": (config, "cache_config", "enable_prefix_caching"),
        "gpu_memory_utilization": (config, "cache_config", "gpu_memory_utilization"),
        "tensor_parallel_size": (config, "parallel_config", "tensor_parallel_size"),
        "pipeline_parallel_size": (config, "parallel_config", "pipeline_parallel_size"),
        "data_parallel_size": (config, "parallel_config", "data_parallel_size"),
        "speculative_method": (config, "speculative_config", "method"),
        "scheduling_policy": (scheduler, "policy", "value"),
        "async_scheduling": (scheduling, "async_scheduling"),
        "enable_chunked_prefill": (scheduling, "enable_chunked_prefill"),
        "long_prefill_token_threshold": (scheduling, "long_prefill_token_threshold"),
        "scheduler_reserve_full_isl": (scheduling, "scheduler_reserve_full_isl"),
        "max_num_seqs": (scheduler, "max_num_running_reqs"),
        "max_num_batched_tokens": (scheduler, "max_num_scheduled_tokens"),
        "max_model_len": (scheduler, "max_model_len"),
        "block_size": (scheduler, "block_size"),
        "num_gpu_blocks": (scheduler, "kv_cache_config", "num_blocks"),
        "kv_connector": (scheduler, "connector", "__class__", "__name__"),
    }
    facts: dict[str, Any] = {"servecast_steps": FORMAT, "vllm": _version(), "gpu": _gpu(), "unix_s": time.time()}
    for name, (thing, *path) in places.items():
        for attribute in path:
            thing = getattr(thing, attribute, None)
        if name == "dtype" and thing is not None:
            facts[name] = str(thing).rpartition(".")[2]  # torch.bfloat16
        elif isinstance(thing, (bool, int, float, str)):
            facts[name] = thing
    groups = getattr(scheduler.kv_cache_config, "kv_cache_groups", None)
    facts["kv_cache_groups"] = len(groups) if isinstance(groups, (list, tuple)) else 1
    if facts.get("kv_connector") == "NoneType":
        del facts["kv_connector"]
    return facts


def _version() -> str | None:
    try:
        import vllm

        return str(vllm.__version__)
    except Exception:
        return None


def _gpu() -> str | None:
    try:
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())
    except Exception:
        return None


def _kinds(request: Any) -> str:
    signs = {
        "structured": "structured_output_request", "lora": "lora_request", "pooling": "pooling_params",
        "multimodal": "mm_features", "kv_transfer": "kv_transfer_params",
    }  # fmt: skip
    return " ".join(kind for kind, name in signs.items() if getattr(request, name, None) not in (None, [], (), {}))


def _open(path: str, scheduler: Any) -> int:
    """A new file; never one that exists: `steps.jsonl`, `steps.1.jsonl`, ... (and one for each data-parallel rank)."""
    wanted = Path(path).absolute()
    parallel = getattr(scheduler.vllm_config, "parallel_config", None)
    size, rank = getattr(parallel, "data_parallel_size", 1), getattr(parallel, "data_parallel_rank", 0)
    stem = f"{wanted.stem}.dp{rank}" if isinstance(size, int) and size > 1 else wanted.stem
    for k in range(10_000):
        name = wanted.with_name(f"{stem}.{k}{wanted.suffix}" if k else f"{stem}{wanted.suffix}")
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            continue
        print(f"servecast: writing this engine's steps to {name}", file=sys.stderr, flush=True)
        return file
    raise FileExistsError(path)
