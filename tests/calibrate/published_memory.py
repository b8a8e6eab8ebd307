"""Start-up logs that people published: what the engine said of its memory, on which hardware and with which options.

`pool`: tokens from a KV pool whose size is given; `derived`: GiB of KV cache that must be derived from the utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from calibrate.activations import profile_peaks
from calibrate.engine import resolve_engine
from calibrate.hardware import GIB, load_gpu
from calibrate.layout import Parallelism
from calibrate.memory import Logged, MemoryPlan, plan_memory
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.parts import Quantized
from calibrate.serving import served
from calibrate.storage import grouped_int


@dataclass(frozen=True)
class Log:
    """One published start-up: `kv_gib` of KV cache, or `tokens` of it; `weights_gib` where they were logged."""

    name: str
    source: str
    model: str
    gpu: str
    kv_gib: float = 0.0
    tokens: int = 0
    layout: Parallelism = field(default_factory=lambda: Parallelism(1))
    preset: str = "vllm-0.10"
    options: dict[str, object] = field(default_factory=dict)
    weights_gib: float | None = None

    def spec(self) -> ModelSpec:
        if self.model == "kimi-k2-thinking":  # int4 experts, the rest in 16 bit
            experts = (Quantized("experts", grouped_int(4, 32, False), 60),)
            return replace(load_model("kimi-k2"), quantized=experts, method="compressed-tensors", name=self.model)
        return load_model(self.model)

    def plan(self, **more: object) -> MemoryPlan:
        model, gpu = self.spec(), load_gpu(self.gpu)
        engine = resolve_engine({"preset": self.preset, **self.options, **more}, gpu, model)
        logged = Logged(weights=None if self.weights_gib is None else round(self.weights_gib * GIB))
        return plan_memory(model, self.layout, gpu, engine, logged)

    def predicted_gib(self) -> float:
        return self.plan().kv_bytes / GIB

    def logged_gib(self) -> float:
        """The KV cache in GiB, from its tokens where only they are known."""
        plan = self.plan()
        blocks = self.tokens // plan.block_size * len(plan.pool.groups)
        return self.kv_gib or blocks * plan.block_bytes / GIB


TP2, TP4, TP8 = Parallelism(2), Parallelism(4), Parallelism(8)
SMALL = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
EAGER = {"enforce_eager": True}

DERIVED = [
    Log("Llama-2-7B", "inference-sim#529", "llama-2-7b", "h100-sxm", tokens=119_408, options=SMALL),
    Log("Qwen3-32B", "inference-sim#529", "qwen3-32b", "h100-sxm", tokens=2204 * 16,
        options={"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 32_768}),
    Log("Qwen3-0.6B", "vllm#24577", "qwen3-0.6b", "a100-sxm", kv_gib=69.66, options={"max_model_len": 4096}),
    Log("Llama-3.1-8B", "LLMServingSim, vLLM 0.11.1", "llama-3.1-8b", "a6000", kv_gib=26.46, options=EAGER),
    Log("Llama-3.1-8B, tp 2", "LLMServingSim, vLLM 0.11.1", "llama-3.1-8b", "a6000", kv_gib=33.86, layout=TP2,
        options=EAGER),
    Log("Llama-3.1-8B", "LLMServingSim, vLLM 0.13", "llama-3.1-8b", "a6000", kv_gib=27.04,
        options={**SMALL, **EAGER, "max_model_len": 2048}),
    Log("Llama-3.1-8B", "LLMServingSim, vLLM 0.19.0", "llama-3.1-8b", "rtx-4090", tokens=2588 * 16, preset="vllm-0.19",
        options={"max_model_len": 32_768}),
    Log("Kimi-K2-Thinking, tp 8", "vLLM recipes", "kimi-k2-thinking", "h200-sxm", kv_gib=46.80, layout=TP8),
    Log("Qwen3-235B-A22B-FP8, tp 4", "vllm#21348", "qwen3-235b-a22b-fp8", "h100-sxm", kv_gib=8.11, layout=TP4),
    Log("gpt-oss-120b", "vllm#23278", "gpt-oss-120b", "h100-sxm", kv_gib=-2.14, weights_gib=65.9651),
    Log("gpt-oss-120b, 0.95, 1,024 tokens", "vllm#27508", "gpt-oss-120b", "h100-sxm", kv_gib=1.71, weights_gib=65.9651,
        options={"gpu_memory_utilization": 0.95, "max_num_batched_tokens": 1024}),
    Log("Qwen3-Coder-480B-FP8, dp 8, ep", "vLLM recipes #12", "qwen3-coder-480b-a35b", "h200-sxm", kv_gib=48.66,
        layout=Parallelism(1, dp=8, ep=True), options={"quantization": "fp8"}),
]  # fmt: skip

ACTIVATIONS = [
    ("Llama-3-8B", "vllm#10511", "llama-3-8b", 1, 256, 8192, 1.26),
    ("Llama-3-8B, tp 2", "vllm#10511", "llama-3-8b", 2, 256, 8192, 1.26),
    ("Qwen3-30B-A3B", "a published debug log", "qwen3-30b-a3b", 1, 1024, 8192, 5.58),
]
"""Name, source, model, tp, sequences, tokens a step, GiB of the profiling run's peak as logged."""


def activation_gib(model: str, tp: int, sequences: int, tokens: int) -> float:
    gpu, spec = load_gpu("h100-sxm"), load_model(model)
    options = {"preset": "vllm-0.10", "max_num_seqs": sequences, "max_num_batched_tokens": tokens}
    engine = resolve_engine(options, gpu, spec)
    return profile_peaks(served(spec, engine), Parallelism(tp), engine).total / GIB


if __name__ == "__main__":  # the table of docs/memory.md
    for log in DERIVED:
        plan, said = log.plan(), log.logged_gib()
        ours = plan.kv_bytes / GIB
        error = f"{ours - said:+.2f} | {100 * (ours / said - 1):+.1f} %"
        print(f"| {log.name} | {log.gpu} | {log.source} | {said:.2f} | {ours:.2f} | {error} |", plan.weight_bytes / GIB)
    for name, _, model, tp, sequences, tokens, said in ACTIVATIONS:
        print(name, said, f"{activation_gib(model, tp, sequences, tokens):.2f}")
