"""BLIS's experiments: vLLM 0.15.1 on H100, constant rates, a few users who ask the same again and again.

inference-perf's `shared_prefix` data has one fixed question a user, behind the system prompt of the user's group, and
goes through the users in turn; the recorded prompt lengths show that answers did not join the next prompt. So from its
second question on a user's whole prompt is in the prefix cache, save its last block. The ITL that the source states
divides by retokenised answers, up to a third shorter; here it is (E2E - TTFT) / (requested output - 1). Of Llama 4 the
text model alone is run, which is all that these requests need; no prompt is as long as a chunk of its attention.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.rows import Row, Uncovered
from benchmarks.accuracy.run import run

DATA = "BLIS's training experiments (vLLM 0.15.1, H100)"
EVALUATION = "BLIS's evaluation runs (vLLM 0.15.1)"
GPUS = {"H100": "h100-sxm", "A100-80GB": "a100-sxm", "L40S": "l40s"}
MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "01-ai/Yi-34B": "yi-34b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout-fp8",
}
ASSUMED = (
    "each user repeats one prompt, of the length that was asked for (the load generator's code; lengths are recorded "
    "for Llama 2 only: they do not grow, and are 5 % longer as it counts); KV blocks offloaded to "
    "the host play no part"
)
LIKE = {"general": "20260217-231439", "general-lite": "60", "codegen": "20260217-155451",
        "roleplay": "20260217-162547"}  # fmt: skip
"""Evaluation's loads are named, not published: the training experiment that has a load of that name."""
ASSUMED_LOADS = (
    "rates, lengths, users and `max_num_seqs` are those of the training experiment whose load has the same name"
)
EXPERTS = "; experts at the times of fp8 with block scales, as nobody measured kernels of a scale a channel"
METRICS = {"E2E": "e2e_mean_ms", "TTFT": "ttft_mean_ms"}
BLOCK_TOKENS = 16
ORDER = 11  # seed of the order in which users ask; the tool shuffles them once


def compare(reference: Path, scratch: Path, one_in: int = 1) -> Iterator[Row | Uncovered]:
    """A row a stage; of the evaluation runs `one_in` so many."""
    folder = reference / "blis"
    golden = json.loads((folder / "golden" / "trained_physics_iter29.json").read_text("utf-8"))
    measured = _measured(folder)
    for experiment in golden["experiments"]:
        experts = EXPERTS * ("Llama-4" in experiment["model"])
        yield from _compared(experiment, measured[experiment["id"]], scratch, DATA, ASSUMED + experts)
    yield from _evaluation(folder, {each["id"]: each for each in golden["experiments"]}, scratch, one_in)


