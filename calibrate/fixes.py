"""Which option to change so that a model fits, each with the value that would do: every one is tried by resolving the
engine again with it and planning again, so that what follows from an option changes too.

Knows the options that the engine has whose change leaves the rest of the deployment as it is; a smaller model is not
among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from calibrate.engine import EngineSpec, resolve_engine
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.memory import Logged, MemoryPlan, plan_memory
from calibrate.model import ModelSpec
from calibrate.serving import check_simulated, served
from servecast.errors import ServecastError

HIGHEST_SHARE = 97
"""What the driver and other processes hold is outside the engine's share: not suggested above so many hundredths."""

FEWER = 256
"""Sequences that are tried together with a shorter `max_model_len`."""


def require_fit(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> MemoryPlan:
    """The memory plan of a deployment that can be simulated. Raises `ServecastError`, with the option to change, where
    the engine would refuse to start or run out of memory, and for a model whose KV cache or kernels are not known."""
    check_simulated(served(model, engine))
    plan = plan_memory(model, layout, gpu, engine, logged)
    if plan.refusal:
        found = ", or ".join(changes(model, layout, gpu, engine, logged))
        raise ServecastError(f"{plan.refusal}. To fit: {found}")
    if plan.usable_blocks < 1:  # the engine starts, and serves nothing
        option, size = engine.name_of("num_gpu_blocks_override"), plan.block_size
        raise ServecastError(
            f"the KV cache holds nothing: {plan.num_gpu_blocks} blocks of {size} tokens"
            f"{', of which the null block takes one' if plan.null_blocks else ''}; raise {option}"
        )
    return plan


def longest_model_len(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> int:
    """The longest `max_model_len` with which the engine starts, up to what the model allows; 0 where none does."""
    return _Trial(model, layout, gpu, engine, logged).longest()


def changes(
    model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None = None
) -> Iterator[str]:
    """The changes of one option that would do, each as a clause; where none would, a larger GPU."""
    trial = _Trial(model, layout, gpu, engine, logged)
    options = list(_other_options(trial) if engine.num_gpu_blocks_override is None else _other_pool(trial))
    yield from options
    larger = (replace(layout, tp=tp) for tp in range(layout.tp + 1, gpu.gpus_per_node + 1))
    found = next((it.tp for it in larger if not check_layout(model, it, gpu) and trial.starts(it)), 0)
    if found:
        yield f"raise tp to {found}"
    elif not options:
        yield "use a GPU with more memory"


class _Trial:
    """A deployment to try changes on."""

    def __init__(
        self, model: ModelSpec, layout: Parallelism, gpu: Gpu, engine: EngineSpec, logged: Logged | None
    ) -> None:
        self.model, self.layout, self.gpu, self.engine, self.logged = model, layout, gpu, engine, logged
        self.user = {name: engine.options[name] for name, source in engine.sources.items() if source == "user"}

    def plan(self, layout: Parallelism | None = None, **fields: Any) -> MemoryPlan | None:
        """The plan where the options that say these fields of `EngineSpec` have these values; None where the engine has
        no such option, or refuses the value."""
        options = {**self.user, "preset": self.engine.preset}
        for field, value in fields.items():
            option, value = self.written(field, value)
            if option not in self.engine.options:
                return None
            options[option] = value
        layout = layout or self.layout
        try:
            engine = resolve_engine(options, self.gpu, self.model, layout)
        except ServecastError:
            return None
        return plan_memory(self.model, layout, self.gpu, engine, self.logged)

    def starts(self, layout: Parallelism | None = None, **fields: Any) -> bool:
        """Whether the engine starts with these values."""
        plan = self.plan(layout, **fields)
        return plan is not None and not plan.refusal

    def written(self, field: str, value: Any) -> tuple[str, Any]:
        """(option, its value) that say a field: where all sequences share an option (`ctx_size / parallel`), it is that
        many times as large."""
        option, _, shared = self.engine.name_of(field).partition(" / ")
        return option, value * self.engine.options[shared] if shared else value

    def longest(self, **fields: Any) -> int:
        """The longest `max_model_len` that starts with these values, 0 where none does. From above, by powers of two:
        a shorter one may need more than a longer one, where chunked prefill is off by default only up to 32,768."""

        def starts(length: int) -> bool:
            return self.starts(max_model_len=length, **fields)

        most = self.model.max_position
        for power in range(most.bit_length() - 1, -1, -1):
            low, high = (1 << power) - 1, min((2 << power) - 1, most)
            if starts(high):
                return high
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (middle, high) if starts(middle) else (low, middle)
            if low >= 1 << power:
                return low
        return 0


def _other_options(trial: _Trial) -> Iterator[str]:
    engine = trial.engine
    longest = trial.longest()
    if 0 < longest < engine.max_model_len:
        yield f"lower {_length(trial, longest)}"
    if share := next((n / 100 for n in range(1, HIGHEST_SHARE + 1) if _share_does(trial, n / 100)), None):
        yield f"raise {engine.name_of('gpu_memory_utilization')} to {share:g}"
    for field, least in (("max_num_seqs", 8), ("max_num_batched_tokens", max(512, engine.max_num_seqs))):
        lower = 2 ** (getattr(engine, field) - 1).bit_length() // 2
        while lower >= least and not trial.starts(**{field: lower}):
            lower //= 2
        if lower >= least:
            yield f"lower {engine.name_of(field)} to {lower}"
    length = trial.longest(max_num_seqs=FEWER) if engine.max_num_seqs > FEWER else 0
    if 0 < length < engine.max_model_len:
        yield f"lower {engine.name_of('max_num_seqs')} to {FEWER} and {_length(trial, length)}"
    if not engine.kv_cache_dtype.startswith("fp8"):
        dtype = next((word for word in ("fp8", "fp8_e4m3") if trial.starts(kv_cache_dtype=word)), None)
        if dtype:
            yield f"set {engine.name_of('kv_cache_dtype')} to {dtype}"


def _length(trial: _Trial, tokens: int) -> str:
    option, value = trial.written("max_model_len", tokens)
    return f"{option} to at most {value}"


def _share_does(trial: _Trial, share: float) -> bool:
    """Whether the engine starts with a larger share of the GPU, and what it keeps apart from the share is there too."""
    if share <= trial.engine.gpu_memory_utilization:
        return False
    plan = trial.plan(gpu_memory_utilization=share)
    if plan is None or plan.refusal:
        return False
    apart = plan.overhead_bytes if trial.engine.memory_rule == "static" else 0
    return plan.budget_bytes + apart <= plan.visible_bytes


def _other_pool(trial: _Trial) -> Iterator[str]:
    """Changes of a pool that the user set: vLLM counts it in blocks, all others in tokens."""
    engine = trial.engine
    plan = plan_memory(trial.model, trial.layout, trial.gpu, engine, trial.logged)
    option = engine.name_of("num_gpu_blocks_override")
    in_tokens = "num_gpu_blocks_override" in engine.names
    room = (plan.visible_bytes - plan.weight_bytes - plan.overhead_bytes) // plan.block_bytes
    if plan.num_gpu_blocks > room:
        most = room * plan.block_size if in_tokens else room
        if trial.starts(num_gpu_blocks_override=most):
            yield f"lower {option} to at most {most}" + (
                "" if in_tokens else " blocks (they are per engine, never times tp)"
            )
    elif room >= plan.least_blocks:
        yield f"raise {option} to at least {plan.least_blocks}"
        if longest := plan.pool.longest(plan.num_gpu_blocks - engine.strict_pool_check, plan.max_model_len):
            yield f"lower {_length(trial, longest)}"
