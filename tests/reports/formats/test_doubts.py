"""What is impossible or suspicious in a file is said, with the request and both values; what is in order is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reports.formats import samples
from tests.reports.formats.samples import changed, runs

SUMMARY = {"duration": 12.0, "completed": 10, "total_input_tokens": 1000, "total_output_tokens": 200}


def vllm(**arrays: list[Any]) -> dict[str, Any]:
    """Ten requests, one a second, of 20 tokens each: TTFT 0.2 s, gaps of 10 ms. `arrays` replace those."""
    out: dict[str, Any] = {
        **SUMMARY,
        "failed": 0,
        "total_token_throughput": 100.0,
        "input_lens": [100] * 10,
        "output_lens": [20] * 10,
        "ttfts": [0.2] * 10,
        "itls": [[0.01] * 19 for _ in range(10)],
        "errors": [""] * 10,
        "start_times": [50.0 + i for i in range(10)],
    }
    return out | arrays


def at(values: list[Any], **places: Any) -> list[Any]:
    """The list with other entries, as at(values, _3=0.5)."""
    return [places.get(f"_{i}", value) for i, value in enumerate(values)]


def doubts(folder: Path, content: Any) -> list[str]:
    [run] = runs(folder, content)
    return list(run.doubts)


def test_none(tmp_path: Path) -> None:
    assert doubts(tmp_path, vllm()) == []


CASES: dict[str, tuple[dict[str, list[Any]], str]] = {
    "E2E unlike its parts": (
        {"latencies": at([0.39] * 10, _3=0.6)},
        "TTFT + all ITLs is not E2E in 1 request: request 3 (0.39 s against 0.6 s)",
    ),
    "first token after the end": (
        {"latencies": at([0.39] * 10, _4=0.1)},
        "E2E below TTFT in 1 request: request 4 (0.1 s against 0.2 s)",
    ),
    "negative time": ({"ttfts": at([0.2] * 10, _1=-0.5)}, "TTFT of 0 or less in 1 request: request 1 (-0.5 s)"),
    "no time": (
        {"ttfts": at([0.2] * 10, _1=0.0), "latencies": at([0.39] * 10, _1=0.0)},
        "E2E of 0 or less in 1 request: request 1 (0 s)",
    ),
    "chunks that arrive together": (
        {"itls": at([[0.01] * 19] * 10, _0=[0.0, 0.0, *[0.01] * 17])},
        "gaps of 0 s between chunks, which arrived together, in 1 request: request 0 (2 of 19)",
    ),
    "gaps below 0": (
        {"itls": at([[0.01] * 19] * 10, _0=[-0.01, *[0.01] * 18])},
        "gaps below 0 s between chunks in 1 request: request 0 (1 of 19)",
    ),
    "several tokens a chunk": (
        {"itls": [[0.02] * 9] * 10},
        "several tokens a chunk, so that ITL is no time between tokens, in 10 requests: request 0 (10 chunks for 20 "
        "tokens), request 1 (10 chunks for 20 tokens), request 2 (10 chunks for 20 tokens) and 7 more",
    ),
    "more chunks than tokens": (
        {"itls": at([[0.01] * 19] * 10, _2=[0.01] * 24)},
        "more chunks than tokens in 1 request: request 2 (25 chunks for 20 tokens)",
    ),
    "not streamed": (
        {"itls": at([[0.01] * 19] * 10, _5=[]), "ttfts": at([0.2] * 10, _5=0.4)},
        "TTFT is E2E, as if the answer came in one piece (not streamed), in 1 request: request 5 (0.4 s against 0.4 s "
        "with 20 tokens)",
    ),
    "no output": (
        {"output_lens": at([20] * 10, _6=0), "itls": at([[0.01] * 19] * 10, _6=[])},
        "no output tokens in 1 request: request 6 (100 in, 0 out)",
    ),
    "no input": ({"input_lens": at([100] * 10, _6=0)}, "no input tokens in 1 request: request 6 (0 in, 20 out)"),
    "failures": (
        {"errors": at([""] * 10, _7="Traceback\n  x\nTimeoutError: 60 s\n"), "output_lens": at([20] * 10, _7=0)},
        "failures, left out of every figure, in 1 request: request 7 (TimeoutError: 60 s)",
    ),
    "failures that do not say so": (
        {"ttfts": at([0.2] * 10, _7=0.0), "output_lens": at([20] * 10, _7=0), "itls": at([[0.01] * 19] * 10, _7=[])},
        "failures, left out of every figure, in 1 request: request 7 (no token, and no reason given)",
    ),
    "the clock goes back": (
        {"start_times": [*(50.0 + i for i in range(5)), *(3.0 + i for i in range(5))]},
        "the clock goes back from 51 s at request 4 to 0 s at request 5, further than any request lasts: several runs "
        "in one file, or a clock that was set?",
    ),
    "a pause": (
        {"start_times": [*(50.0 + i for i in range(5)), *(4000.0 + i for i in range(5))]},
        "nothing runs for 3945.61 s between request 4 and request 5: several runs in one file, or a clock that was "
        "set?",
    ),
    "longer than the run": (
        {"start_times": [50.0 + 2 * i for i in range(10)]},
        "the end comes after that of the run in 4 requests: request 6 (12.39 s after the first send against a duration "
        "of 12 s), request 7 (14.39 s after the first send against a duration of 12 s), request 8 (16.39 s after the "
        "first send against a duration of 12 s) and 1 more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_requests(tmp_path: Path, case: str) -> None:
    arrays, expected = CASES[case]
    assert expected in doubts(tmp_path, vllm(**arrays))


def test_answers_in_one_piece_are_said_once(tmp_path: Path) -> None:
    [told] = doubts(tmp_path, vllm(itls=[[]] * 10))
    assert told.startswith("TTFT is E2E, as if the answer came in one piece (not streamed), in 10 requests")


def test_the_last_token_may_lack_a_chunk(tmp_path: Path) -> None:
    assert doubts(tmp_path, vllm(itls=at([[0.01] * 19] * 10, _2=[0.01] * 18))) == []


def test_failures_are_counted_against_the_file(tmp_path: Path) -> None:
    failing = vllm(errors=at([""] * 10, _7="x"), output_lens=at([20] * 10, _7=0))
    told = doubts(tmp_path, failing)
    assert "the file says that 0 requests failed, its details show 1" in told
    assert any("completed 10 (its requests give 9)" in doubt for doubt in told)


def test_figures_that_do_not_follow(tmp_path: Path) -> None:
    told = doubts(tmp_path, vllm() | {"mean_ttft_ms": 250.0, "total_output_tokens": 201, "p99_tpot_ms": 10.001})
    assert told == [
        "stated figures do not follow from the requests: total_output_tokens 201 (its requests give 200); mean_ttft_ms "
        "250 (its requests give 200)"
    ]


def test_sglang_e2e_may_end_a_little_later(tmp_path: Path) -> None:
    assert doubts(tmp_path, changed(samples.SGLANG, mean_e2e_latency_ms=470.0)) == []
    [doubt] = doubts(tmp_path, changed(samples.SGLANG, mean_e2e_latency_ms=520.0))
    assert "mean_e2el_ms 520 (its requests give 466.667)" in doubt


def test_sglang_lengths_unlike_requested(tmp_path: Path) -> None:
    assert doubts(tmp_path, changed(samples.SGLANG, random_output_len=3, random_range_ratio=1.0)) == [
        "output tokens unlike what was requested in 2 requests: request 0 (4 against 3), request 1 (1 against 3)"
    ]
    assert doubts(tmp_path, changed(samples.SGLANG, random_range_ratio=0.5))[0].endswith("(1 against 2 to 4)")


def test_csv_rows(tmp_path: Path) -> None:
    text = samples.VLLM_CPU.replace("a,0.0,100,4,4", "a,0.0,100,9,4").replace(",50.0,700.0", ",80.0,700.0")
    assert doubts(tmp_path, text) == [
        "TTFT + TPOT x (tokens - 1) is not E2E in 1 request: row 4 (0.76 s against 0.7 s)",
        "output tokens unlike what was requested in 1 request: row 2 (4 against 9)",
    ]


def test_guidellm_unfinished_requests(tmp_path: Path) -> None:
    benchmark = changed(samples.GUIDELLM["benchmarks"][0])
    benchmark["requests"]["incomplete"] = [{"request_id": "x", "info": {"timings": {}}}]
    benchmark["requests"]["errored"] = [{"info": {"timings": {}, "error": "HTTP 500"}}]
    [told, _] = doubts(tmp_path, changed(samples.GUIDELLM, benchmarks=[benchmark]))
    assert told == (
        "failures, left out of every figure, in 2 requests: incomplete[0] (incomplete: cut off when the benchmark "
        "ended), errored[0] (HTTP 500)"
    )


def test_aiperf_without_first_tokens_and_some_chunks(tmp_path: Path) -> None:
    silent = changed(samples.AIPERF_RECORDS[1])
    del silent["metrics"]["time_to_first_token"], silent["metrics"]["inter_chunk_latency"]
    told = doubts(tmp_path, [samples.AIPERF_RECORDS[0], silent, samples.AIPERF_RECORDS[2]])
    assert told == [
        "no time of the first token (not streamed?) in 1 request: line 2 (E2E 0.7 s)",
        "no ITLs, so the run has none, in 1 request: line 2 (3 tokens)",
    ]
    [run] = runs(tmp_path, [samples.AIPERF_RECORDS[0], silent, samples.AIPERF_RECORDS[2]])
    assert "mean_itl_ms" not in run.summary


def test_aiperf_without_token_counts(tmp_path: Path) -> None:
    unknown = changed(samples.AIPERF_RECORDS[2])
    del unknown["metrics"]["output_sequence_length"]
    [run] = runs(tmp_path, [*samples.AIPERF_RECORDS[:2], unknown])
    assert "no token counts in 1 request: line 3 (50 in, unknown out)" in run.doubts
    assert "total_output_tokens" not in run.summary
    assert "output_throughput" not in run.summary


def test_aiperf_cancelled_run(tmp_path: Path) -> None:
    assert doubts(tmp_path, changed(samples.AIPERF, was_cancelled=True)) == ["the run was cancelled before its end"]


def test_clocks_that_drift_apart(tmp_path: Path) -> None:
    later = samples.LLMSERVINGSIM[2] | {"arrival_time": 1.7e9 + 1 - 3600}
    told = doubts(tmp_path, [*samples.LLMSERVINGSIM[:2], later])
    assert told[0].startswith(
        "the clocks do not stay together in 1 request: queued_ts - arrival_time is 3600.02 s larger at line 3"
    )


def test_requests_that_vllm_does_not_account_for(tmp_path: Path) -> None:
    assert doubts(tmp_path, changed(samples.VLLM_33, num_prompts=5)) == [
        "num_prompts is 5, but 3 completed and 0 failed: the others failed, or the data set has fewer"
    ]


AGGREGATES: dict[str, tuple[dict[str, Any], str]] = {
    "a mean above p99": ({"mean_tpot_ms": 70.0}, "mean_tpot_ms 70 is above p99_tpot_ms 66.5"),
    "percentiles that fall": ({"p50_ttft_ms": 600.0, "median_ttft_ms": 600.0}, "p50_ttft_ms 600 is above p99_ttft_ms"),
    "a median unlike p50": ({"p50_ttft_ms": 310.0}, "median_ttft_ms 300 is not p50_ttft_ms 310"),
    "a rate unlike its total": (
        {"output_throughput": 47.0},
        "output_throughput is 47, but total and duration give 4.70588",
    ),
    "TTFT above E2E": ({"mean_e2el_ms": 300.0}, "mean_ttft_ms 366.667 is above mean_e2el_ms 300"),
    "E2E unlike its parts": (
        {"mean_tpot_ms": 5.8333, "std_tpot_ms": 0.8333, "p99_tpot_ms": 6.65, "mean_e2el_ms": 900.0, "p99_e2el_ms": 999},
        "mean TTFT + mean TPOT x (tokens - 1) is 376.389 ms, but mean_e2el_ms is 900",
    ),
    "zeros": (
        {"mean_itl_ms": 0.0, "median_itl_ms": 0.0, "p99_itl_ms": 0.0},
        "no run has such figures, so they are left out: mean_itl_ms 0, p99_itl_ms 0",
    ),
    "negative figures": ({"mean_ttft_ms": -3.0}, "no run has such figures, so they are left out: mean_ttft_ms -3"),
    "failures": ({"failed": 4, "num_prompts": 7}, "4 requests failed; every figure is over the others"),
}  # fmt: skip


@pytest.mark.parametrize("case", AGGREGATES)
def test_aggregates(tmp_path: Path, case: str) -> None:
    changes, expected = AGGREGATES[case]
    plain = {key: value for key, value in samples.VLLM_33.items() if key not in (*samples.PLAIN, "latencies")}
    [run] = runs(tmp_path, plain | changes)
    assert any(expected in doubt for doubt in run.doubts), run.doubts
    assert not any(value < 0 for value in run.summary.values())


def test_zeros_of_a_tool_that_has_no_values_say_nothing(tmp_path: Path) -> None:
    single = changed(
        samples.VLLM_33,
        output_lens=[1, 1, 1],
        itls=[[], [], []],
        latencies=[0.2, 0.3, 0.6],
        total_output_tokens=3,
    )
    stated = {key: 0.0 for key in single if key.endswith(("tpot_ms", "itl_ms"))}
    kept = {key: value for key, value in single.items() if not key.endswith("_ms") and "throughput" not in key}
    [run] = runs(tmp_path, kept | stated | {"total_token_throughput": 353 / 1.7})
    assert run.doubts == ()
    assert not [key for key in run.summary if key.endswith(("tpot_ms", "itl_ms"))]
