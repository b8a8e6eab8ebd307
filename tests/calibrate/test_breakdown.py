"""The parts of a step add up to it, and none is faster than the hardware."""

from __future__ import annotations

import pytest

from calibrate.breakdown import Step, step_of
from calibrate.cost import CompiledCost, compile_cost
from calibrate.operators import step_work
from calibrate.prices import Prices
from servecast.profiles import prices_of
from tests.calibrate.helpers import parts

CASES = [
    ("llama-3.1-8b", "h100-sxm", 1, "vllm-0.19"),
    ("llama-3.1-8b", "h100-sxm", 1, "vllm-0.10"),
    ("llama-3.1-70b-fp8", "b200-sxm", 4, "vllm-0.19"),
    ("deepseek-r1", "b200-sxm", 8, "sglang-0.5"),
    ("gpt-oss-20b", "h100-sxm", 1, "vllm-0.32"),
    ("minimax-m2.5", "b200-sxm", 4, "vllm-0.19"),
]
STEPS = [([(2000, 0)], 0, 0), ([(700, 300), (60, 0)], 5, 9000), ([], 1, 500), ([], 64, 64 * 3000)]


def priced(model: str, gpu: str, tp: int, preset: str) -> tuple[object, ...]:
    spec, layout, card, engine = parts(model, gpu, tp, preset)
    prices: Prices = prices_of(card, None)
    return spec, layout, engine, prices, compile_cost(spec, layout, engine, prices)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_parts_add_up_to_the_step(case: tuple[str, str, int, str]) -> None:
    spec, layout, engine, prices, cost = priced(*case)
    assert isinstance(cost, CompiledCost)
    for chunks, decodes, kv in STEPS:
        step: Step = step_of(spec, layout, engine, prices, cost, chunks, decodes, kv)  # type: ignore[arg-type]
        samples = decodes + len(chunks)
        host = step.parts[-1].seconds
        floor = cost.floor_s[samples] + cost.launch_s[sum(q for q, _ in chunks) + decodes] if chunks else 0.0
        if step.seconds > floor * (1 + 1e-9) and (chunks or step.seconds > cost.decode_floor_s[decodes] * (1 + 1e-9)):
            off = abs(host - cost.after_s[samples])
            assert off < 1e-5 * step.seconds, "else kernels are missing or counted twice"
        work = step_work(spec, layout, chunks, decodes, kv)  # type: ignore[arg-type]
        assert step.flops == pytest.approx(work.flops)
        assert step.hbm_bytes == pytest.approx(work.hbm_bytes)


def test_prompts_are_bound_by_compute_and_answers_by_bandwidth() -> None:
    spec, layout, engine, prices, cost = priced("llama-3.1-8b", "h100-sxm", 1, "vllm-0.19")
    prompt = step_of(spec, layout, engine, prices, cost, [(2000, 0)], 0, 0)  # type: ignore[arg-type]
    alone, many = (step_of(spec, layout, engine, prices, cost, [], n, n * 500) for n in (1, 256))  # type: ignore[arg-type]
    assert (prompt.bound, alone.bound) == ("compute", "bandwidth")
    assert prompt.intensity > 500 > many.intensity > 50 > 2 > alone.intensity
    named = {part.name: part for part in prompt.parts}
    assert named["weights"].bound == "compute"
    assert named["elementwise"].bound == "bandwidth"


def test_a_small_model_on_a_fast_gpu_waits_for_the_host() -> None:
    spec, layout, engine, prices, cost = priced("qwen2.5-0.5b", "h100-sxm", 1, "vllm-0.19")
    assert step_of(spec, layout, engine, prices, cost, [], 1, 50).bound == "host"  # type: ignore[arg-type]
