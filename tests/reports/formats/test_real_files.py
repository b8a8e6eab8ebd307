"""Recorded runs: what is computed from the requests is what the tools themselves, or careful others, computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reports.formats import read_measured
from reports.formats.figures import KEYS
from tests.reference import reference

BENCH = [f"bench_rate{rate}_rep{rep}.json" for rate in (1, 2, 4) for rep in (1, 2)]
SERVING = ("rtx4090_llama-3.1-8b_tp1_mns256", "rtxpro6000_llama-3.1-8b_tp1", "rtxpro6000_qwen3-30b-a3b_dp2_ep2")


@pytest.mark.parametrize("name", BENCH)
def test_vllm_bench_serve(name: str) -> None:
    path = reference("reference", "vllm_cpu", "bench_serve", name)
    run = read_measured(path)
    stated: dict[str, Any] = json.loads(path.read_text())
    shared = {key: stated[key] for key in KEYS if stated.get(key) is not None}
    assert len(shared) == 31
    assert {key: run.summary[key] for key in shared} == pytest.approx(shared, rel=1e-9)
    assert (run.tool, run.version, run.model, run.rate) == ("vllm", "0.33", "tiny", stated["request_rate"])
    assert (run.completed, run.failed, run.doubts) == (60, 0, ())


@pytest.mark.parametrize("name", SERVING)
def test_llmservingsim_client_anchor(name: str) -> None:
    folder = reference("reference", "llmservingsim", "serving_runs", name)
    run = read_measured(folder / "requests.jsonl")
    known = json.loads((folder / "measured.json").read_text())
    client = known["from_client_arrival"]
    spreads = {"ttft_ms": client["ttft_ms"], "e2el_ms": client["e2e_ms"], "tpot_ms": known["tpot_ms"]}
    for metric, figures in spreads.items():
        stats = ("mean", "p50", "p90", "p99")
        assert [run.summary[f"{stat}_{metric}"] for stat in stats] == pytest.approx(
            [figures[stat] for stat in stats], abs=1e-3
        )
    assert run.duration_s == pytest.approx(known["makespan_s"], abs=1e-3)
    assert run.summary["output_throughput"] == pytest.approx(known["output_tok_per_s"], abs=0.01)
    assert run.summary["total_input_tokens"] == known["input_tokens"]
    assert (run.completed, run.failed, run.doubts) == (300, 0, ())


@pytest.mark.parametrize(("folder", "tag"), [("ref", "poisson4_r1"), ("ref", "calib_r1"), ("kv_pressure", "heavy6_r2")])
def test_vllm_cpu_rows(folder: str, tag: str) -> None:
    base = reference("reference", "vllm_cpu", folder)
    run = read_measured(base / f"requests_{tag}.csv")
    [known] = [entry for entry in json.loads((base / "summary.json").read_text())["runs"] if entry["tag"] == tag]
    for metric, name in (("ttft_ms", "ttft_ms"), ("tpot_ms", "tpot_ms"), ("e2el_ms", "e2e_ms")):
        stats = ("mean", "p50", "p90", "p99")
        assert [run.summary[f"{stat}_{metric}"] for stat in stats] == pytest.approx(
            [known[name][stat] for stat in stats], abs=0.002
        )
    assert run.summary["mean_itl_ms"] == pytest.approx(known["itl_ms"]["mean"], abs=0.002)
    assert run.summary["total_output_tokens"] == known["output_tokens"]
    assert (run.completed, run.doubts) == (known["n"], ())
