"""Steps at the peaks: as counted step by step, and never more than they take."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.breakdown import step_of
from calibrate.layout import Parallelism
from calibrate.utilisation import AtPeaks
from servecast.profiles import prices_of
from tests.calibrate.helpers import cost, parts


def rows(**columns: float) -> dict[str, np.ndarray]:
    names = ("steps", "prefill_requests", "prefill_tokens", "decodes", "kv_tokens", "draft_tokens")
    return {name: np.array([float(columns.get(name, name == "steps"))]) for name in names}


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_steps_are_those_of_the_breakdown(model: str) -> None:
    spec, layout, gpu, engine = parts(model, "h100-sxm")
    prices, priced = prices_of(gpu, None), cost(model, "h100-sxm")
    at = AtPeaks(spec, layout, gpu)
    for chunks, decodes, kv in (([(1000, 0)], 0, 0), ([(500, 0), (500, 0)], 7, 9000), ([], 32, 40_000)):
        step = step_of(spec, layout, engine, prices, priced, chunks, decodes, kv)
        new = sum(q for q, _ in chunks)
        compute, bandwidth = at.seconds(
            rows(prefill_requests=len(chunks), prefill_tokens=new, decodes=decodes, kv_tokens=kv)
        )
        assert compute[0] == pytest.approx(step.compute_s, rel=1e-6)
        assert bandwidth[0] == pytest.approx(step.bandwidth_s, rel=1e-6)


def test_a_run_of_steps_is_the_sum_of_them() -> None:
    spec, layout, gpu, _ = parts("llama-3.1-8b", "h100-sxm")
    at = AtPeaks(spec, layout, gpu)
    run = np.array(at.seconds(rows(steps=50, decodes=8, kv_tokens=8000)))[:, 0]
    each = [np.array(at.seconds(rows(decodes=8, kv_tokens=8000 + 8 * i)))[:, 0] for i in range(50)]
    assert run == pytest.approx(np.sum(each, axis=0))


def test_stages_share_the_work() -> None:
    spec, _, gpu, _ = parts("llama-3.1-70b", "h100-sxm", 4)
    whole, halves = (
        AtPeaks(spec, Parallelism(4, pp=pp), gpu).seconds(rows(decodes=64, kv_tokens=64_000)) for pp in (1, 2)
    )
    assert halves[0][0] == pytest.approx(whole[0][0] / 2)
    assert halves[1][0] == pytest.approx(whole[1][0] / 2, rel=0.02)


def test_context_parallel_ranks_share_a_prompt() -> None:
    spec, _, gpu, _ = parts("deepseek-v2-lite", "h200-sxm")
    prompt = rows(prefill_requests=1, prefill_tokens=8000)
    whole, quarter = (AtPeaks(spec, Parallelism(1, pcp=pcp), gpu).seconds(prompt)[0][0] for pcp in (1, 4))
    assert quarter == pytest.approx(whole / 4, rel=0.1)
