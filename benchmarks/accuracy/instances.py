"""One instance, two, one that reads beside one that answers, and another model, on one machine (LLMServingSim's ISPASS
artifact).

The machine is slower than its GPUs' kernels: a factor on all of them is fitted to the one instance's TPOT. What a
connector costs the decode instance a step is fitted to the split one's TPOT. All else is foretold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
from scipy.optimize import brentq

from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.run import run

DATA = "one, two and split instances (LLMServingSim's ISPASS artifact, MIT; means only)"
ASSUMED = "vLLM 0.10, whose version the source does not state; NIXL between the GPUs of a node"
DENSE, EXPERTS = "llama-3.1-70b", "mixtral-8x7b"
WORKLOADS = {DENSE: "sharegpt_req300_rate10_llama.blocks.jsonl", EXPERTS: "sharegpt_req300_rate10_mixtral.blocks.jsonl"}
ENGINE = {"preset": "vllm-0.10", "max_num_batched_tokens": 2048, "max_model_len": 8192, "gpu_memory_utilization": 0.92}
INSTANCE = {"gpu": "h100-sxm", "tp": 4}
STEP_S = 0.8e-3
"""The preset's host time a step, to which the connector's comes."""


def compare(reference: Path, scratch: Path) -> Iterator[Row]:
    """The three layouts."""
    folder = reference / "llmservingsim"
    traces = {model: scratch / f"{model}.jsonl" for model in WORKLOADS}
    for model, file in WORKLOADS.items():
        pl.read_ndjson(folder / "workloads" / file).select(
            arrival_s=pl.col("arrival_time_ns") / 1e9, input_tokens="input_toks", output_tokens="output_toks"
        ).write_ndjson(traces[model])
    table = pl.read_csv(folder / "ispass26" / "mean_latency_by_framework.csv").filter(device="H100")
    measured = {row["case"]: _named(row) for row in table.filter(framework="vLLM").iter_rows(named=True)}
    others = {row["case"]: _named(row) for row in table.filter(framework="LLMServingSim2").iter_rows(named=True)}

    def simulated(cluster: dict[str, Any], kernels: float, model: str = DENSE) -> dict[str, float]:
        s = run({
            "model": model, "engine": ENGINE, "cluster": cluster, "workload": {"trace": str(traces[model])},
            "host": {"kernels": kernels},
        }).summary()  # fmt: skip
        return {"tokens/s": s["output_throughput"], "TTFT": s["mean_ttft_ms"], "TPOT": s["mean_tpot_ms"]}

    def split(step_s: float) -> dict[str, Any]:
        host = {"step": f"{1e3 * step_s:.6f}ms", "kernels": kernels}
        return {"pools": [INSTANCE | {"role": "prefill"}, INSTANCE | {"role": "decode", "host": host}]}

    kernels = _solved(lambda x: simulated(INSTANCE, x)["TPOT"] - measured["SD"]["TPOT"], 1.0, 1.5)
    step_s = _solved(lambda x: simulated(split(x), kernels)["TPOT"] - measured["PDD"]["TPOT"], STEP_S, 15e-3)
    connector_ms = 1e3 * (step_s - STEP_S)
    assumed = (
        f"{ASSUMED}. Fitted: all kernels x {kernels:.2f} to the TPOT of the one instance, and {connector_ms:.1f} ms a "
        "decode step, for the connector, to the TPOT of the split one"
    )
    for case, model, layout, cluster, fitted in (
        ("SD", DENSE, "tp 4", INSTANCE, f"kernels x {kernels:.2f}, to this TPOT"),
        ("MD", DENSE, "2 replicas of tp 4", INSTANCE | {"replicas": 2}, "nothing of this row"),
        ("SM", EXPERTS, "tp 4", INSTANCE, "nothing of this row"),
        ("PDD", DENSE, "1 prefill + 1 decode, tp 4 each", split(step_s),
         f"{connector_ms:.1f} ms a decode step for the connector, to this TPOT"),
    ):  # fmt: skip
        yield Row(
            DATA, model, "h100-sxm", layout, "300 requests, 10/s", measured[case], simulated(cluster, kernels, model),
            {"LLMServingSim 2": others[case]}, fitted, assumed,
        )  # fmt: skip


def _named(row: dict[str, Any]) -> dict[str, float]:
    return {"tokens/s": row["output_tok_per_s"], "TTFT": row["mean_ttft_ms"], "TPOT": row["mean_tpot_ms"]}


def _solved(off: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(off, low, high, xtol=1e-3 * low))
