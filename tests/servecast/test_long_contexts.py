"""Prompts of a million tokens and answers of a hundred thousand: exact, quick, and turned away where they cannot be."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import servecast
from sim.schedulers.vllm_v1 import VllmV1
from tests.sim.engine import LinearCost
from tests.sim.test_oracle import same

SHORTS = 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_million_tokens_in_and_a_hundred_thousand_out_equal_the_oracle(asynchronous: bool) -> None:
    cost = LinearCost(base=0.01, token=1e-5, decode=0.001, kv=1e-9, attention=1e-11)
    requests = [(0.0, 1_000_000, 64, 64), (5.0, 300, 120_000, 120_000), (6.0, 20_000, 5, 5)]
    began = perf_counter()
    naive, log = same(VllmV1(8192, 8), cost, 80_000, 16, asynchronous, requests)
    assert perf_counter() - began < 60, "nearly all of it is the naive engine's"
    steps = log.steps.table()
    assert len(naive.steps) > 120_000
    assert len(steps["step"]) < 2000, "decode steps in which nothing changes are one row"
    assert int((steps["prefill_tokens"] == 8192).sum()) >= 1_000_000 // 8192 - 1


def scenario(tmp_path: Path, cluster: dict[str, Any], prompt: int = 1_000_000, **engine: Any) -> servecast.Scenario:
    trace = tmp_path / "long.csv"
    rows = [f"0,{prompt},64", *(f"{0.001 * (i + 1)},8192,64" for i in range(SHORTS))]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    options = {"preset": "vllm-0.24", "quantization": "fp8", "max_model_len": 1_048_576} | engine
    file = tmp_path / "s.yaml"
    file.write_text(
        f"model: llama-4-scout\nengine: {options}\ncluster: {cluster}\nworkload: {{trace: long.csv}}\n".replace("'", "")
    )
    return servecast.load_scenario(file)


def test_short_prompts_do_not_wait_for_a_million_tokens_where_each_rank_has_its_own_queue(tmp_path: Path) -> None:
    """vllm-project/vllm#51454: DeepSeek-V4-Flash on 8 x B200, one prompt of a million tokens and 8 of 8K (64 out): as
    one engine (tp 8) the short ones' TTFT p50 is 63.9 s, as 8 data parallel ranks 0.57 s. Another model here: which
    way, and whether it is a matter of tens of seconds against one."""
    began = perf_counter()
    p50 = {}
    for name, cluster in (("one", {"gpu": "b200-sxm", "tp": 8}), ("ranks", {"gpu": "b200-sxm", "replicas": 8})):
        rows = servecast.simulate(scenario(tmp_path, cluster)).requests
        assert set(rows["status"]) == {"finished"}
        p50[name] = float(np.median(rows.filter(rows["prompt_tokens"] == 8192)["ttft_s"].to_numpy()))
    assert perf_counter() - began < 30
    assert 5 < p50["one"] < 600
    assert p50["ranks"] < 3
    assert p50["one"] > 10 * p50["ranks"]


def test_what_cannot_be_is_turned_away_with_its_reason(tmp_path: Path) -> None:
    one = {"gpu": "b200-sxm", "tp": 8}
    rows = servecast.simulate(scenario(tmp_path, one, prompt=1_100_000)).requests
    assert rows["reason"].to_list() == ["prompt_too_long", *["length"] * SHORTS]
    rows = servecast.simulate(scenario(tmp_path, one, prompt=1_048_570)).requests
    assert rows["reason"][0] == "over_max_model_len"
    with pytest.raises(servecast.ServecastError, match="max_model_len"):
        servecast.simulate(scenario(tmp_path, {"gpu": "h100-sxm", "tp": 2}, max_model_len=4_000_000))
