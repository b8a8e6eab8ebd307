"""The three requests of `samples`, as a simulated run: every tool's file has the figures that the tool would state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from reports.formats import FORMATS, WRITERS, read_measured
from reports.simulated import SimulatedRun
from servecast.errors import ServecastError
from sim.steplog import STEP_COLUMNS
from tests.reports.formats.samples import ANSWERS

SENT, TTFT, E2E, INPUT, OUTPUT = (0.0, 0.5, 1.0), (0.2, 0.3, 0.6), (0.4, 0.3, 0.7), (100, 50, 200), (4, 1, 3)
GAPS = [[0.05, 0.05, 0.1], [], [0.04, 0.06]]
STEPS = ((0.0, 0.2, 0), (0.2, 0.25, 1), (0.25, 0.3, 1), (0.3, 0.4, 1), (0.5, 0.8, 0), (1.0, 1.6, 0), (1.6, 1.64, 1),
         (1.64, 1.7, 1))  # fmt: skip
"""Start, end, and how many decode; one a row, on one replica."""
FIRST, LAST = (0, 4, 5), (3, 4, 7)
NONE = pl.DataFrame(schema={"id": pl.Int64, "since_s": pl.Float64, "end_s": pl.Float64})
SLO = {"ttft": 0.5, "tpot": 0.05}


def three(slo: dict[str, float] | None = None, **changes: Any) -> SimulatedRun:
    """The run; `changes` replace columns of its requests."""
    columns = {
        "id": range(3), "replica": [0] * 3, "status": ["finished"] * 3, "reason": ["length"] * 3, "arrival_s": SENT,
        "scheduled_s": SENT, "first_token_s": [s + t for s, t in zip(SENT, TTFT, strict=True)],
        "finish_s": [s + e for s, e in zip(SENT, E2E, strict=True)], "prompt_tokens": INPUT, "output_tokens": OUTPUT,
        "first_step": FIRST, "last_step": LAST, "samples": [1] * 3, "ttft_s": TTFT, "e2e_s": E2E,
    }  # fmt: skip
    steps = pl.DataFrame(dict.fromkeys(STEP_COLUMNS, [0] * len(STEPS))).with_columns(
        step=pl.Series(range(len(STEPS))),
        steps=1,
        start_s=pl.Series([start for start, _, _ in STEPS]),
        end_s=pl.Series([end for _, end, _ in STEPS]),
        first_step_s=pl.Series([end - start for start, end, _ in STEPS]),
        decodes=pl.Series([decodes for _, _, decodes in STEPS]),
    )
    summary = {**ANSWERS, "duration": 1.7, "submitted": 3, "complete": True}
    pools = [{"model": "tiny", "name": "main", "replicas": 1, "dp": 1, "engine_options": {}}]
    scenario = {"workload": {"arrivals": {"kind": "poisson", "rate": 2}}}
    facts = {"name": "three", "servecast": "0.1.0", "pools": pools, "scenario": scenario}
    return SimulatedRun("three", pl.DataFrame({**columns, **changes}), steps, NONE, summary, facts, slo or {}, {})


def text(format: str, run: SimulatedRun) -> str:
    return "".join(WRITERS[format].write(run, []))


def written(format: str, run: SimulatedRun | None = None) -> Any:
    """What a JSON format has; a list where it has a line a request."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {format}")

    found = text(format, run or three(SLO))
    if format == "aiperf_records":
        return [json.loads(line, parse_constant=refuse) for line in found.splitlines()]
    return json.loads(found, parse_constant=refuse)


def read(folder: Path, format: str, run: SimulatedRun | None = None) -> Any:
    path = folder / WRITERS[format].FILE
    path.write_text(text(format, run or three(SLO)), encoding="utf-8")
    return read_measured(path)


