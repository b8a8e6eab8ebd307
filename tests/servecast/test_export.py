"""A result, saved and exported, is the same when it is read again; what is left out is said."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import servecast
from reports import perfetto
from reports.formats import read_measured
from reports.measured import MeasuredRun
from reports.token_gaps import token_gaps
from servecast.cli import main
from servecast.errors import ServecastError
from servecast.exporting import FORMATS, export, saved, simulated_of
from servecast.run import Result, simulate
from servecast.scenario import load_scenario
from tests.servecast.helpers import QUICKSTART, small

ANOTHER_CLOCK = {"aiperf", "aiperf_records"}
"""Their rates are over the time from the first request, not from 0."""
RATES = ("duration", "request_throughput", "input_throughput", "output_throughput", "total_token_throughput")
GOODPUT = "request_goodput"

requests = st.fixed_dictionaries(
    {
        "gap": st.floats(0, 0.3),
        "input_tokens": st.integers(1, 1500),
        "output_tokens": st.integers(1, 60),
        "patience_s": st.sampled_from([None, None, 0.05, 0.4]),
        "class": st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=3),
    }
)


def run_of(folder: Path, rows: list[dict[str, Any]], **engine: Any) -> Result:
    """The requests on one GPU; what is longer than 1,400 tokens is rejected."""
    lines, now = [], 0.1
    for row in rows:
        now += row["gap"]
        known = {key: value for key, value in row.items() if key != "gap" and value is not None}
        lines.append(json.dumps({"arrival_s": now, "max_tokens": row["output_tokens"], **known}))
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = {"preset": "vllm-0.19", "max_model_len": 1400, "max_num_batched_tokens": 2048, **engine}
    workload = {"trace": str(folder / "trace.jsonl")}
    return simulate(load_scenario(QUICKSTART, {"workload": workload, "engine": options}))


@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes, as each try is a simulation
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(requests, min_size=1, max_size=25), st.sampled_from([100, 5000]), st.booleans())
def test_read_again(rows: list[dict[str, Any]], blocks: int, asynchronous: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = run_of(folder, rows, num_gpu_blocks_override=blocks, async_scheduling=asynchronous)
        result.save(folder / "result")
        for format in (each for each in FORMATS if each != "pdf"):
            if not result.finished and format not in ("csv", "perfetto", "table"):
                with pytest.raises(ServecastError, match="no request finished"):
                    export(folder / "result", format)
                continue
            one, other = export(folder / "result", format).path, result.export(format, folder / "memory").path
            assert one.read_bytes() == other.read_bytes()
            if format == "perfetto":
                nested(json.loads(one.read_text(encoding="utf-8")))
            elif result.finished:
                same(format, read_measured(one), result)


def same(format: str, run: MeasuredRun, result: Result) -> None:
    summary, cut = result.summary(), set()
    lost = int((result.requests["status"] == "cancelled").sum())
    if format in ANOTHER_CLOCK:
        cut |= {*RATES, GOODPUT}
    if lost and format != "table":  # ours is over all tokens there were, theirs over requests that succeeded
        cut |= {key for key in summary if key.endswith("itl_ms")}
    for key, value in run.summary.items():
        if key not in cut:
            assert value == pytest.approx(summary[key], rel=1e-9, abs=1e-9), key
    assert (run.completed, run.failed) == (summary["completed"], summary["submitted"] - summary["completed"])
    assert not [doubt for doubt in run.doubts if "do not follow" in doubt or "details show" in doubt]
    if run.requests is not None:
        same_requests(format, run.requests, result.requests)


def same_requests(format: str, found: pl.DataFrame, ours: pl.DataFrame) -> None:
    exact = 0 if format in ("vllm", "csv") else 1e-9
    if format == "guidellm":  # it has a list for each outcome
        ours = pl.concat([ours.filter(ours["status"] == s) for s in ("finished", "cancelled", "rejected")])
    done = (ours["status"] == "finished").to_numpy()
    assert found["error"].is_null().to_numpy().tolist() == done.tolist()
    assert found["input_tokens"].to_list() == ours["prompt_tokens"].to_list()
    if format != "sglang":
        sent = ours["arrival_s"].to_numpy()
        assert np.abs(found["sent_s"].to_numpy() - (sent - sent.min())).max() <= (1e-9 if exact else 0)
    found, ours = found.filter(done), ours.filter(done)
    assert found["output_tokens"].to_list() == ours["output_tokens"].to_list()
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        assert found[name].null_count() == ours[name].null_count()
        differ = (found[name] - ours[name]).drop_nulls().abs().max()
        assert differ is None or differ <= (1e-12 if name == "tpot_s" else exact), name  # type: ignore[operator]


def nested(trace: Any) -> None:
    """Slices of a track touch, lie within each other, or apart; a request's phases fill it."""
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            place = tracks.setdefault((event["pid"], event["tid"]), [])
            place.append((begin, begin + round(event["dur"] * 1e3), event["name"]))
    for (_, track), slices in tracks.items():
        stack: list[tuple[int, int, str]] = []
        for begin, end, name in slices:
            assert end >= begin
            while stack and stack[-1][1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1][1]
            assert len(stack) < 2
            if track and not name.startswith("request"):
                assert stack or begin == end
            stack.append((begin, end, name))


