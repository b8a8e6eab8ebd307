"""A real serving run that nothing was fitted to, predicted with the shipped profile: the figures that README states."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from servecast import load_scenario, simulate
from tests.reference import reference


def test_llama_8b_on_rtx_pro_6000(tmp_path: Path) -> None:
    """LLMServingSim's record of vLLM 0.19.0: 300 requests, overloaded, times from the client's arrival."""
    run = reference("reference", "llmservingsim", "serving_runs", "rtxpro6000_llama-3.1-8b_tp1")
    work = reference("reference", "llmservingsim", "workloads", "sharegpt-llama-3.1-8b-300-sps10.blocks.jsonl")
    rows = pl.read_ndjson(work).select(
        arrival_s=pl.col("arrival_time_ns") / 1e9, input_tokens="input_toks", output_tokens="output_toks"
    )
    rows.write_csv(tmp_path / "t.csv")
    scenario = {
        "model": "llama-3.1-8b",
        "engine": {"preset": "vllm-0.19", "max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "cluster": {"gpu": "rtx-pro-6000"},
        "workload": {"trace": "t.csv"},
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    ours = simulate(load_scenario(tmp_path / "s.yaml")).summary()
    measured = json.loads((run / "measured.json").read_text(encoding="utf-8"))
    client = measured["from_client_arrival"]
    off = {
        "ttft": ours["mean_ttft_ms"] / client["ttft_ms"]["mean"] - 1,
        "tpot": ours["mean_tpot_ms"] / measured["tpot_ms"]["mean"] - 1,
        "e2e": ours["mean_e2el_ms"] / client["e2e_ms"]["mean"] - 1,
    }
    assert off == pytest.approx({"ttft": -0.07, "tpot": -0.025, "e2e": -0.04}, abs=0.01)
