"""A folder of session files is the trace of all of them, and every file that is none is named."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from servecast.errors import ServecastError
from servecast.scenario import load_scenario
from servecast.setup import set_up
from tests.servecast.helpers import QUICKSTART
from tests.workloads.test_readers_canonical import assert_equal
from tests.workloads.test_readers_formats import ONE, TWO, session, turn
from workloads.readers import read_trace
from workloads.readers.options import ReadOptions

THREE = session("three", turn(0.0, 100, [1]), turn(8.0, 140, [1, 2]))
EMPTY = session("empty")


def folder(tmp_path: Path, **files: Any) -> Path:
    """A folder with `name=content` as name.json."""
    path = tmp_path / "traces"
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return path


def problems(path: Path, format: str | None = None, options: ReadOptions | None = None) -> list[str]:
    with pytest.raises(ServecastError) as error:
        read_trace(path, format, options)
    return [problem.replace(f"{path.parent}/", "") for problem in error.value.problems]


@pytest.mark.parametrize("options", [ReadOptions(), ReadOptions(spread_s=500, shared_prefix=True, seed=4)])
def test_it_is_the_trace_of_its_sessions_in_order_of_their_names(tmp_path: Path, options: ReadOptions) -> None:
    path = folder(tmp_path, c=json.dumps(TWO, indent=2), a=ONE)
    (path / "b.json.gz").write_bytes(gzip.compress(json.dumps(THREE).encode()))
    lines = tmp_path / "t.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in (ONE, THREE, TWO)), encoding="utf-8")
    found, expected = read_trace(path, options=options), read_trace(lines, options=options)
    assert_equal(replace(found, notes=()), replace(expected, notes=()))
    assert found.dropped == {"output_tokens is 0": 1}
    assert found.notes[0] == "format claude_code: a folder of 3 session files, in order of their names"
    assert found.notes[1:] == expected.notes[1:]


def test_what_is_not_read_is_counted_and_said(tmp_path: Path) -> None:
    path = folder(tmp_path, a=ONE, b=EMPTY, c=TWO)
    (path / "cache_hit_rates.txt").write_text("0.9")
    (path / "._a.json").write_bytes(b"\0\5\x16\7")  # as macOS's tar leaves them
    (path / "more.json").mkdir()
    trace = read_trace(path, "claude_code")
    assert len(trace) == 6
    notes = " ".join(trace.notes)
    assert "a folder of 3 session files" in notes
    assert "not read: 3 others (._a.json, cache_hit_rates.txt, more.json)" in notes
    assert "1 of the sessions have no requests; they are left out" in notes
    assert "they all begin at 0 s, as each file or line counts from its own start" in notes


def test_all_mistakes_are_said_with_their_files(tmp_path: Path) -> None:
    cut = json.dumps(TWO)[:-20]
    bad = session("bad", turn(0.0, 190, [1, 2]) | {"in": -1})
    path = folder(tmp_path, a=ONE, b=cut, c=json.dumps(TWO, indent=2)[:-9], d="", e="a,b\n1,2\n", f=bad, g={"x": 1})
    folder(tmp_path, h=json.dumps({"files": 3}, indent=1), i="PAR1", j="[1]", k=f"{json.dumps(ONE)}\n{cut}\n")
    (path / "l.json.gz").write_bytes(gzip.compress(json.dumps(ONE).encode())[:-30])
    found = problems(path)
    for name, part in {
        "b.json": "row 1 is not a whole JSON object",
        "c.json": "row 1 is not a whole JSON object",
        "d.json": "the file is empty",
        "e.json": "it is not JSON",
        "f.json": "'in' is not a whole number from 0",
        "g.json": "no Claude Code session: 'requests' is no list",
        "h.json": "an object over several lines must be a session, but this has no list 'requests'",
        "i.json": "a damaged or truncated Parquet file",
        "j.json": "row 1 is not a whole JSON object",
        "k.json: row 2": "is not a whole JSON object (is the file truncated?)",
        "l.json.gz": "the gzip file is truncated or damaged",
    }.items():
        (one,) = [problem for problem in found if problem.startswith(f"traces/{name}: ")]
        assert part in one
    assert len(found) == 11


def test_many_of_one_mistake_are_counted(tmp_path: Path) -> None:
    found = problems(folder(tmp_path, **{f"x{i}": {"timestamp": i, "input_length": 3} for i in range(8)}))
    assert found == [f"traces/x{i}.json: no Claude Code session: 'requests' is no list" for i in range(5)] + [
        "traces: no Claude Code session: 'requests' is no list in 3 more sessions"
    ]


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert "traces: a folder without session files (.json, .json.gz): it is empty. A folder" in problems(path)[0]
    for i in range(5):
        (path / f"t{i}.csv").write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    assert "it holds 5 others (t0.csv, t1.csv, t2.csv, ...)" in problems(path)[0]
    assert "for any other trace, name the file" in problems(path)[0]
    folder(tmp_path, a=EMPTY)
    assert problems(path) == ["traces: no requests: 1 sessions without any"]
    folder(tmp_path, a=ONE)
    assert problems(path, "azure") == [
        "traces: a folder; only Claude Code sessions are read from folders: name the azure file in it"
    ]
    assert "has no option block_tokens" in problems(path, options=ReadOptions(block_tokens=16))[0]
    (path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ONE).encode()))
    assert problems(path) == ["traces: 1 file (a.json) both plain and packed (.gz); remove one of each"]


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["trace", *(str(arg) for arg in args)])


def test_commands_and_scenarios_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path, a=ONE, b=TWO)
    info = call("info", "traces")
    assert info.exit_code == 0, info.output
    assert "a folder of 2 session files" in " ".join(info.stdout.split())
    done = call("convert", "traces", "--out", "o.parquet", "--spread", 100)
    assert done.exit_code == 0, done.output
    assert "o.parquet: 6 requests" in done.stdout
    assert "dropped: 1 output_tokens is 0" in done.stdout
    assert call("plot", "traces", "--out", "o.html").exit_code == 0
    setup = set_up(load_scenario(QUICKSTART, {"workload": {"trace": "traces", "spread": "100s"}}))
    assert len(setup.requests.trace) == len(read_trace("o.parquet")) == 6
    (tmp_path / "traces" / "b.json").write_text("{")
    broken = call("info", "traces")
    assert broken.exit_code == 2
    assert broken.stderr.startswith("Error: traces/b.json: row 1 is not a whole JSON object")
