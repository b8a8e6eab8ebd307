"""What a run says of one of its pools, in the few numbers that tell which causes can be. It knows no causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.breakdown import Step, step_of
from reports.diagnosing.facts import Symptom

if TYPE_CHECKING:
    from servecast.pools import PoolSetup
    from servecast.run import Result
    from servecast.setup import Setup


@dataclass(frozen=True)
class Steps:
    """The steps of a pool, each replica's: seconds in them (float64[replicas]), and of a mean step that decodes its
    sequences and tokens in KV, of the fullest its requests. `span_s`: to the end of the last step of the run."""

    busy_s: np.ndarray
    span_s: float
    decodes: float
    kv_tokens: float
    peak_batch: int

    @property
    def busy(self) -> float:
        """The share of the time that replicas spend in steps."""
        return float(self.busy_s.mean()) / self.span_s if self.span_s else 0.0

    @property
    def imbalance(self) -> float:
        """The busiest replica's time in steps over the mean."""
        return float(self.busy_s.max() / self.busy_s.mean()) if self.busy_s.any() else 1.0


def steps_of(result: Result, index: int) -> Steps:
    """The steps of the pool at `index`."""
    first, most = result.deployment.first[index], result.deployment.pools[index].replicas
    busy, span, sums, peak = np.zeros(most), 0.0, np.zeros(3), 0
    for block in result.step_blocks():
        span = max(span, float(block["end_s"].max(initial=0.0)))
        mine = block.where((block["replica"] >= first) & (block["replica"] < first + most))
        if not mine.height:
            continue
        at = mine["replica"].astype(np.int64) - first
        busy += np.bincount(at, mine["end_s"] - mine["start_s"], minlength=most)
        steps = mine["steps"] * (mine["decodes"] > 0)
        sums += [steps.sum(), np.dot(steps, mine["decodes"]), np.dot(steps, mine["kv_tokens"])]
        peak = max(peak, int((mine["prefill_requests"] + mine["decodes"]).max()))
    count = max(float(sums[0]), 1.0)
    return Steps(busy, span, float(sums[1]) / count, float(sums[2]) / count, peak)


def decode_step(pool: PoolSetup, steps: Steps) -> Step | None:
    """The parts of a step of decodes alone, as many as in the mean step that decodes; None where none does, where
    ranks and stages wait for each other, which is in no step of one engine, or where steps also draft."""
    layout, batch = pool.layout, max(1, round(steps.decodes))
    if layout.dp * layout.pp * layout.pcp > 1 or not steps.decodes or pool.drafts is not None:
        return None
    return step_of(pool.model, layout, pool.engine, pool.prices, pool.cost, [], batch, round(steps.kv_tokens))


def prompt_step(pool: PoolSetup, tokens: int) -> Step | None:
    """The parts of a step that reads so many tokens of one prompt; None as of `decode_step`."""
    layout = pool.layout
    if layout.dp * layout.pp * layout.pcp > 1 or not tokens or pool.drafts is not None:
        return None
    return step_of(pool.model, layout, pool.engine, pool.prices, pool.cost, [(tokens, 0)], 0, 0)


def busy_gpus(setup: Setup, result: Result) -> float:
    """The share of the time that GPUs run kernels: in steps, less what the host takes of a mean step of decodes."""
    busy = gpus = 0.0
    for i, pool in enumerate(setup.pools):
        steps = steps_of(result, i)
        busy += pool.gpus * steps.busy * (1 - host_share(decode_step(pool, steps)))
        gpus += pool.gpus
    return busy / gpus


def host_share(step: Step | None) -> float:
    """Of the seconds of a step, those in which its GPU waits for the host."""
    return share_of(step, "host")


def share_of(step: Step | None, name: str) -> float:
    """The share of a part, by its name in `calibrate.breakdown.NAMES`."""
    if step is None or not step.seconds:
        return 0.0
    return sum(part.seconds for part in step.parts if part.name == name) / step.seconds


