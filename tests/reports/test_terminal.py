"""The terminal summary: within 80 columns, plain when piped, the verdict before any number."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from reports import words
from reports.terminal import print_summary
from sim.result import Result
from tests.reports.conftest import RUNS
from tests.reports.helpers import run


def printed(result: Result) -> str:
    out = io.StringIO()
    print_summary(result, Console(file=out, width=80))
    return out.getvalue()


@pytest.mark.parametrize("name", RUNS)
def test_every_run(runs: Callable[[str], Result], name: str) -> None:
    text = printed(runs(name))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\b(nan|None|inf)\b", text) is None
    word = words.headline(words.verdict(runs(name))[0])
    assert text.index(word) < text.index("TTFT")
    assert "not yet validated" in text.splitlines()[-1]


def test_numbers(runs: Callable[[str], Result]) -> None:
    result = runs("stable")
    text, summary = printed(result), result.summary()
    assert "llama-3.1-8b on 1 x h100-sxm, vllm-0.19" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("TPOT"))
    assert row == ["TPOT", "ms", *(words.quantity(summary[f"{s}_tpot_ms"]) for s in ("mean", "p50", "p90", "p99"))]
    assert "300 of 300 finished" in text
    assert "meet TTFT <= 1 s, TPOT <= 50 ms" in text


def test_markup_in_names_is_text() -> None:
    assert "[bold]x[/bold] [/]" in printed(run(2, name="[bold]x[/bold] [/]"))


def test_turns_never_sent_and_thrashing_are_said(runs: Callable[[str], Result]) -> None:
    result = runs("saturated")
    summary = result.summary()
    again = summary["recomputed_fraction"]
    assert again >= words.THRASH
    assert f"{summary['preemptions']:,}; {words.percent(again)} of the tokens computed had been" in printed(result)
    [told] = words.notices(result, summary)
    assert told.startswith(f"Thrashing: {words.percent(again)} of the tokens that were computed had been before")
    [told] = words.notices(result, summary | {"recomputed_fraction": 0.99 * words.THRASH, "unsent": 1})
    assert told == "Never sent: 1 request, of sessions that ended with a turn rejected or given up."


def test_dropped_rows_are_said() -> None:
    text = " ".join(printed(run(2, workload={"dropped": {"no output tokens": 1200, "failed": 0}})).split())
    assert "Dropped from the workload before the run: 1,200 requests (1,200: no output tokens)." in text


def test_notes_on_workload_and_engine_are_said() -> None:
    result = run(2, workload={"notes": ["sorted by arrival"]}, notes=["vllm-0.20 is not a preset"])
    text = " ".join(printed(result).split())
    assert "Note: sorted by arrival. Note: vllm-0.20 is not a preset." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (1234, "1,234"),
        (0.0123, "0.012"),
        (0.5, "0.50"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
    ],
)
def test_quantity(value: float | None, text: str) -> None:
    assert words.quantity(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.05, "50 ms"), (1.0, "1 s"), (30, "30 s"), (1200, "20 min"), (36_000, "10 h")]
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text
