"""Real vLLM 0.19 runs with every request's times (LLMServingSim's serving_runs), replayed as they arrived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.accuracy.rows import Row, Uncovered
from benchmarks.accuracy.run import run
from calibrate.fit import fit_profile
from calibrate.importers import import_measurements
from reports.formats import read_measured

DATA = "recorded runs of vLLM 0.19 (LLMServingSim, MIT)"
BLOCK_TOKENS = 16  # of the ids of the file, which go on into the answer; 8 % of the prompts' tokens are shared
DIRECT = {"request": "0s", "prompt_token": "0s"}  # the engine was called in its process, with token ids


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run: its folder, GPU, engine options, model, workload, and how it was spread; `layers` names the layer tables
    of the very GPU, which hold this model."""

    folder: str
    gpu: str
    engine: dict[str, Any]
    layers: str
    model: str = "llama-3.1-8b"
    workload: str = "sharegpt-llama-3.1-8b-300-sps10.blocks.jsonl"
    cluster: dict[str, Any] = field(default_factory=dict)
    layout: str = ""


RUNS = (
    Recorded(
        "rtx4090_llama-3.1-8b_tp1_mns256", "rtx-4090",
        {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 32768, "num_gpu_blocks_override": 2588},
        "rtx4090",
    ),
    Recorded(
        "rtxpro6000_llama-3.1-8b_tp1", "rtx-pro-6000",
        {"max_num_seqs": 128, "max_num_batched_tokens": 2048}, "rtxpro6000",
    ),
    Recorded(
        "rtxpro6000_qwen3-30b-a3b_dp2_ep2", "rtx-pro-6000", {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "rtxpro6000", "qwen3-30b-a3b", "sharegpt-qwen3-300-sps10.blocks.jsonl",
        {"dp": 2, "ep": True, "router": "least-outstanding"}, "dp 2, ep; ",
    ),
)  # fmt: skip
METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s"}


def compare(reference: Path, scratch: Path) -> Iterator[Row | Uncovered]:
    """Each run with the layer tables as its profile and, where one is shipped from other sources, with that."""
    for recorded in RUNS:
        profile = _fitted(recorded, reference, scratch)
        yield _compared(recorded, reference, scratch, "the layers of this GPU and model", profile)
        if recorded.gpu != "rtx-4090":  # whose shipped profile is fitted to these layers
            yield _compared(recorded, reference, scratch, "the shipped profile", None)


def _fitted(recorded: Recorded, reference: Path, scratch: Path) -> Path:
    measured = import_measurements("llmservingsim", reference / "llmservingsim" / "profiles", recorded.gpu)
    path = scratch / f"{recorded.gpu}.json"
    path.write_text(fit_profile([measured]).to_text(), "utf-8")
    return path


def _compared(recorded: Recorded, reference: Path, scratch: Path, priced: str, profile: Path | None) -> Row:
    folder = reference / "llmservingsim"
    trace = scratch / "trace.jsonl"
    work = pl.read_ndjson(folder / "workloads" / recorded.workload)
    work.select(
        arrival_s=pl.col("arrival_time_ns") / 1e9, input_tokens="input_toks", output_tokens="output_toks",
        block_ids=pl.col("block_ids").list.head(pl.col("input_toks") // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS,
    ).write_ndjson(trace)  # fmt: skip
    cluster = {"gpu": recorded.gpu} | recorded.cluster | ({"profile": str(profile)} if profile else {})
    ours = run({
        "model": recorded.model, "engine": {"preset": "vllm-0.19", **recorded.engine}, "cluster": cluster,
        "workload": {"trace": str(trace)}, "host": DIRECT,
    }).requests.sort("id")  # fmt: skip
    found = read_measured(folder / "serving_runs" / recorded.folder / "requests.jsonl")
    assert found.requests is not None
    theirs = found.requests
    times = {
        "TTFT": ours["first_token_s"] - ours["arrival_s"],
        "TPOT": (ours["finish_s"] - ours["first_token_s"]) / (ours["output_tokens"] - 1),
        "E2E": ours["finish_s"] - ours["arrival_s"],
    }
    measured = {name: 1e3 * float(theirs[column].mean()) for name, column in METRICS.items()}  # type: ignore[arg-type]
    predicted = {name: 1e3 * float(times[name].mean()) for name in METRICS}  # type: ignore[arg-type]
    single = {
        name: float(np.mean(np.abs(times[name].to_numpy() / theirs[column].to_numpy() - 1)))
        for name, column in METRICS.items()
    }
    name = {"llama-3.1-8b": "Llama-3.1-8B, bf16"}.get(recorded.model, recorded.model)
    load = "300 requests, overloaded"
    return Row(DATA, name, recorded.gpu, recorded.layout + priced, load, measured, predicted,
               {"single requests": single})  # fmt: skip
