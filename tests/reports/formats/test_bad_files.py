"""Every mistake of a file is said at once: where it stands, what was found, and what is allowed or how to fix it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from reports.formats import FORMATS, read_all, read_measured
from servecast.errors import ServecastError
from tests.reports.formats import samples
from tests.reports.formats.samples import GOOD, changed, lines, saved


def said(path: Path, format: str | None = None, run: int | None = None) -> str:
    with pytest.raises(ServecastError) as error:
        read_measured(path, format, run)
    return str(error.value)


def refused(folder: Path, content: Any, format: str | None = None) -> str:
    with pytest.raises(ServecastError) as error:
        read_all(saved(folder, content), format)
    return str(error.value)


# -- the file


def test_missing_file(tmp_path: Path) -> None:
    saved(tmp_path, GOOD["vllm"], "result.json")
    assert said(tmp_path / "results.json").endswith("results.json: no such file (did you mean 'result.json'?)")
    assert "no such file" in said(tmp_path / "no" / "r.json")
    assert "a folder; name the result file in it" in said(tmp_path)
    assert "r.json" in said(Path("a" * 5000, "r.json"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    assert "the file is empty; was the benchmark run to its end?" in refused(tmp_path, content)


def test_truncated_json(tmp_path: Path) -> None:
    assert "line 1: not a whole JSON object; is the file truncated?" in refused(tmp_path, GOOD["vllm"][:500])
    assert "line 1: not a whole JSON object" in refused(tmp_path, GOOD["aiperf"][:300])


def test_every_broken_line(tmp_path: Path) -> None:
    good = lines(samples.VLLM_33)
    text = refused(tmp_path, f"{good}{good[:90]}\n{good}[1]\n{{x\n")
    assert [problem.partition("run.json: ")[2] for problem in text.splitlines()] == [
        "line 2: not a whole JSON object; is the file truncated?",
        "line 4: a list, not a JSON object; give one object a run",
        "line 5: not a whole JSON object; is the file truncated?",
    ]
    assert "run.json: 3 more lines like these" in refused(tmp_path, "{x\n" * 8)


def test_binary_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b'{"a": 1}\n{"b": "\xff"}')
    assert "line 2: not UTF-8 text" in said(path)
    path.write_bytes(gzip.compress(GOOD["vllm"].encode())[:-20])
    assert "gzip file is truncated or damaged" in said(path)
    path.write_bytes(b"\0\1\2")
    assert "binary or not UTF-8 text" in said(path)


def test_packed_and_pretty_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(samples.VLLM_33, indent=2).encode()))
    assert read_measured(path).completed == 3


# -- the format


def test_unknown_format(tmp_path: Path) -> None:
    text = refused(tmp_path, {"arrival": 1, "ttfts": [1]})
    assert "the keys ('arrival', 'ttfts') are of no known result format; formats: vllm, sglang, guidellm" in text
    assert "as format vllm, key 'duration' is missing" in refused(tmp_path, {"durations": 1}, "vllm")
    assert "(did you mean 'durations'?)" in refused(tmp_path, {"durations": 1}, "vllm")
    assert "unknown result format 'vlm' (did you mean 'vllm'?)" in refused(tmp_path, GOOD["vllm"], "vlm")
    assert "as format vllm_cpu, a table is needed, this is JSON" in refused(tmp_path, GOOD["vllm"], "vllm_cpu")
    assert "as format sglang, JSON is needed, this is a table" in refused(tmp_path, GOOD["table"], "sglang")
    assert "the columns ('a', 'b') are of no known result format" in refused(tmp_path, "a,b\n1,2\n")


def test_unknown_versions(tmp_path: Path) -> None:
    newer = changed(samples.GUIDELLM, metadata={"version": 3})
    assert "metadata.version is 3; known are 1, 2" in refused(tmp_path, newer)
    assert "metadata.version is null" in refused(tmp_path, changed(samples.GUIDELLM, metadata={}))
    assert "schema_version is '2.0'; 1.x is known" in refused(tmp_path, changed(samples.AIPERF, schema_version="2.0"))


@pytest.mark.parametrize("format", FORMATS)
def test_one_formats_file_read_as_another(tmp_path: Path, format: str) -> None:
    for other, content in GOOD.items():
        if other != format:
            text = refused(tmp_path, content, format)
            assert f"as format {format}, " in text or "column 'id' is not understood" in text


# -- several runs


def test_several_runs_are_listed(tmp_path: Path) -> None:
    faster = changed(samples.VLLM_8, max_concurrency=4)
    path = saved(tmp_path, [samples.VLLM_33, faster])
    assert said(path) == (
        f"{path}: several runs; say which, from 1 to 2: run 1: line 1, tiny, 3 requests completed, rate 2; "
        f"run 2: line 2, tiny, 3 requests completed, concurrency 4"
    )
    assert read_measured(path, run=2).version == "0.8"
    assert f"{path}: there is no run 3; say which, from 1 to 2" in said(path, run=3)
    assert "there is no run 0" in said(path, run=0)
    assert read_measured(saved(tmp_path, samples.VLLM_33), run=1).source == str(path)


def test_appended_without_a_line_break(tmp_path: Path) -> None:
    assert len(read_all(saved(tmp_path, GOOD["vllm"].strip() * 3))) == 3


def test_a_sweep_is_a_run_each(tmp_path: Path) -> None:
    sweep = changed(samples.GUIDELLM, benchmarks=samples.GUIDELLM["benchmarks"] * 2)
    first, second = read_all(saved(tmp_path, sweep))
    assert first.source.endswith("run.json: benchmarks[0]")
    assert second.source.endswith("run.json: benchmarks[1]")


def test_mistakes_of_all_runs_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, [changed(samples.VLLM_33, duration="x"), changed(samples.VLLM_33, duration=0)])
    assert "line 1: duration is 'x'; a number from 1e-06" in text
    assert "line 2: duration is 0; a number from 1e-06" in text


# -- values


def test_arrays(tmp_path: Path) -> None:
    bad = changed(
        samples.VLLM_33,
        output_lens=[4, 1.5, -3],
        ttfts=[0.2, "0.3", 0.6],
        itls=[[0.05], None, [float("nan")]],
        errors=["", 5, None],
        request_rate="fast",
        max_concurrency=0,
        completed=True,
        mean_ttft_ms=float("inf"),
    )
    problems = refused(tmp_path, bad).splitlines()
    for expected in (
        "output_lens[1] is 1.5; a whole number from 0 to 2147483647 was expected (and 1 more)",
        "ttfts[1] is '0.3'; a finite number of up to 1e+15 was expected",
        "itls[1] is null; a list of finite numbers (seconds) was expected (and 1 more)",
        "errors[1] is 5; text was expected",
        "request_rate is 'fast'; a number above 0, inf or trace was expected",
        "max_concurrency is 0; a number from 1",
        "completed is True; a whole number",
        "mean_ttft_ms is inf; a finite number",
    ):
        assert any(expected in problem for problem in problems), expected
    assert len(problems) == 8


def test_arrays_of_different_lengths(tmp_path: Path) -> None:
    text = refused(tmp_path, changed(samples.VLLM_33, ttfts=[0.2, 0.3], latencies=[]))
    assert "arrays of different lengths (input_lens 3, output_lens 3, ttfts 2, itls 3, errors 3, latencies 0" in text


def test_arrays_that_lack(tmp_path: Path) -> None:
    text = refused(tmp_path, changed(samples.SGLANG, itls=None, errors=None))
    assert "input_lens, output_lens, ttfts but no itls, errors; save the run with --output-details" in text
    none: dict[str, list[int]] = {key: [] for key, value in samples.VLLM_33.items() if isinstance(value, list)}
    assert "the arrays hold no requests" in refused(tmp_path, samples.VLLM_33 | none)


def test_missing_keys_of_a_later_run(tmp_path: Path) -> None:
    text = refused(tmp_path, [samples.SGLANG, {"x": 1}])
    assert "line 2: duration is missing; the tool always writes it" in text
    assert "line 2: total_output_tokens_retokenized is missing" in text


def test_no_success(tmp_path: Path) -> None:
    failing = changed(samples.VLLM_33, errors=["refused", "b", "c"], completed=0)
    text = refused(tmp_path, failing)
    assert "no request succeeded (the first failed with 'refused'), so there is nothing to compare with" in text
    plain = {key: value for key, value in failing.items() if key not in (*samples.PLAIN, "latencies")}
    assert "no request succeeded, so" in refused(tmp_path, plain)
    warm = changed(samples.AIPERF_RECORDS[0])
    warm["metadata"]["benchmark_phase"] = "warmup"
    assert "1 request of the warm-up and no other: nothing was measured" in refused(tmp_path, warm)
    assert "benchmarks is empty" in refused(tmp_path, changed(samples.GUIDELLM, benchmarks=[]))


def test_records_by_line(tmp_path: Path) -> None:
    wrong = changed(samples.AIPERF_RECORDS[0])
    wrong["metrics"]["request_latency"] = {"value": "x", "unit": "ms"}
    wrong["metrics"]["time_to_first_token"]["unit"] = "jiffies"
    late = changed(samples.AIPERF_RECORDS[0], metadata={}, error="x")
    text = refused(tmp_path, [samples.AIPERF_RECORDS[1], wrong, late])
    assert "line 2: metrics: request_latency: value is 'x'; a finite number" in text
    assert "line 2: metrics: time_to_first_token: unit is 'jiffies'; one of ns, us, ms" in text
    assert "line 3: metadata: request_start_ns is missing" in text
    assert "line 3: error is 'x'; an object was expected" in text
    text = refused(tmp_path, [*samples.LLMSERVINGSIM, {"arrival_time": "x", "input_toks": 1.5}])
    assert "line 4: arrival_time is 'x'" in text
    assert "line 4: input_toks is 1.5" in text
    assert "line 4: output_toks is missing" in text


def test_guidellm_by_request(tmp_path: Path) -> None:
    broken = changed(samples.GUIDELLM)
    broken["benchmarks"][0]["requests"]["successful"][1]["info"]["timings"]["request_start"] = "soon"
    broken["benchmarks"][0]["metrics"]["request_latency"]["successful"]["mean"] = [1]
    text = refused(tmp_path, broken)
    assert "requests.successful[1]: info: timings: request_start is 'soon'" in text
    assert "metrics: request_latency: successful: mean is a list" in text


def test_rows_of_a_table(tmp_path: Path) -> None:
    text = refused(tmp_path, samples.VLLM_CPU.replace("600.0", "x").replace("b,0.5,50,1,1", "b,0.5,-50,1,1.5"))
    assert "column 'input_tokens' is negative in 1 row: 3 ('-50')" in text
    assert "column 'tokens_received' is fractional in 1 row: 3 ('1.5')" in text
    assert "column 'ttft_ms' is not understood in 1 row: 4 ('x')" in text


def test_columns_of_a_table(tmp_path: Path) -> None:
    text = refused(tmp_path, "mean_ttft_ms,ttft,gpus,modl,mean_ttft_p99\n1,2,3,4,5\n")
    assert "columns 'mean_ttft_ms' and 'ttft' both mean mean_ttft_ms; take one out" in text
    assert "column 'gpus' is not understood; rename it or take it out" in text
    assert "column 'modl' is not understood (did you mean 'model'?)" in text
    assert "column 'mean_ttft_p99' is not understood" in text
    assert "known columns are name, tool, version, model, duration" in text
    text = refused(tmp_path, "ttft_ms,duration,completed,rate\nx,0,1.5,-1\n20,1,nan,2\n")
    assert "column 'ttft_ms' is not understood in 1 row: 2 ('x')" in text
    assert "column 'duration' is too small in 1 row: 2 ('0')" in text
    assert "column 'completed' is fractional in 1 row: 2 ('1.5')" in text
    assert "column 'completed' is not finite in 1 row: 3 ('nan')" in text
    assert "column 'rate' is negative in 1 row: 2 ('-1')" in text
    assert "no requests: a header" in refused(tmp_path, "ttft_ms,duration\n")


# -- units


def test_seconds_where_milliseconds_belong(tmp_path: Path) -> None:
    text = refused(tmp_path, "ttft_ms,tpot_ms,completed\n0.35,0.02,5\n20,0.02,5\n350,20,5\n")
    assert "row 2: half of the TTFTs are below 0.35 ms, and no engine answers within 0.5 ms" in text
    assert "row 3: TPOT is 0.02 ms, and no engine gives a request a token every 0.1 ms" in text
    assert "times are milliseconds here: if the file has a larger unit, such as seconds" in text
    assert "row 4" not in text
    rows = samples.VLLM_CPU.replace("200.0,66.6667,400.0", "0.2,0.0667,0.4").replace("300.0,,300.0", "0.3,,0.3")
    assert "no engine answers within" in refused(tmp_path, rows.replace("600.0,50.0,700.0", "0.6,0.05,0.7"))


def test_milliseconds_where_seconds_belong(tmp_path: Path) -> None:
    slow = changed(samples.VLLM_33, ttfts=[200.0, 300.0, 600.0], latencies=[400.0, 300.0, 700.0])
    text = refused(tmp_path, slow)
    assert "TPOT is 58.33 s, and no engine takes 10 s a token" in text
    assert "times are seconds in arrays and milliseconds in statistics here" in text
    text = refused(tmp_path, "e2e_ms,duration\n400000,1.7\n")
    assert "requests take 400 s, but the whole run 1.7 s" in text
