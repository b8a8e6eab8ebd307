"""Measured serving points of NVIDIA's aiconfigurator (`e2e_silicon_sample`): mean TTFT and TPOT of closed loops.

Setups are those of InferenceX's scripts where these are known; what is assumed is said in `SETUPS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.accuracy.rows import Row, Uncovered
from benchmarks.accuracy.run import closed_loop, run

DATA = "measured serving points (NVIDIA aiconfigurator, Apache-2.0; mostly InferenceX)"
GPUS = {"h100_sxm": "h100-sxm", "b200_sxm": "b200-sxm", "gb200": "gb200"}
INFERENCEX = 0.8  # lengths are uniform between this share of the nominal one and the nominal one


@dataclass(frozen=True, slots=True)
class Known:
    """How rows of one model, precision, system and, where it is named, version of the engine were run.

    Sources: InferenceX's scripts (benchmarks/single_node/*.sh); for MiniMax-M2.5 on 0.19 vllm-project/recipes#321.
    """

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    shortest: float = INFERENCEX
    fused_mb: Mapping[int, float] = field(default_factory=dict)
    sequences: int | None = None  # None: as many as clients
    fitted: str = ""
    assumed: str = ""


BATCHES = {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9}
TRT_70B = {"max_num_tokens": 16384, "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False},
           "cuda_graph_config": {"enable_padding": True, "max_batch_size": 1024}}  # fmt: skip
"""InferenceX's trtllm-serve (its script for fp4 sets max_num_tokens to max_seq_len); for 1024/1024 below tp 8 also
`BATCH_WAIT`."""
TRT_R1 = {"kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False, "free_gpu_memory_fraction": 0.8}}
SGLANG_R1 = {"kv_cache_dtype": "fp8_e4m3", "disable_radix_cache": True}
BATCH_WAIT = {"batch_wait_max_tokens_ratio": 0.9, "batch_wait_timeout_iters": 20}
B200_70B = BATCHES | {"kv_cache_dtype": "fp8", "fuse_allreduce_rms": True, "cudagraph_mode": "FULL_DECODE_ONLY"}
B200_FUSED = {2: 32.0, 4: 32.0, 8: 8.0}
SETUPS: Mapping[tuple[str, ...], Known] = {
    ("meta-llama/Llama-3.1-70B", "fp8", "h100_sxm"): Known(
        "llama-3.1-70b-fp8", BATCHES | {"kv_cache_dtype": "auto"}, fitted="that the KV cache is bf16"
    ),
    ("meta-llama/Llama-3.1-70B", "fp8", "b200_sxm"): Known(
        "llama-3.1-70b-fp8", B200_70B, fused_mb=B200_FUSED, sequences=512
    ),
    ("meta-llama/Llama-3.1-70B", "fp4", "b200_sxm"): Known(
        "llama-3.1-70b-nvfp4", B200_70B, fused_mb=B200_FUSED, sequences=512,
        fitted="the launch time of steps without graphs, and the factor on long steps",
    ),
    ("MiniMaxAI/MiniMax-M2.5", "fp8", "b200_sxm", "0.17"): Known(
        "minimax-m2.5", {"gpu_memory_utilization": 0.95, "block_size": 32}, sequences=1024,
        assumed="experts run by VLLM_USE_FLASHINFER_MOE_FP8=0's kernels, which nobody timed",
    ),
    ("MiniMaxAI/MiniMax-M2.5", "fp8", "b200_sxm"): Known(
        "minimax-m2.5", {"gpu_memory_utilization": 0.9, "block_size": 32, "kv_cache_dtype": "fp8"}, sequences=1024
    ),
    ("MiniMaxAI/MiniMax-M2.5", "fp8", "h100_sxm"): Known(
        "minimax-m2.5", {"gpu_memory_utilization": 0.95}, assumed="engine options: those of B200 with vLLM 0.17"
    ),
    ("MiniMaxAI/MiniMax-M2.5", "fp4", "b200_sxm"): Known(
        "minimax-m2.5-nvfp4", {"gpu_memory_utilization": 0.9, "fuse_allreduce_rms": True}
    ),
    ("openai/gpt-oss-120b", "fp4", "b200_sxm"): Known(
        "gpt-oss-120b",
        BATCHES | {"kv_cache_dtype": "fp8", "fuse_allreduce_rms": True, "max_cudagraph_capture_size": 2048},
        sequences=512,
        assumed="experts run by VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8's kernels, which nobody timed for this model",
    ),
    ("Qwen/Qwen3-32B", "", "h100_sxm"): Known(
        "qwen3-32b", {"max_model_len": 40960}, shortest=1.0, sequences=1024,
        assumed="workload (arrivals in step inflate TTFT), sampling, engine defaults",
    ),
}  # fmt: skip
BURSTS = "that vLLM's factor on long steps is not TensorRT-LLM's"
STREAM = "clients that hear of the first token at once (`stream_interval: 10`), DeepSeek-V3.1's choice of what is fp4"
CHOICE = "that rows of one label and load have the flags of one script, DeepSeek-V3.1's choice of what is fp4"
DEFAULTS = "workload (arrivals in step inflate TTFT), sampling, engine defaults"
OTHERS: Mapping[tuple[str, ...], Known] = {
    ("trtllm", "meta-llama/Llama-3.1-70B", "fp8", "b200_sxm"): Known("llama-3.1-70b-fp8", TRT_70B, fitted=BURSTS),
    ("trtllm", "meta-llama/Llama-3.1-70B", "fp4", "b200_sxm"): Known("llama-3.1-70b-nvfp4", TRT_70B, fitted=BURSTS),
    ("trtllm", "Qwen/Qwen3-32B", "fp8", "h100_sxm"): Known("qwen3-32b-fp8", shortest=1.0, assumed=DEFAULTS),
    ("trtllm", "Qwen/Qwen3-235B-A22B-FP8", "fp8", "h100_sxm"): Known(
        "qwen3-235b-a22b-fp8", shortest=1.0, assumed=DEFAULTS
    ),
    ("trtllm", "meta-llama/Llama-3.1-8B-Instruct", "", "h100_sxm"): Known(
        "llama-3.1-8b", shortest=1.0, assumed=DEFAULTS
    ),
    ("sglang", "Qwen/Qwen3-32B", "", "h100_sxm"): Known("qwen3-32b", shortest=1.0, assumed=DEFAULTS),
} | {
    (backend, f"deepseek-ai/DeepSeek-{name}", precision, system): Known(model, engine, assumed=assumed)
    for name in ("R1", "V3")
    for precision, model in (("fp8", "deepseek-r1"), ("fp4", "deepseek-v3.1-nvfp4"))
    for backend, system, engine, assumed in (
        ("trtllm", "b200_sxm", TRT_R1, STREAM),
        ("sglang", "b200_sxm", SGLANG_R1, CHOICE),
        ("sglang", "gb200", SGLANG_R1, CHOICE),
    )
}
"""Rows of other engines than vLLM."""
PRESETS = {"0.10": "vllm-0.10", "0.12": "vllm-0.10", "0.15": "vllm-0.15", "0.17": "vllm-0.15", "0.19": "vllm-0.19"}
"""Version -> the nearest preset below; rows of the Llama models do not say theirs, which is 0.10.2."""


def table(reference: Path) -> pl.DataFrame:
    """The rows of aggregated serving, finished submissions, each once."""
    path = reference / "aiconfigurator" / "e2e_silicon_sample.csv.gz"
    rows = pl.read_csv(path, infer_schema_length=10_000)
    return rows.unique(subset=[c for c in rows.columns if c not in ("id", "source", "measured")], maintain_order=True)


def compare(reference: Path) -> Iterator[Row | Uncovered]:
    """Every row that can be run, and what cannot."""
    done = []
    for row, known, why in judged(reference):
        if known and why is None:
            yield _compared(row, known)
        else:
            done.append((f"{row['model_path']}, {GPUS[row['system']]}, {row['backend']}", why))
    counts = pl.DataFrame(done, schema=["what", "why"], orient="row").group_by("what", "why").len()
    for what, why, points in counts.sort("what", "why").iter_rows():
        yield Uncovered(DATA, what, why, points)


def judged(reference: Path) -> Iterator[tuple[dict[str, Any], Known | None, str | None]]:
    """Every row with how it was run, where that is known, and why it cannot be, if it cannot."""
    rows = table(reference)
    listed = rows.filter(pl.col("model_path").str.ends_with("DeepSeek-V3"), backend="sglang", precision="fp8")
    plain = set(listed.select("silicon_ttft_ms", "silicon_tpot_ms").iter_rows())
    for row in rows.iter_rows(named=True):
        key = (row["model_path"], row["precision"] or "", row["system"])
        if row["backend"] == "vllm":
            known = SETUPS.get((*key, _version(row))) or SETUPS.get(key)
        else:
            known = OTHERS.get((row["backend"], *key))
        yield row, known, _missing(row, known) or _maybe_speculative(row, known, plain)


def _missing(row: Mapping[str, Any], known: Known | None) -> str | None:
    """Why a row cannot be run, or None."""
    if row["wip"]:
        return "marked as unfinished by its source"
    if "gpt-oss" in row["model_path"] and row["backend"] != "vllm":
        return "layers with windows in engines other than vLLM"
    if "gpt-oss" in row["model_path"] and not row["backend_version"]:
        return "asynchronous scheduling of vLLM 0.11"
    sides = ("attention_dp_size", "prefill_attention_dp_size", "decode_attention_dp_size")
    if any((row[side] or 1) > 1 for side in sides):
        return "data parallel attention, whose layouts the labels do not tell for sure"
    if (row["pp_size"] or 1) > 1:
        return "pipeline parallelism"
    if (row["moe_ep_size"] or 1) not in (1, row["tp_size"]):
        return "experts dealt out over some of the GPUs"
    if row["concurrency"] is None:
        return "how many clients there were"
    if row["mode"] == "disagg" and None in (row["prefill_num_workers"], row["decode_num_workers"]):
        return "how many GPUs read and answer, and with or without speculative decoding: the labels do not tell"
    largest = max(row[name] or 1 for name in ("tp_size", "prefill_tp_size", "decode_tp_size"))
    if largest > (4 if row["system"] == "gb200" else 8):
        return "a group of GPUs over several nodes"
    if "DeepSeek" in row["model_path"] and row["backend"] == "sglang" and not row["backend_version"]:
        return "a version of SGLang that is not stated; TTFT holds up to 9 s that no load explains"
    if row["mode"] == "disagg" and row["backend"] == "trtllm":
        return "prefill and decode on separate GPUs in TensorRT-LLM"
    if "DeepSeek" in row["model_path"] and str(row["backend_version"]).endswith(("rc6.post3", "1.1.0rc2.post2")):
        return "speculative decoding"  # the images of InferenceX's MTP runs, whose tokens take half the time
    return None if known else "a model with a vision tower, or a setup that is not known"


def _maybe_speculative(row: Mapping[str, Any], known: Known | None, plain: Set[tuple[float, float]]) -> str | None:
    """InferenceX ran DeepSeek-R1 in fp8 with MTP too, under the same labels; as DeepSeek-V3 only the `plain` runs are
    listed again."""
    measured = row["silicon_ttft_ms"], row["silicon_tpot_ms"]
    if known is None or known.engine is not SGLANG_R1 or row["precision"] != "fp8" or measured in plain:
        return None
    return "speculative decoding, or not: the labels do not tell"


def scenario(row: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """The scenario of a row."""
    isl, osl, clients = (int(row[name]) for name in ("isl", "osl", "concurrency"))
    prompt, output = ({"kind": "uniform", "low": int(known.shortest * n), "high": n} for n in (isl, osl))
    workload = closed_loop(clients, (10 if known.shortest < 1 else 4) * clients, prompt, output)
    if row["mode"] == "disagg":
        pools = [_side(row, side) for side in SIDES]
        cluster: dict[str, Any] = {"pools": pools, "split": {"link": "rdma-400"}}
        engine: dict[str, Any] = {"preset": "sglang-0.5"} | dict(known.engine)
    else:
        cluster = {"gpu": GPUS[row["system"]], "tp": int(row["tp_size"]), "ep": (row["moe_ep_size"] or 1) > 1}
        engine = ENGINES[row["backend"]](row, known, isl + osl + 200)
    return {"model": known.model, "engine": engine, "cluster": cluster, "workload": workload}


def _side(row: Mapping[str, Any], side: str) -> dict[str, Any]:
    """A pool of DeepSeek-R1's servers with prefill and decode apart, as InferenceX's script for GB200 in fp4 has them
    (dynamo-sglang)."""
    engine = {"mem_fraction_static": 0.95 if row["system"] == "gb200" else 0.85, "scheduler_recv_interval": 10,
              "max_running_requests": 512, "cuda_graph_max_bs": 256}  # fmt: skip
    return {
        "role": side, "gpu": GPUS[row["system"]], "tp": int(row[f"{side}_tp_size"]),
        "replicas": int(row[f"{side}_num_workers"]), "ep": (row[f"{side}_moe_ep_size"] or 1) > 1,
        "engine": engine | ({"chunked_prefill_size": 24576} if side == "prefill" else {}),
    }  # fmt: skip


def _version(row: Mapping[str, Any]) -> str:
    return ".".join(str(row["backend_version"] or "0.10").split(".")[:2])


def _vllm(row: Mapping[str, Any], known: Known, length: int) -> dict[str, Any]:
    engine: dict[str, Any] = {"preset": PRESETS.get(_version(row), "vllm-0.19"), "max_model_len": length}
    engine["enable_prefix_caching"] = False  # both sources say so
    engine |= {"max_num_seqs": max(known.sequences or 0, int(row["concurrency"]))} | dict(known.engine)
    if (tp := int(row["tp_size"])) in known.fused_mb:
        engine["fi_allreduce_fusion_max_size_mb"] = known.fused_mb[tp]
    return engine


def _tensorrt_llm(row: Mapping[str, Any], known: Known, length: int) -> dict[str, Any]:
    engine = {"preset": "tensorrt-llm-1", "max_seq_len": length} | dict(known.engine)
    if known.engine is TRT_R1:
        return engine | _tensorrt_llm_r1(row, length)
    if known.shortest == INFERENCEX and row["isl"] == row["osl"] and row["tp_size"] < 8:
        engine |= BATCH_WAIT
    return engine


def _tensorrt_llm_r1(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """What InferenceX's scripts for DeepSeek-R1 make of a row."""
    clients, isl, osl = (int(row[name]) for name in ("concurrency", "isl", "osl"))
    waits = row["precision"] == "fp8" and isl == osl and clients >= 64
    return {
        "max_num_tokens": max((clients + isl + 127) // 64 * 64, 8192), "max_seq_len": max(length, 8192),
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": clients},
    } | ({"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8} if waits else {})  # fmt: skip


def _sglang(row: Mapping[str, Any], known: Known, length: int) -> dict[str, Any]:
    engine = {"preset": "sglang-0.5"} | dict(known.engine)
    return engine | _sglang_r1(row) if known.engine is SGLANG_R1 else engine


def _sglang_r1(row: Mapping[str, Any]) -> dict[str, Any]:
    """What InferenceX's scripts for DeepSeek-R1 make of a row."""
    clients, few = int(row["concurrency"]), row["precision"] == "fp8" and row["tp_size"] == 4
    interval = {"scheduler_recv_interval": 30 if clients >= 16 and not few else 10}
    if row["precision"] == "fp4":
        return interval | {"chunked_prefill_size": 16384, "max_running_requests": 256, "cuda_graph_max_bs": 256,
                           "mem_fraction_static": 0.85}  # fmt: skip
    tokens, requests, memory = (8192, 32, 0.95) if few else (32768, 128, 0.82)
    return interval | {"chunked_prefill_size": tokens, "max_prefill_tokens": tokens, "max_running_requests": requests,
                       "cuda_graph_max_bs": requests, "mem_fraction_static": memory}  # fmt: skip


SIDES = ("prefill", "decode")
NAMES = {"vllm": "", "trtllm": ", TensorRT-LLM", "sglang": ", SGLang"}
ENGINES = {"vllm": _vllm, "sglang": _sglang, "trtllm": _tensorrt_llm}


def _compared(row: Mapping[str, Any], known: Known) -> Row:
    found = run(scenario(row, known)).summary()
    precision = f", {row['precision']}" if row["precision"] else ""
    apart, assumed = row["mode"] == "disagg", known.assumed
    layout = f"tp {row['tp_size']}" + ", ep" * ((row["moe_ep_size"] or 1) > 1)
    if apart:
        layout = " + ".join(f"{row[f'{side}_num_workers']} x tp {row[f'{side}_tp_size']}" for side in SIDES)
        assumed = f"{assumed}, the flags of InferenceX's script for GB200 in fp4 and a 400 Gb/s adapter a GPU for all"
    return Row(
        DATA,
        row["model_path"].split("/")[-1] + precision + NAMES[row["backend"]] + ", prefill and decode apart" * apart,
        GPUS[row["system"]],
        layout,
        f"{row['isl']}/{row['osl']}, {row['concurrency']} clients",
        {"TTFT": row["silicon_ttft_ms"], "TPOT": row["silicon_tpot_ms"]},
        {"TTFT": found["mean_ttft_ms"], "TPOT": found["mean_tpot_ms"]},
        fitted=known.fitted,
        assumed=assumed,
    )
