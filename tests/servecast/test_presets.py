"""Every preset runs the same workload, and can be written down and read again."""

from __future__ import annotations

import pytest

import servecast
from calibrate.engine import preset_names
from calibrate.ubatch import InPieces
from servecast.errors import ServecastError
from servecast.run import tables_of
from servecast.scenario import Scenario
from servecast.setup import set_up
from tests.servecast.helpers import small
from tests.sim.engine import LinearCost

WORKLOAD = {
    "num_requests": 150,
    "arrivals": {"kind": "poisson", "rate": 4},
    "lengths": {
        "prompt": {"kind": "lognormal", "mean": 500, "cv": 1},
        "output": {"kind": "lognormal", "mean": 60, "cv": 1},
    },
}


def scenario(preset, **options):
    return small(engine={"preset": preset, **options}, workload=WORKLOAD)


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_runs_and_is_written_down_in_its_own_words(preset):
    setup = set_up(scenario(preset))
    summary = servecast.simulate(setup).summary()
    assert summary["completed"] == 150
    again = set_up(Scenario.model_validate(setup.resolved()))
    assert again.pool.engine.options == setup.pool.engine.options
    assert servecast.simulate(again).summary()["mean_e2el_ms"] == summary["mean_e2el_ms"]


def test_tgi_rejects_prompts_that_no_pass_can_hold():
    summary = servecast.simulate(scenario("tgi-3", max_batch_prefill_tokens=1000)).summary()
    assert 0 < summary["rejected"] < 50
    assert summary["completed"] + summary["rejected"] == 150


def test_request_level_batching_makes_them_wait():
    """Orca's point: whoever comes during a batch waits for its longest answer."""
    static, orca = (
        servecast.simulate(scenario(preset, **options)).summary()
        for preset, options in (("transformers", {"batch_size": 16}), ("orca", {"max_batch_size": 16}))
    )
    assert static["mean_ttft_ms"] > 5 * orca["mean_ttft_ms"]


def test_versions_between_the_engines_of_vllm_have_no_preset():
    assert set_up(scenario("vllm-0.7.3")).pool.engine.preset == "vllm-0.6"
    with pytest.raises(ServecastError, match=r"vllm-0.6 stands for versions up to 0.7"):
        set_up(scenario("vllm-0.9"))


def test_vllm_0_6_chunks_by_itself_where_the_model_is_long():
    assert set_up(scenario("vllm-0.6")).pool.engine.policy["enable_chunked_prefill"]
    short = set_up(scenario("vllm-0.6", max_model_len=32768)).pool.engine
    assert (short.policy["enable_chunked_prefill"], short.max_num_batched_tokens) == (False, 32768)


@pytest.mark.parametrize(
    ("preset", "options", "said"),
    [
        ("llama.cpp", {"parallel": 600}, "ubatch_size 512"),
        ("orca", {"max_model_len": 20000}, "engine.max_model_len 20000 is above 8192"),
        ("tgi-3", {"max_total_tokens": 10**6}, "engine.max_total_tokens 1000000 is above the 131072"),
        ("mlc-llm", {"prefix_cache_mode": "radix"}, "'radix' is not modelled"),
        ("vllm-0.6", {"enable_prefix_caching": True}, "V0's prefix cache is not modelled"),
        ("vllm-0.6", {"preemption_mode": "swap"}, "swap is not modelled with chunked prefill"),
        ("vllm-0.6", {"swap_space": -1}, "swap_space is -1; expected a number of at least 0"),
    ],
)
def test_what_is_not_modelled_is_refused(preset, options, said):
    with pytest.raises(ServecastError, match=said):
        set_up(scenario(preset, **options))


def test_a_step_in_pieces_costs_what_its_pieces_cost():
    whole = LinearCost()
    cost = InPieces(whole, 8)
    assert cost.step_s([(3, 10), (2, 0)], 3, 90) == whole.step_s([(3, 10), (2, 0)], 3, 90)
    pieces = whole.step_s([(5, 10)], 3, 90) + whole.step_s([(2, 15), (6, 0)], 0, 0) + whole.step_s([(4, 6)], 0, 0)
    assert cost.step_s([(7, 10), (10, 0)], 3, 90) == pytest.approx(pieces)


@pytest.mark.parametrize(
    ("preset", "admission", "late", "most"),
    [("vllm-0.19", "prompt", False, 521), ("vllm-0.24", "window", False, 521), ("vllm-0.32", "window", True, 1033)],
)
def test_what_windows_reserve_and_keep_by_version(preset, admission, late, most):
    """gpt-oss: windows of 128 tokens beside 8,192 in flight, or twice as many, in blocks of 16."""
    tables = tables_of(set_up(small(model="gpt-oss-20b", engine={"preset": preset})).pool)
    assert (tables.admission, tables.late, tables.windows[0].most) == (admission, late, most)
