"""The longest gap of each request, and when any of its tokens came, equal those of all its gaps, listed one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import servecast
from reports.token_gaps import token_gaps
from tests.servecast.helpers import QUICKSTART

CASES: dict[str, dict[str, Any]] = {
    "mixed steps": {},
    "decodes pause for prompts": {"engine": {"preset": "sglang-0.5"}, "workload.arrivals.rate": 12},
    "few blocks": {"cluster.gpu": "rtx-4090", "engine.max_model_len": 8192, "workload.arrivals.rate": 3},
    "synchronous": {"engine": {"preset": "vllm-0.10"}, "cluster.replicas": 2, "workload.arrivals.rate": 16},
    "swapped": {"engine": {"preset": "vllm-0.6", "max_model_len": 8192}, "cluster.gpu": "rtx-4090"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_longest_gaps_are_the_longest_of_all(changes: dict[str, Any]) -> None:
    scenario = servecast.load_scenario(QUICKSTART, {"workload.num_requests": 400, **changes})
    result = servecast.simulate(scenario)
    every = token_gaps(result.requests, result.steps, result.gaps)
    found = result.requests["longest_gap_s"].to_numpy()
    known = [i for i, gaps in enumerate(every) if gaps is not None and len(gaps)]
    assert len(known) > 300
    expected = np.array([gaps.max() for i in known if (gaps := every[i]) is not None])
    assert found[known] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    summary = result.summary()
    assert summary["p99_longest_gap_ms"] == pytest.approx(1e3 * np.percentile(expected, 99), rel=0.02)
    assert summary["p50_longest_gap_ms"] > summary["p50_itl_ms"]
    left_out = result.gaps["id"].n_unique()
    assert left_out > 5 or "cluster.gpu" not in changes, "some are preempted there"
    done = result.requests.filter(result.requests["status"] == "finished")
    first, place = done["first_token_s"].to_numpy(), {id: i for i, id in enumerate(done["id"].to_list())}
    ids = result.requests["id"].to_list()
    for share in (0.1, 0.5, 0.9):
        number = np.maximum(1, (share * done["output_tokens"].to_numpy()).astype(np.int64))
        times = result._streams.token_s(number)
        for row in known:
            i, gaps = place[ids[row]], every[row]
            assert gaps is not None
            assert times[i] == pytest.approx(first[i] + gaps[: number[i] - 1].sum(), rel=1e-7), (share, left_out)


def test_chunks_shorten_the_longest_gap() -> None:
    long = QUICKSTART.with_name("long-prompts.yaml")
    whole, chunks = (
        servecast.simulate(
            servecast.load_scenario(long, {"engine.max_num_batched_tokens": budget, "workload.num_requests": 300})
        ).summary()
        for budget in (40960, 2048)
    )
    assert whole["p99_longest_gap_ms"] > 5 * chunks["p99_longest_gap_ms"]


def test_what_has_no_gap_has_none() -> None:
    one = servecast.load_scenario(
        QUICKSTART, {"workload.num_requests": 20, "workload.lengths.output": {"kind": "fixed", "tokens": 1}}
    )
    result = servecast.simulate(one)
    assert result.requests["longest_gap_s"].null_count() == 20
    assert result.summary()["p99_longest_gap_ms"] is None
    stages = servecast.load_scenario(
        QUICKSTART, {"workload.num_requests": 20, "cluster.pp": 2, "engine.preset": "vllm-0.32"}
    )
    assert servecast.simulate(stages).requests["longest_gap_s"].null_count() == 20


def test_the_first_answer_token_comes_after_the_reasoning() -> None:
    base = {"workload.num_requests": 200}
    plain = servecast.simulate(servecast.load_scenario(QUICKSTART, base))
    assert "mean_first_answer_ms" not in plain.summary()
    assert plain.column("first_answer_s") == pytest.approx(plain.column("ttft_s"))
    half = servecast.simulate(servecast.load_scenario(QUICKSTART, {**base, "workload.reasoning": 0.5}))
    summary = half.summary()
    assert summary["mean_ttft_ms"] == plain.summary()["mean_ttft_ms"], "the engine does not know what is reasoning"
    middle = (summary["mean_ttft_ms"] + summary["mean_e2el_ms"]) / 2
    assert summary["mean_first_answer_ms"] == pytest.approx(middle, rel=0.03)


def test_classes_reason_on_their_own() -> None:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 100}}
    classes = [{"name": "chat", "lengths": lengths}, {"name": "think", "lengths": lengths, "reasoning": 0.9}]
    workload = {"num_requests": 100, "arrivals": {"kind": "poisson", "rate": 5}, "classes": classes}
    result = servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload": workload}))
    rows = result.requests
    waits = rows.with_columns(more=rows["first_answer_s"] - rows["ttft_s"])
    by = {name: group["more"].mean() for (name,), group in waits.group_by("class")}
    assert by["chat"] == 0.0
    assert by["think"] > 0.4
