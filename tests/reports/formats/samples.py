"""Three requests as every tool writes them: 100, 50 and 200 tokens in, 4, 1 and 3 out, sent at 0, 0.5 and 1 s.

First tokens after 0.2, 0.3 and 0.6 s; then gaps of 50, 50, 100 ms, none, and 40, 60 ms. Hand-written.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from reports.formats import read_all
from reports.measured import MeasuredRun

ANSWERS = {
    "completed": 3,
    "total_input_tokens": 350,
    "total_output_tokens": 8,
    "request_throughput": 1.7647,
    "output_throughput": 4.7059,
    "total_token_throughput": 210.5882,
    "mean_ttft_ms": 366.6667,
    "median_ttft_ms": 300.0,
    "std_ttft_ms": 169.9673,
    "p99_ttft_ms": 594.0,
    "mean_tpot_ms": 58.3333,
    "std_tpot_ms": 8.3333,
    "p99_tpot_ms": 66.5,
    "mean_itl_ms": 60.0,
    "median_itl_ms": 50.0,
    "p99_itl_ms": 98.4,
    "mean_e2el_ms": 466.6667,
    "p99_e2el_ms": 694.0,
}
"""Our definitions, which are those of `vllm bench serve`."""

_TOTALS = ("completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput")
_ARRAYS = {
    "input_lens": [100, 50, 200],
    "output_lens": [4, 1, 3],
    "ttfts": [0.2, 0.3, 0.6],
    "itls": [[0.05, 0.05, 0.1], [], [0.04, 0.06]],
    "errors": ["", "", ""],
}
_VLLM = {
    "model_id": "tiny",
    "num_prompts": 3,
    "request_rate": 2.0,
    "max_concurrency": None,
    "duration": 1.7,
    **ANSWERS,
}
VLLM_33 = {
    **_VLLM,
    "failed": 0,
    "request_goodput": 0.5882,
    "max_output_tokens_per_s": 5.0,
    "max_concurrent_requests": 2,
    **_ARRAYS,
    "start_times": [7000.0, 7000.5, 7001.0],
    "latencies": [0.4, 0.3, 0.7],
    "queue_times": [0.0, 0.0, 0.0],
}
VLLM_11 = {**_VLLM, "request_goodput": 0.5882, "max_concurrent_requests": 2, **_ARRAYS, "generated_texts": ["", "", ""]}
VLLM_8 = {**_VLLM, "request_rate": "inf", "request_goodput:": 0.5882, **_ARRAYS}
PLAIN = ("input_lens", "output_lens", "ttfts", "itls", "errors", "start_times", "generated_texts")
"""What vLLM takes out of a file without --save-detailed."""

SGLANG: dict[str, Any] = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": 2.0,
    "max_concurrency": 8,
    "random_output_len": 4,
    "random_range_ratio": 0.0,
    "server_info": {"version": "0.5.23", "model_path": "tiny"},
    "duration": 1.7,
    **{key: ANSWERS[key] for key in _TOTALS},
    "total_output_tokens_retokenized": 9,
    "total_throughput": 210.5882,
    **{key.replace("e2el", "e2e_latency"): value for key, value in ANSWERS.items() if key.endswith("_ms")},
    "concurrency": 0.82,
    "accept_length": None,
    **_ARRAYS,
}


def _spread(mean: float, median: float, p99: float, total: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"mean": mean, "median": median, "percentiles": {"p50": median, "p90": p99, "p99": p99}}
    return {"successful": found | ({} if total is None else {"total_sum": total}), "errored": {"mean": 0.0}}


def _guide(start: float, prompt: int, output: int, ttft: float, whole: float, gap: float | None) -> dict[str, Any]:
    timings = {
        "targeted_start": start,
        "request_start": start,
        "first_token_iteration": start + ttft,
        "last_token_iteration": start + whole,
        "request_end": start + whole + 0.001,
        "token_iterations": output,
    }
    return {
        "request_id": str(start),
        "info": {"status": "completed", "timings": timings, "error": None},
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_latency": whole + 0.001,
        "time_to_first_token_ms": 1e3 * ttft,
        "inter_token_latency_ms": gap,
    }


GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1"},
    "config": {"spec": {"backend": {"model": "tiny"}}},
    "benchmarks": [
        {
            "config": {"strategy": {"kind": "constant", "rate": 2.0}, "backend": {}},
            "duration": 1.7,
            "requests": {
                "successful": [
                    _guide(1.7e9, 100, 4, 0.2, 0.4, 200 / 3),
                    _guide(1.7e9 + 0.5, 50, 1, 0.3, 0.3, None),
                    _guide(1.7e9 + 1.0, 200, 3, 0.6, 0.7, 50.0),
                ],
                "incomplete": [],
                "errored": [],
                "total": None,
            },
            "metrics": {
                "request_totals": {"successful": 3, "incomplete": 0, "errored": 0, "total": 3},
                "request_latency": _spread(1.403 / 3, 0.401, 0.701),
                "time_to_first_token_ms": _spread(366.6667, 300.0, 600.0),
                "inter_token_latency_ms": _spread(60.0, 66.6667, 66.6667),
                "time_per_output_token_ms": _spread(175.0, 100.0, 300.0),
                "prompt_token_count": _spread(116.67, 100, 200, 350),
                "output_token_count": _spread(2.67, 3, 4, 8),
            },
        }
    ],
}


def _metric(unit: str, **values: float) -> dict[str, Any]:
    return {"unit": unit, **values}


AIPERF: dict[str, Any] = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "input_config": {
        "models": {"items": [{"name": "tiny"}]},
        "phases": [{"name": "warmup", "concurrency": 1}, {"name": "profiling", "concurrency": 8, "rate": 2.0}],
    },
    "was_cancelled": False,
    "request_throughput": _metric("requests/sec", avg=1.7647),
    "request_latency": _metric("ms", avg=466.6667, p50=400.0, p90=640.0, p99=694.0, std=208.0, count=3),
    "request_count": _metric("requests", avg=3.0),
    "error_request_count": _metric("requests", avg=0.0),
    "time_to_first_token": _metric("ms", avg=366.6667, p50=300.0, p90=540.0, p99=594.0),
    "inter_token_latency": _metric("ms", avg=58.3333, p50=58.3333, p90=65.0, p99=66.5),
    "inter_chunk_latency": _metric("ms", avg=60.0, p50=50.0, p90=84.0, p99=98.4),
    "output_token_throughput": _metric("tokens/sec", avg=4.7059),
    "output_sequence_length": _metric("tokens", avg=2.6667, p50=3.0),
    "input_sequence_length": _metric("tokens", avg=116.6667, p50=100.0),
    "benchmark_duration": _metric("sec", avg=1.7),
    "total_isl": _metric("tokens", avg=350.0),
    "total_osl": _metric("tokens", avg=8.0),
}
GENAI_PERF = {
    key: AIPERF[key] for key in ("request_throughput", "request_latency", "request_count", "time_to_first_token")
}


def _record(start_ns: int, prompt: int, output: int, ttft: float, whole: float, chunks: list[float]) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "input_sequence_length": {"value": prompt, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
        "time_to_first_token": {"value": ttft, "unit": "ms"},
        "request_latency": {"value": whole, "unit": "ms"},
    }
    if chunks:
        metrics["inter_chunk_latency"] = {"value": chunks, "unit": "ms"}
        metrics["inter_token_latency"] = {"value": (whole - ttft) / (output - 1), "unit": "ms"}
    metadata = {"request_start_ns": start_ns, "benchmark_phase": "profiling", "was_cancelled": False}
    return {"metadata": metadata, "metrics": metrics, "error": None}


_EPOCH_NS = 1_759_813_207_532_900_363
AIPERF_RECORDS: list[dict[str, Any]] = [
    _record(_EPOCH_NS, 100, 4, 200.0, 400.0, [50.0, 50.0, 100.0]),
    _record(_EPOCH_NS + 1_000_000_000, 200, 3, 600.0, 700.0, [40.0, 60.0]),
    _record(_EPOCH_NS + 500_000_000, 50, 1, 300.0, 300.0, []),
]
"""In order of completion."""

_STAMPS = ((0.0, 0.003, 100, 4, 0.2, 0.4), (0.5, 0.505, 50, 1, 0.8, 0.8), (1.0, 1.02, 200, 3, 1.6, 1.7))
LLMSERVINGSIM: list[dict[str, Any]] = [
    {
        "request_id": f"bench-{i}",
        "input_toks": prompt,
        "output_toks": output,
        "arrival_time": 1.7e9 + sent,
        "queued_ts": 500.0 + queued,
        "scheduled_ts": 500.0 + queued,
        "first_token_ts": 500.003 + first,
        "last_token_ts": 500.003 + last,
    }
    for i, (sent, queued, prompt, output, first, last) in enumerate(_STAMPS)
]
"""The smallest queued_ts - arrival_time is 3 ms more than the clocks are apart."""

VLLM_CPU = (
    "id,arrival_s,input_tokens,output_tokens,tokens_received,sent_s,ttft_ms,tpot_ms,e2e_ms,max_itl_ms,error\n"
    "a,0.0,100,4,4,0.001,200.0,66.6667,400.0,100.0,\n"
    "b,0.5,50,1,1,0.501,300.0,,300.0,,\n"
    "c,1.0,200,3,3,1.001,600.0,50.0,700.0,60.0,\n"
)
TABLE = (
    "name,model,rate,max_concurrency,duration_s,completed,failed,total_input_tokens,total_output_tokens,mean_ttft,ttft_p99_ms,"
    "tpot_ms,itl,e2e_s,output_throughput\n"
    "low,tiny,2,8,1.7,3,0,350,8,366.6667,594,58.3333,60,0.4666667,4.7059\n"
    "high,tiny,4,8,1.7,3,1,350,8,466.6667,694,58.3333,60,0.5666667,4.7059\n"
)


def lines(*objects: Any) -> str:
    """JSON, an object a line."""
    return "".join(json.dumps(entry) + "\n" for entry in objects)


GOOD = {
    "vllm": lines(VLLM_33),
    "sglang": lines(SGLANG),
    "guidellm": lines(GUIDELLM),
    "aiperf": json.dumps(AIPERF, indent=2),
    "aiperf_records": lines(*AIPERF_RECORDS),
    "llmservingsim": lines(*LLMSERVINGSIM),
    "vllm_cpu": VLLM_CPU,
    "table": TABLE,
}
"""A file of every format."""


def saved(folder: Path, content: Any, name: str = "run.json") -> Path:
    """A file with text, or with objects as JSON lines."""
    path = folder / name
    objects = content if isinstance(content, list) else [content]
    path.write_text(content if isinstance(content, str) else lines(*objects), encoding="utf-8")
    return path


def runs(folder: Path, content: Any, format: str | None = None) -> list[MeasuredRun]:
    """The runs of a file with this content."""
    return read_all(saved(folder, content), format)


def changed(sample: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with other values; those of None are taken out."""
    out = copy.deepcopy(sample) | changes
    return {key: value for key, value in out.items() if value is not None or key not in changes}