class Evidence:
    """A run, looked at for causes in one of its pools. `cluster` is the mapping under that key of the scenario file."""

    def __init__(
        self, setup: Setup, result: Result, index: int, symptoms: tuple[Symptom, ...], cluster: Mapping[str, Any]
    ) -> None:
        self.setup, self.result, self.index, self.symptoms, self.cluster = setup, result, index, symptoms, cluster
        self.pool, self.engine = setup.pools[index], setup.pools[index].engine
        self.trace = setup.requests.trace
        self.summary = result.summary()
        self.steps = steps_of(result, index)
        self.step = decode_step(self.pool, self.steps)

    def metrics(self) -> set[str]:
        """What the symptoms are about."""
        return {symptom.metric for symptom in self.symptoms}

    def spent(self, metric: str, part: str, which: str = "mean") -> float:
        """The share of a part of TTFT or TPOT, of requests of this pool: see `sim.spent`."""
        parts = self.result.spent["pools"][self.pool.name].get(f"{metric}_ms", {}).get(which, {})
        whole = sum(parts.values())
        return float(parts.get(part, 0.0) / whole) if whole else 0.0

    def waiting(self) -> float:
        """The share of TTFT in the queue, in the mean or of the slowest requests, whichever is more."""
        return max(self.spent("ttft", "queue"), self.spent("ttft", "queue", "slowest"))

    @cached_property
    def reading(self) -> Step | None:
        """A step with the mean prompt, as far as it fits."""
        limits = (self.budget, self.engine.max_model_len, self.engine.ubatch_tokens or self.budget)
        return prompt_step(self.pool, min(round(float(self.trace.prompt_tokens.mean())), *limits))

    @property
    def replicas(self) -> int:
        """Of the pool."""
        return self.pool.replicas

    @property
    def alone(self) -> bool:
        """Whether the cluster is this pool, which reads and answers."""
        return len(self.setup.pools) == 1 and self.pool.role == "unified"

    @cached_property
    def kv_peak(self) -> float:
        """The share of the KV blocks that the fullest replica used."""
        return float(self.summary["pools"][self.pool.name]["kv_peak_fraction"] if "pools" in self.summary else
                     self.summary["kv_peak_fraction"])  # fmt: skip

    @cached_property
    def preemptions(self) -> int:
        """Of the pool's requests."""
        return int(self.summary["pools"][self.pool.name]["preemptions"] if "pools" in self.summary else
                   self.summary["preemptions"])  # fmt: skip

    @cached_property
    def shared(self) -> float | None:
        """The share of prompt tokens that earlier prompts began with; None where nobody knows."""
        prefix, prompts = self.trace.prefix, self.trace.prompt_tokens
        if prefix is None:
            return None
        known = np.minimum(prefix.known_blocks() * prefix.block_tokens, prompts)
        return float(known.sum() / prompts.sum())

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache."""
        return float(self.summary["prefix_cache_hit_rate"] or 0.0)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return int((self.trace.prompt_tokens + self.trace.output_tokens).max())

    @cached_property
    def chunks(self) -> float:
        """Steps that a prompt takes at least, on average."""
        return float(np.ceil(self.trace.prompt_tokens / self.budget).mean())

    @property
    def budget(self) -> int:
        """The most tokens of a prompt in one step."""
        chunk = self.engine.options.get("chunked_prefill_size")  # of SGLang
        return int(chunk) if chunk is not None and chunk > 0 else self.engine.max_num_batched_tokens

    @property
    def budget_option(self) -> str | None:
        """What the engine calls it; None where there is no such option."""
        names = ("chunked_prefill_size", self.engine.name_of("max_num_batched_tokens"))
        return next((name for name in names if name in self.engine.options), None)

    def option(self, field: str) -> str | None:
        """What the engine calls a field of `EngineSpec`; None where it has no such option."""
        name = self.engine.name_of(field)
        return name if name in self.engine.options else None

    def key(self, name: str) -> str:
        """The key of an engine option, of this pool."""
        return f"engine.{name}" if len(self.setup.pools) == 1 else f"cluster.pools.{self.index}.engine.{name}"

    def place(self, name: str) -> str:
        """The key of something else of the pool."""
        return f"cluster.pools.{self.index}.{name}" if "pools" in self.cluster else f"cluster.{name}"

    def host(self, name: str) -> str:
        """The key of a time of the host."""
        own = self.setup.scenario.cluster.pools[self.index].host is not None
        return f"cluster.pools.{self.index}.host.{name}" if own else f"host.{name}"
