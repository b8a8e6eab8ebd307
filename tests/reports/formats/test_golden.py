"""Three requests whose figures are known, in the files of every tool: the same run comes out of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.formats import read_measured
from reports.measured import REQUEST_COLUMNS, MeasuredRun
from tests.reports.formats import samples
from tests.reports.formats.samples import ANSWERS, GOOD, changed, runs, saved

DETAILED = {
    "vllm": samples.VLLM_33,
    "vllm 0.11": samples.VLLM_11,
    "vllm 0.8": samples.VLLM_8,
    "sglang": samples.SGLANG,
    "guidellm": samples.GUIDELLM,
    "aiperf_records": samples.AIPERF_RECORDS,
    "llmservingsim": samples.LLMSERVINGSIM,
    "vllm_cpu": samples.VLLM_CPU,
}
NO_GAPS = ("guidellm", "llmservingsim", "vllm_cpu")
NO_SENDS = ("vllm 0.11", "vllm 0.8", "sglang")


def one(folder: Path, content: Any, format: str | None = None) -> MeasuredRun:
    found = runs(folder, content, format)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", DETAILED)
def test_requests(tmp_path: Path, name: str) -> None:
    run = one(tmp_path, DETAILED[name])
    assert run.requests is not None
    assert run.requests.columns == list(REQUEST_COLUMNS)
    rows = run.requests.sort("ttft_s")
    sent = [None] * 3 if name in NO_SENDS else pytest.approx([0.0, 0.5, 1.0], abs=1e-6)
    assert rows["sent_s"].to_list() == sent
    assert rows["input_tokens"].to_list() == [100, 50, 200]
    assert rows["output_tokens"].to_list() == [4, 1, 3]
    assert rows["ttft_s"].to_list() == pytest.approx([0.2, 0.3, 0.6], abs=1e-6)
    assert rows["e2e_s"].to_list() == pytest.approx([0.4, 0.3, 0.7], abs=1e-6)
    assert rows["tpot_s"].to_list() == [pytest.approx(0.2 / 3, abs=1e-6), None, pytest.approx(0.05, abs=1e-6)]
    assert rows["error"].null_count() == 3
    gaps = [[0.05, 0.05, 0.1], [], [0.04, 0.06]]
    assert rows["itl_s"].to_list() == ([None] * 3 if name in NO_GAPS else gaps)


@pytest.mark.parametrize("name", DETAILED)
def test_summary(tmp_path: Path, name: str) -> None:
    run = one(tmp_path, DETAILED[name])
    spread = {key for key in ANSWERS if key.endswith("itl_ms") and key != "mean_itl_ms"}
    expected = {key: value for key, value in ANSWERS.items() if name not in NO_GAPS or key not in spread}
    assert {key: run.summary[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    assert run.duration_s == pytest.approx(1.7, abs=1e-6)
    assert (run.completed, run.failed) == (3, 0)
    assert run.doubts == ()
    assert run.notes


@pytest.mark.parametrize(
    ("sample", "version", "rate"),
    [(samples.VLLM_33, "0.33", 2.0), (samples.VLLM_11, "0.11", 2.0), (samples.VLLM_8, "0.8", None)],
)
def test_vllm_forms(tmp_path: Path, sample: dict[str, Any], version: str, rate: float | None) -> None:
    run = one(tmp_path, sample)
    assert (run.tool, run.version, run.model) == ("vllm", version, "tiny")
    assert (run.rate, run.concurrency) == (rate, None)
    assert run.summary["request_goodput"] == 0.5882
    assert ("request_rate is inf" in " ".join(run.notes)) == (rate is None)


@pytest.mark.parametrize("sample", [samples.VLLM_33, samples.VLLM_11, samples.VLLM_8])
def test_vllm_without_details(tmp_path: Path, sample: dict[str, Any]) -> None:
    run = one(tmp_path, {key: value for key, value in sample.items() if key not in samples.PLAIN})
    assert run.requests is None
    assert {key: run.summary[key] for key in ANSWERS} == pytest.approx(ANSWERS)
    assert run.summary["p50_ttft_ms"] == 300.0
    assert run.summary["input_throughput"] == pytest.approx(350 / 1.7)
    assert run.doubts == ()


def test_vllm_latencies_without_details_give_e2e(tmp_path: Path) -> None:
    plain = {
        key: value for key, value in samples.VLLM_33.items() if key not in samples.PLAIN and not key.endswith("e2el_ms")
    }
    run = one(tmp_path, plain)
    assert run.summary["mean_e2el_ms"] == pytest.approx(466.6667)
    assert run.summary["p90_e2el_ms"] == pytest.approx(640)
    unclear = one(tmp_path, plain | {"latencies": [0.4, 0.0, 0.7]})
    assert "mean_e2el_ms" not in unclear.summary


def test_sglang(tmp_path: Path) -> None:
    run = one(tmp_path, samples.SGLANG)
    assert (run.tool, run.version, run.model) == ("sglang", "0.5.23", "tiny")
    assert (run.rate, run.concurrency) == (2.0, 8.0)
    assert "tokenised again, the answers have 9 tokens" in run.notes
    arrays = dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls", "errors"))
    plain = one(tmp_path, changed(samples.SGLANG, **arrays, request_rate="trace"))
    assert plain.requests is None
    assert {key: plain.summary[key] for key in ANSWERS} == pytest.approx(ANSWERS)
    assert plain.failed is None
    assert "requests were sent at the times of a trace" in plain.notes


def test_guidellm(tmp_path: Path) -> None:
    run = one(tmp_path, samples.GUIDELLM)
    assert (run.tool, run.version, run.model) == ("guidellm", "0.8.1 (report 2)", "tiny")
    assert (run.rate, run.concurrency) == (2.0, None)
    assert run.summary["mean_itl_ms"] == pytest.approx(60)
    older = {"metadata": {"version": 1, "guidellm_version": "0.6.0"}, "args": {"model": "small"}}
    older["benchmarks"] = [samples.GUIDELLM["benchmarks"][0]]
    first = one(tmp_path, older)
    assert (first.version, first.model) == ("0.6.0 (report 1)", "small")
    assert first.summary == run.summary


def test_guidellm_without_requests(tmp_path: Path) -> None:
    benchmark = changed(samples.GUIDELLM["benchmarks"][0], requests={"successful": [], "incomplete": None})
    run = one(tmp_path, changed(samples.GUIDELLM, benchmarks=[benchmark]))
    assert run.requests is None
    assert (run.completed, run.failed) == (3, 0)
    assert run.summary["mean_e2el_ms"] == pytest.approx(467.6667)
    assert run.summary["p99_ttft_ms"] == 600  # the tool's rule: no interpolation
    assert run.summary["mean_itl_ms"] == 60
    assert "mean_tpot_ms" not in run.summary
    assert run.summary["output_throughput"] == pytest.approx(8 / 1.7)


def test_guidellm_sample(tmp_path: Path) -> None:
    benchmark = changed(samples.GUIDELLM["benchmarks"][0])
    benchmark["metrics"]["request_totals"] |= {"successful": 300, "errored": 5}
    benchmark["metrics"]["prompt_token_count"]["successful"]["total_sum"] = 35_000
    run = one(tmp_path, changed(samples.GUIDELLM, benchmarks=[benchmark]))
    assert run.requests is not None
    assert (run.completed, run.failed, len(run.requests)) == (300, 5, 3)
    assert run.summary["request_throughput"] == pytest.approx(300 / 1.7)
    assert run.summary["total_input_tokens"] == 35_000
    assert run.summary["mean_ttft_ms"] == pytest.approx(366.6667)
    assert "only 3 of 300 requests that succeeded are in the file" in run.doubts[0]


def test_aiperf(tmp_path: Path) -> None:
    run = one(tmp_path, samples.AIPERF)
    assert (run.tool, run.version, run.model) == ("aiperf", "0.13.0", "tiny")
    assert (run.rate, run.concurrency, run.failed) == (2.0, 8.0, 0)
    expected = {key: value for key, value in ANSWERS.items() if not key.startswith("std")}
    assert {key: run.summary[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    assert run.doubts == ()
    seconds = {"unit": "s", "avg": 0.3666667, "p50": 0.3}
    again = one(tmp_path, changed(samples.AIPERF, time_to_first_token=seconds))
    assert again.summary["mean_ttft_ms"] == pytest.approx(366.6667)


def test_genai_perf(tmp_path: Path) -> None:
    run = one(tmp_path, samples.GENAI_PERF)
    assert (run.tool, run.version, run.duration_s, run.completed) == ("genai-perf", "", None, 3)
    assert run.summary["mean_e2el_ms"] == 466.6667


def test_aiperf_warmup_is_left_out_and_said(tmp_path: Path) -> None:
    warm = changed(samples.AIPERF_RECORDS[0])
    warm["metadata"]["benchmark_phase"] = "warmup"
    run = one(tmp_path, [warm, *samples.AIPERF_RECORDS])
    assert run.completed == 3
    assert "left out: 1 request of the warm-up" in run.notes


def test_aiperf_failures(tmp_path: Path) -> None:
    failed = changed(samples.AIPERF_RECORDS[0], metrics={"error_isl": {"value": 77, "unit": "tokens"}})
    failed["error"] = {"code": 499, "type": "RequestCancellationError", "message": "cancelled after 0 s"}
    silent = changed(samples.AIPERF_RECORDS[0], metrics={})
    cancelled = changed(silent, metadata=silent["metadata"] | {"was_cancelled": True})
    run = one(tmp_path, [*samples.AIPERF_RECORDS, failed, silent, cancelled])
    assert (run.completed, run.failed) == (3, 3)
    assert run.requests is not None
    assert run.requests["input_tokens"].to_list()[3:] == [77, None, None]
    assert run.requests["error"].to_list()[3:] == [
        "RequestCancellationError: cancelled after 0 s",
        "no request_latency, and no error either",
        "cancelled",
    ]
    assert run.summary["mean_ttft_ms"] == pytest.approx(366.6667)


def test_llmservingsim_says_how_the_clocks_are_aligned(tmp_path: Path) -> None:
    run = one(tmp_path, samples.LLMSERVINGSIM)
    assert "aligned by the smallest queued_ts - arrival_time" in run.notes[0]
    unfinished = samples.LLMSERVINGSIM[2] | {"last_token_ts": None}
    cut = one(tmp_path, [*samples.LLMSERVINGSIM[:2], unfinished])
    assert (cut.completed, cut.failed) == (2, 1)


def test_table(tmp_path: Path) -> None:
    path = saved(tmp_path, samples.TABLE, "runs.csv")
    low, high = read_measured(path, run=1), read_measured(path, run=2)
    assert low.source == f"{path}: row 2 (low)"
    assert (low.tool, low.model, low.rate, low.concurrency) == ("table", "tiny", 2.0, 8.0)
    assert (low.completed, low.failed, low.duration_s) == (3, 0, 1.7)
    keys = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput")
    assert {key: low.summary[key] for key in keys} == pytest.approx({key: ANSWERS[key] for key in keys}, rel=1e-4)
    assert low.summary["total_token_throughput"] == pytest.approx(ANSWERS["total_token_throughput"], rel=1e-4)
    assert low.doubts == ()
    assert high.doubts == ("1 request failed; every figure is over the others",)


@pytest.mark.parametrize("format", GOOD)
def test_formats_are_recognised(tmp_path: Path, format: str) -> None:
    [found, *_], [named, *_] = runs(tmp_path, GOOD[format]), runs(tmp_path, GOOD[format], format)
    assert found.summary == named.summary
    assert found.notes == named.notes