@pytest.mark.parametrize("format", WRITERS)
def test_read_again(tmp_path: Path, format: str) -> None:
    """Recognised by its content, without doubts, with the same requests and figures."""
    run = read(tmp_path, format)
    assert run.doubts == ()
    assert (run.completed, run.failed) == (3, 0)
    gone = {key for key in ANSWERS if format == "aiperf" and key.startswith("std")}
    gone |= {k for k in ANSWERS if format in ("guidellm", "csv") and k.endswith("itl_ms") and k != "mean_itl_ms"}
    assert {key: run.summary[key] for key in ANSWERS.keys() - gone} == pytest.approx(
        {key: value for key, value in ANSWERS.items() if key not in gone}, rel=1e-4
    )
    if format in ("aiperf", "table"):
        assert run.requests is None
        return
    rows = run.requests
    assert rows["sent_s"].to_list() == ([None] * 3 if format == "sglang" else list(SENT))
    assert rows["input_tokens"].to_list() == list(INPUT)
    assert rows["output_tokens"].to_list() == list(OUTPUT)
    assert rows["ttft_s"].to_list() == pytest.approx(TTFT, rel=1e-12)
    assert rows["e2e_s"].to_list() == pytest.approx(E2E, rel=1e-12)
    if format not in ("guidellm", "csv"):
        assert [pytest.approx(gaps, rel=1e-9) for gaps in GAPS] == rows["itl_s"].to_list()


def test_every_format_that_is_written_is_read() -> None:
    assert set(WRITERS) <= set(FORMATS)
    assert len({writer.FILE for writer in WRITERS.values()}) == len(WRITERS)


def test_vllm() -> None:
    """TPOT counts as 0 for one token; percentiles are interpolated; seconds are counted for the peaks."""
    found = written("vllm")
    assert {key: found[key] for key in ANSWERS} == pytest.approx(ANSWERS, rel=1e-4)
    assert found["request_goodput"] == pytest.approx(1 / 1.7)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (5, 2)
    assert (found["model_id"], found["request_rate"], found["num_prompts"], found["failed"]) == ("tiny", 2.0, 3, 0)
    assert written("vllm", three())["request_goodput"] is None


def test_sglang() -> None:
    """Attainment is over all that were sent."""
    found = written("sglang")
    for ours, answer in ANSWERS.items():
        key = {"total_token_throughput": "total_throughput"}.get(ours, ours.replace("e2el", "e2e_latency"))
        assert found[key] == pytest.approx(answer, rel=1e-4)
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert found["goodput_slos_ms"] == {"ttft": 500, "tpot": 50}
    assert found["slo_attainment_by_metric"]["ttft"] == pytest.approx(2 / 3)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (5, 2)
    assert found["concurrency"] == pytest.approx(1.4 / 1.7)
    assert "slo_attainment" not in written("sglang", three())