def _evaluation(
    folder: Path, trained: Mapping[str, Mapping[str, Any]], scratch: Path, one_in: int
) -> Iterator[Row | Uncovered]:
    """The rows whose rates and limits are not published, with those of the training experiments."""
    stages: dict[str, dict[int, dict[str, float]]] = {}
    described: dict[str, dict[str, str]] = {}
    with (folder / "measured_vllm.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["set"] == "eval38" and row["stage_index"].isdigit():
                described[row["exp_id"]] = row
                metrics = {name: float(row[column]) for name, column in METRICS.items()}
                stages.setdefault(row["exp_id"], {})[int(row["stage_index"])] = metrics
    missing = 0
    for name, row in list(described.items())[::one_in]:
        if row["workload"] not in LIKE:
            missing += len(stages[name])
            continue
        experiment = {
            **trained[LIKE[row["workload"]]], "id": f"evaluation-{name}", "model": row["model"], "tp": int(row["tp"]),
            "gpu": GPUS[row["hardware"]], "max_num_batched_tokens": int(row["max_num_batched_tokens"]),
            "total_kv_blocks": None,
        }  # fmt: skip
        yield from _compared(experiment, stages[name], scratch, EVALUATION, ASSUMED_LOADS)
    yield Uncovered(EVALUATION, "", "no experiment with published rates has such a load", missing)


def _measured(folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Experiment -> stage -> metric. In the first file three experiments have the numbers of one of them (a collision
    of the source); the second file has each one's own."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, where, stage in (
        ("measured_vllm", "exp_id", "stage_index"),
        ("training_h100_measured", "experiment", "stage"),
    ):
        with (folder / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("set", "train15") == "train15" and row[stage].isdigit() and row[where] != "20260217":
                    experiment = row[where] if where == "exp_id" else "-".join(row[where].split("-")[:2])
                    found.setdefault(experiment, {})[int(row[stage])] = {k: float(row[v]) for k, v in METRICS.items()}
    return found


def _compared(
    experiment: Mapping[str, Any], stages: Mapping[int, Mapping[str, float]], scratch: Path, data: str, assumed: str
) -> Iterator[Row]:
    gpu = experiment.get("gpu", "h100-sxm")
    shared = experiment["workload"]["inference_perf"]["shared_prefix"]
    loads = experiment["workload"]["inference_perf"]["stages"]
    trace = scratch / f"{experiment['id']}.jsonl"
    arrivals = np.concatenate([
        start + np.arange(round(load["rate"] * load["duration"])) / load["rate"]
        for load, start in zip(loads, np.cumsum([0] + [load["duration"] for load in loads]), strict=False)
    ])  # fmt: skip
    trace.write_text(_trace(arrivals, shared), "utf-8")
    result = run({
        "model": MODELS[experiment["model"]],
        "engine": {
            "preset": "vllm-0.15", "max_model_len": 4096, "max_num_seqs": experiment["max_num_seqs"],
            "max_num_batched_tokens": experiment["max_num_batched_tokens"],
            "num_gpu_blocks_override": experiment["total_kv_blocks"],
        },
        "cluster": {"gpu": gpu, "tp": experiment["tp"]},
        "workload": {"trace": str(trace), "format": "mooncake", "block_tokens": BLOCK_TOKENS},
    })  # fmt: skip
    requests = result.requests
    ends = np.cumsum([load["duration"] for load in loads])
    at = np.searchsorted(ends, requests["arrival_s"].to_numpy(), side="right")
    for stage, load in enumerate(loads):
        some = requests.filter(at == stage)
        ours = {name: 1e3 * float(some[column].mean()) for name, column in (("E2E", "e2e_s"), ("TTFT", "ttft_s"))}
        theirs = dict(stages[stage])
        for each in (ours, theirs):
            each["ITL"] = (each["E2E"] - each["TTFT"]) / (shared["output_len"] - 1)
        budget = f", budget {experiment['max_num_batched_tokens']}" if data == EVALUATION else ""
        words = f"{shared['question_len']}/{shared['output_len']}, {load['rate']:g} requests/s{budget}"
        model, layout = MODELS[experiment["model"]], f"tp {experiment['tp']}"
        yield Row(data, model, gpu, layout, words, theirs, ours, assumed=assumed)


def _trace(arrivals: np.ndarray[Any, Any], shared: Mapping[str, Any]) -> str:
    """Mooncake's format: users in turn, in a shuffled order; ids of blocks of 16 tokens."""
    groups, each = shared["num_unique_system_prompts"], shared["num_users_per_system_prompt"]
    prompt = shared["system_prompt_len"] + shared["question_len"]
    own = shared["system_prompt_len"] // BLOCK_TOKENS
    blocks = -(-prompt // BLOCK_TOKENS)
    ids = [
        [1000 * (user // each) + block if block < own else 1_000_000 + 1000 * user + block for block in range(blocks)]
        for user in np.random.default_rng(ORDER).permutation(groups * each).tolist()
    ]
    return "".join(
        json.dumps({"timestamp": 1e3 * t, "input_length": prompt, "output_length": shared["output_len"],
                    "hash_ids": ids[i % len(ids)]}) + "\n"
        for i, t in enumerate(arrivals.tolist())
    )  # fmt: skip
