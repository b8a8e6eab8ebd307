"""Each request's longest gap between two tokens equals the longest of all its gaps, listed one by one."""

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
