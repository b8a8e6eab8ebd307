"""`vllm bench serve --save-result`, also `--save-detailed`: a JSON object a run, with `--append-result` several in one
file. Forms of vLLM 0.8, 0.11 and 0.33; written is the last.

Seconds in arrays, milliseconds in statistics. Source: vllm/benchmarks/serve.py in github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reports.formats import figures
from reports.formats.content import ResultFile
from reports.formats.details import has_details, rate_of, requests_of, stated_of
from reports.formats.fields import NUMBER, Fields, is_number
from reports.formats.found import Found
from reports.formats.seen import UNKNOWN_GAPS
from reports.formats.seen import seen as seen_of
from reports.formats.written import arrays, gap_statistics, peaks, statistics, totals
from reports.simulated import SimulatedRun
from sim.metrics import PERCENTILES, Distribution

FILE = "vllm.json"
NEEDED = ("duration", "completed", "total_input_tokens", "total_output_tokens", "total_token_throughput")
STATED = {key: key for key in figures.KEYS if key not in ("duration", "submitted")}
NOTES = (
    "TTFT begins when the request is sent, the set-up of a new connection included, and ends with its first chunk; "
    "waiting for a free place under max_concurrency is not in it",
    "ITL has one gap a streamed chunk, and a chunk may hold several tokens",
    "rates are over the client's whole duration, from before the first send until after the last answer",
    "output tokens are the server's count, or those of the answer tokenised again where it sent none",
    "every figure is over the requests that succeeded",
)


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks(*NEEDED)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The runs of the file; mistakes by line and key."""
    return [_run(Fields(file.where(line), found, problems)) for line, found in file.objects]


def _run(run: Fields) -> Found:
    detailed = has_details(run)
    stated = stated_of(run, STATED, NEEDED)
    stated |= stated_of(run, {"request_goodput": "request_goodput:"}, ())
    rate, notes = rate_of(run)
    failed = run.count("failed")
    if (ramp := run.text("ramp_up_strategy")) is not None:
        notes.append(f"the request rate was ramped up ({ramp})")
    return Found(
        tool="vllm",
        source=run.where,
        version=_form(run.found),
        model=run.text("model_id"),
        requests=requests_of(run, "--save-detailed") if detailed else None,
        stated=stated,
        fallback={} if detailed else _of_latencies(run, stated),
        duration_s=run.number("duration", least=figures.SHORTEST_S, need=True),
        failed=failed,
        rate=rate,
        concurrency=run.number("max_concurrency", least=1),
        unit="seconds in arrays and milliseconds in statistics",
        doubts=_unaccounted(run, stated, failed),
        notes=(*NOTES, *notes, *run.unused()),
    )


def _form(run: Mapping[str, Any]) -> str:
    """The form, named after a version that writes these keys; its neighbours may write them, too."""
    if "request_goodput:" in run:
        return "0.8"
    if run.keys() & {"failed", "latencies", "start_times"}:
        return "0.33"
    return "0.11" if run.keys() & {"max_output_tokens_per_s", "max_concurrent_requests"} else ""


def _of_latencies(run: Fields, stated: Mapping[str, float]) -> dict[str, float]:
    """E2E figures from `latencies`, which 0.33 keeps in every file, where it is plain which requests failed (0 s)."""
    latencies = run.array("latencies", is_number, NUMBER)
    done = np.array([value for value in latencies or () if value > 0])
    if not len(done) or len(done) != stated.get("completed"):
        return {}
    figures_of = Distribution.of(done).summary("e2el_ms", 1e3)
    return {key: value for key, value in figures_of.items() if value is not None}


def _unaccounted(run: Fields, stated: Mapping[str, float], failed: int | None) -> tuple[str, ...]:
    asked, done = run.count("num_prompts"), stated.get("completed")
    if asked is None or done is None or asked == done + (failed or 0):
        return ()
    known = f"{done:,.0f} completed" + (f" and {failed:,} failed" if failed is not None else "")
    return (f"num_prompts is {asked:,}, but {known}: the others failed, or the data set has fewer",)


def write(run: SimulatedRun, notes: list[str]) -> Iterator[str]:
    """The run as `--save-result --save-detailed` has it, with percentiles 50, 90 and 99 of all four latencies."""
    seen = seen_of(run)
    done, prompt, output = totals(seen)
    duration = seen.duration_s
    written = {
        "backend": run.made_by,
        "model_id": run.model,
        "num_prompts": len(seen.done),
        "request_rate": run.rate or "inf",
        "max_concurrency": run.concurrency,
        "duration": duration,
        "completed": done,
        "failed": len(seen.done) - done,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": done / duration,
        "request_goodput": seen.good(undefined=True) / duration if seen.limits else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        **peaks(seen),
        **arrays(seen),
        "start_times": seen.sent_s.tolist(),
        "latencies": np.nan_to_num(seen.e2e_s, nan=0.0).tolist(),
        "queue_times": [0.0] * len(seen.done),
    }
    for name, values in (("ttft", seen.ttft_s), ("tpot", seen.tpot_s), ("e2el", seen.e2e_s)):
        written |= statistics(name, values[seen.done & ~np.isnan(values)], PERCENTILES)
    written |= gap_statistics(seen, PERCENTILES)
    if not seen.gaps_known:
        notes.append(f"itls are left out, and ITL figures are over all tokens: {UNKNOWN_GAPS}")
    yield json.dumps(written, allow_nan=False)