def test_guidellm() -> None:
    """A percentile is a value that occurs; times per token are weighted; one token leaves a verdict open."""
    found = written("guidellm")["benchmarks"][0]["metrics"]
    ttft, itl, tpot = (
        found[name]["successful"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms")
    )
    assert ttft["percentiles"]["p99"] == pytest.approx(600)
    assert ttft["percentiles"]["p50"] == ttft["median"] == pytest.approx(300)
    assert (itl["mean"], tpot["mean"]) == (pytest.approx(60), pytest.approx(175))
    assert (itl["percentiles"]["p50"], itl["count"]) == (pytest.approx(200 / 3), 5)
    assert found["request_latency"]["successful"]["mean"] == pytest.approx(1.4 / 3)
    assert found["request_concurrency"]["successful"]["mean"] == pytest.approx(1.4 / 1.7)
    assert found["output_tokens_per_second"]["successful"]["mean"] == pytest.approx(8 / 1.7)
    assert (found["slo_attainment"], found["slo_determined_requests"]) == (0, 2)
    each = written("guidellm")["benchmarks"][0]["requests"]["successful"]
    assert [r["time_per_output_token_ms"] for r in each] == pytest.approx([100, 300, 700 / 3])
    only_ttft = written("guidellm", three({"ttft": 0.5}))["benchmarks"][0]["metrics"]
    assert (only_ttft["slo_attainment"], only_ttft["slo_determined_requests"]) == (pytest.approx(2 / 3), 3)


def test_aiperf() -> None:
    """Inter-token latency is of a request, and one token has none, which is not good."""
    found = written("aiperf")
    assert found["time_to_first_token"]["p99"] == pytest.approx(594)
    assert found["time_to_first_token"]["std"] == pytest.approx(ANSWERS["std_ttft_ms"], rel=1e-4)
    assert found["inter_token_latency"]["count"] == 2
    assert found["inter_chunk_latency"]["avg"] == pytest.approx(60)
    assert found["time_to_second_token"]["avg"] == pytest.approx(45)
    assert (found["goodput"]["avg"], found["good_request_count"]["avg"]) == (0, 0)
    assert written("aiperf", three({"ttft": 0.5}))["goodput"]["avg"] == pytest.approx(2 / 1.7)
    of_each = [record["metrics"].get("inter_token_latency", {}).get("value") for record in written("aiperf_records")]
    assert of_each == [pytest.approx(200 / 3), None, pytest.approx(50)]


def test_aiperf_counts_time_from_the_first_request() -> None:
    later = three(arrival_s=[1.0, 1.5, 2.0], first_token_s=[1.2, 1.8, 2.6], finish_s=[1.4, 1.8, 2.7])
    assert written("aiperf", later)["benchmark_duration"]["avg"] == pytest.approx(1.7)


FAILED = {"status": ["finished", "cancelled", "rejected"], "reason": ["length", "cancelled", "over_kv_cache"],
          "finish_s": [0.4, 0.9, None], "first_token_s": [0.2, None, None], "e2e_s": [0.4, None, None],
          "ttft_s": [0.2, None, None], "last_step": [3, None, None], "first_step": [0, None, None]}  # fmt: skip


@pytest.mark.parametrize("format", [name for name in WRITERS if name not in ("aiperf", "table")])
def test_failures(tmp_path: Path, format: str) -> None:
    run = read(tmp_path, format, three(SLO, **FAILED))
    assert (run.completed, run.failed) == (1, 2)
    errors = run.requests.sort("input_tokens")["error"].to_list()
    assert errors == ["cancelled", None, "rejected: over_kv_cache"]
    assert len(run.doubts) == 1
    assert run.doubts[0].startswith("failures")


def test_failures_in_figures() -> None:
    bad = three(SLO, **FAILED)
    assert (written("vllm", bad)["failed"], written("vllm", bad)["total_output_tokens"]) == (2, 4)
    assert written("sglang", bad)["slo_attainment"] == 0
    guide = written("guidellm", bad)["benchmarks"][0]["metrics"]
    assert guide["request_totals"] == {"successful": 1, "incomplete": 1, "errored": 1, "total": 3}
    assert guide["slo_determined_requests"] == 2  # what was cut off is not judged
    assert [error["count"] for error in written("aiperf", bad)["error_summary"]] == [1, 1]


def unknown() -> SimulatedRun:
    """The first request is two samples of its prompt: nobody knows which of the tokens came when."""
    return three(SLO, samples=[2, 1, 1])


def test_gaps_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    notes: list[str] = []
    found = json.loads("".join(WRITERS["vllm"].write(unknown(), notes)))
    assert "itls" not in found
    assert "max_output_tokens_per_s" not in found
    assert found["p99_itl_ms"] == ANSWERS["p99_itl_ms"]
    assert "itls are left out" in notes[0]
    run = read(tmp_path, "vllm", unknown())
    assert run.doubts == ()
    assert run.requests["itl_s"].null_count() == 3
    assert run.summary["mean_e2el_ms"] == pytest.approx(ANSWERS["mean_e2el_ms"], rel=1e-4)
    assert "ttfts" not in written("sglang", unknown())
    assert read(tmp_path, "sglang", unknown()).summary["p99_itl_ms"] == ANSWERS["p99_itl_ms"]
    assert "inter_chunk_latency" not in written("aiperf", unknown())
    assert "inter_chunk_latency" in written("aiperf_records", unknown())[2]["metrics"]


@pytest.mark.parametrize("format", [name for name in WRITERS if name not in ("csv", "table")])
def test_nothing_finished(format: str) -> None:
    none = three(status=["cancelled"] * 3, reason=["cancelled"] * 3)
    with pytest.raises(ServecastError, match="three: no request finished"):
        text(format, none)


def test_limits_of_classes() -> None:
    run = three({"ttft": 0.1}).requests.with_columns(pl.Series("class", ["α", "b", "α"]))
    base = three({"ttft": 0.1})
    classes = SimulatedRun("three", run, base.steps, NONE, base.summary, base.manifest, base.slo, {"α": {"e2e": 0.5}})
    assert written("vllm", classes)["request_goodput"] == pytest.approx(1 / 1.7)


def test_csv_has_one_header() -> None:
    lines = text("csv", three()).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("id,replica,status,")