@pytest.mark.parametrize(
    "engine",
    [
        {"preset": "vllm-0.19", "num_gpu_blocks_override": 200, "max_model_len": 3000},
        {"preset": "vllm-0.6", "num_gpu_blocks_override": 200, "max_model_len": 3000, "max_num_batched_tokens": 3000},
        {"preset": "sglang-0.5.9"},
    ],
)
def test_token_gaps_are_those_of_the_engine(engine: dict[str, Any]) -> None:
    """All gaps, of preempted requests too, are those that the engine counted while it ran."""
    result = simulate(small(engine=engine, workload__arrivals__rate=60))
    found = token_gaps(result.requests, result.steps, result.gaps)
    assert [gaps is not None for gaps in found] == (result.requests["status"] == "finished").to_list()
    ours, counts = result.itl.values, np.diff(result.itl.cumulative, prepend=0).astype(int)
    assert np.sort(np.concatenate([gaps for gaps in found if gaps is not None])) == pytest.approx(
        np.repeat(ours, counts), abs=1e-12
    )
    assert (result.summary()["preemptions"] > 0) == ("num_gpu_blocks_override" in engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(small(cluster__replicas=2)).save(tmp_path_factory.mktemp("export") / "result")


def test_command(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", str(folder), "--format", "vllm", "--out", str(tmp_path / "b.json")])
    assert (done.exit_code, done.output) == (0, f"Written: {tmp_path / 'b.json'}\n")
    assert read_measured(tmp_path / "b.json").completed == 40
    words = ["export", str(folder), "--format", "perfetto", "--window", "1", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, words)
    assert "Note: shown is what overlaps the window from 1 to 2 s" in done.output
    trace = json.loads((tmp_path / "perfetto.json").read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert slices
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {name.split(" (")[0] for name in names} == {"replica 0", "replica 1"}
    assert all(event["ts"] <= 2e6 for event in slices)
    assert any("left out: " in note for note in trace["otherData"]["notes"])


def test_a_trace_has_all_requests_and_steps(folder: Path) -> None:
    run = saved(folder)
    trace = json.loads("".join(perfetto.write(run, [])))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in slices) == len(run.steps)
    spans = {e["name"]: e for e in slices if e["name"].startswith("request")}
    assert len(spans) == len(run.requests) == 40
    for row in run.requests.iter_rows(named=True):
        assert spans[f"request {row['id']}"]["dur"] == pytest.approx(1e6 * row["e2e_s"], abs=0.01)
    assert trace["otherData"]["notes"] == []


def test_a_trace_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MOST", 30)
    notes: list[str] = []
    trace = json.loads("".join(perfetto.write(saved(folder), notes)))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) <= 30
    assert notes[0].startswith("cut off at ")
    assert "of 40 requests" in notes[1]


def test_a_trace_of_sessions_and_of_prefill_apart_nests() -> None:
    for name, size in (("mix-agent", "num_sessions=8"), ("split-serving", "num_requests=40")):
        result = simulate(load_scenario(QUICKSTART.with_name(f"{name}.yaml"), [f"workload.{size}"]))
        nested(json.loads("".join(perfetto.write(simulated_of(result), []))))


@pytest.mark.parametrize(
    ("window", "said"), [((2.0, 1.0), "the window from 2 to 1 s is empty"), ((1e4, 2e4), "nothing happens from")]
)
def test_windows_that_hold_nothing(folder: Path, window: tuple[float, float], said: str, tmp_path: Path) -> None:
    with pytest.raises(ServecastError, match=said):
        export(folder, "perfetto", tmp_path / "trace.json", window)
    assert not list(tmp_path.iterdir())


def test_wrong_words(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ServecastError, match=r"unknown format 'vlm' .did you mean 'vllm'.*; formats: vllm, sglang"):
        export(folder, "vlm")
    with pytest.raises(ServecastError, match="a window is for format perfetto"):
        export(folder, "csv", window=(0, 1))
    with pytest.raises(ServecastError, match=r"no such folder .did you mean 'result'"):
        export(folder.parent / "resul", "csv")
    with pytest.raises(ServecastError, match="a file, not a folder"):
        export(folder / "summary.json", "csv")
    with pytest.raises(ServecastError, match="cannot be written"):
        export(folder, "csv", folder / "summary.json" / "x.csv")


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_folders_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    less = copied(folder, tmp_path / "less")
    (less / "steps.parquet").unlink()
    (less / "manifest.json").unlink()
    with pytest.raises(
        ServecastError, match=r"less: no steps\.parquet, manifest\.json; a result has requests\.parquet"
    ):
        export(less, "csv")
    cut = copied(folder, tmp_path / "cut")
    (cut / "summary.json").write_text('{"duration": 1', encoding="utf-8")
    with pytest.raises(ServecastError, match=r"summary\.json: cannot be read"):
        export(cut, "csv")
    broken = copied(folder, tmp_path / "broken")
    (broken / "requests.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ServecastError, match=r"requests\.parquet: cannot be read"):
        export(broken, "csv")


def test_results_of_another_version(folder: Path, tmp_path: Path) -> None:
    old = copied(folder, tmp_path / "old")
    facts = json.loads((old / "manifest.json").read_text(encoding="utf-8"))
    (old / "manifest.json").write_text(json.dumps(facts | {"servecast": "0.0.1"}), encoding="utf-8")
    with pytest.raises(ServecastError, match=r"the result is of servecast 0\.0\.1, this is"):
        export(old, "csv")
    less = copied(folder, tmp_path / "less")
    pl.read_parquet(less / "steps.parquet").drop("decodes").write_parquet(less / "steps.parquet")
    with pytest.raises(ServecastError, match=r"steps\.parquet: no column decodes, so the result is of another version"):
        export(less, "csv")


def test_python_api(folder: Path, tmp_path: Path) -> None:
    done = servecast.export(folder, "sglang", tmp_path)
    assert done.path == tmp_path / "sglang.jsonl"
    assert done.notes == ()
