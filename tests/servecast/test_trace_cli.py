"""`servecast trace` as a person and as a script see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from workloads.readers import read_trace

ROWS = [
    {"timestamp": 1000 * i, "input_length": 600 + i, "output_length": 1 + i % 3, "hash_ids": [0, i]} for i in range(40)
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["trace", *(str(arg) for arg in args)])


def facts(*args: object) -> dict[str, Any]:
    out = call("info", "t.jsonl", "--json", *args)
    assert out.exit_code == 0, out.output
    return dict(json.loads(out.stdout))


def test_info() -> None:
    out = call("info", "t.jsonl", "--max-model-len", 620)
    assert out.exit_code == 0, out.output
    text = " ".join(out.stdout.split())
    for said in (
        "40 over 39 s",
        "14 requests with one output token: they have no TPOT.",
        "21 requests of 40 are longer than 620 tokens (prompt and output; the longest 641)",
        "format mooncake (times in milliseconds) recognised",
        "80 of 512 tokens, 40 distinct",
        "1.03 requests/s",
    ):
        assert said in text


def test_info_as_json() -> None:
    found = facts("--format", "mooncake")
    assert found["requests"] == 40
    assert found["prefix"]["block_hit_rate"] == pytest.approx(39 / 80)


def test_changes_in_their_order() -> None:
    assert facts("--window", 10, 20)["requests"] == 10
    assert facts("--first", 7)["requests"] == 7
    assert facts("--rate", 2)["span_s"] == 19.5
    assert facts("--scale-prompt", 2, "--scale-output", 3)["longest_request_tokens"] == max(
        2 * (600 + i) + 3 * (1 + i % 3) for i in range(40)
    )
    assert facts("--max-prompt", 610)["prompt_tokens"]["max"] == 639
    cut = facts("--max-prompt", 610, "--over-long", "truncate")
    assert cut["prompt_tokens"]["max"] == 610
    assert any("29 prompts and 0 outputs of 40 requests are over the limits" in note for note in cut["notes"])
    assert facts("--jitter", 3, "--seed", 1) == facts("--jitter", 3, "--seed", 1) != facts("--jitter", 3, "--seed", 2)
    assert 0 < facts("--sample", 0.5)["requests"] < 40


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz"])
def test_convert(ending: str) -> None:
    out = call("convert", "t.jsonl", "--out", f"o.{ending}", "--first", 5)
    assert out.exit_code == 0, out.output
    assert f"o.{ending}: 5 requests over 4 s" in out.stdout
    assert "Note: first 5 of 40 requests" in out.stderr
    trace = read_trace(f"o.{ending}")
    assert trace.prompt_tokens.tolist() == [600, 601, 602, 603, 604]
    assert trace.prefix is not None
    assert "first 5 of 40 requests" in trace.notes


def test_plot() -> None:
    out = call("plot", "t.jsonl", "--out", "page.html")
    assert out.exit_code == 0, out.output
    assert out.stdout == "Page: page.html\n"
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert list(Path().glob("*.part")) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("info", "u.jsonl"), "Error: u.jsonl: no such file (did you mean 't.jsonl'?)"),
        (("info", "t.jsonl", "--format", "mooncak"), "unknown trace format 'mooncak' (did you mean 'mooncake'?)"),
        (("info", "t.jsonl", "--format", "table"), "as format table, column 'input_tokens' is missing"),
        (("info", "t.jsonl", "--block-tokens", 16), "a block would fit: say block_tokens 512"),
        (("info", "t.jsonl", "--shared-prefix"), "format mooncake has no option shared_prefix"),
        (("info", "t.jsonl", "--window", 50, 60), "no request arrives in the window"),
        (("info", "t.jsonl", "--seed", -1), "-1 is not a whole number"),
        (("info", "bad.jsonl"), "bad.jsonl: column 'output_length' is negative in 1 row: 2"),
        (("convert", "t.jsonl", "--out", "o.csv"), "use one of .parquet, .jsonl, .jsonl.gz"),
        (("convert", "t.jsonl", "--out", "no/o.parquet"), "no folder no"),
        (("plot", "t.jsonl", "--out", "no/o.html"), "no folder no"),
        (("plot", "t.jsonl", "--out", "."), "a folder; name a file"),
    ],
)
def test_mistakes(args: tuple[object, ...], said: str) -> None:
    Path("bad.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1] | {"output_length": -4}) + "\n")
    out = call(*args)
    assert out.exit_code == 2
    assert said in out.stderr
    assert "Traceback" not in out.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["bad.jsonl", "t.jsonl"]
