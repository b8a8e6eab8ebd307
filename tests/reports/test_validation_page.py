"""The comparison as people see it: page, terminal and JSON; complete for odd runs, escaped, drawn by a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from reports.formats import figures as measured_figures
from reports.measured import REQUEST_COLUMNS, MeasuredRun
from reports.validation import words as say
from reports.validation.causes import Cause, Causes
from reports.validation.compared import Validation, figures, match, mean_error
from reports.validation.figures import figures_of
from reports.validation.json import validation_json
from reports.validation.page import validation_html
from reports.validation.terminal import print_validation
from sim.result import Result
from tests.reports.browser import figures_drawn

EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> "quotes"'
CAUSES = Causes(
    0.14,
    (
        Cause("twice the host's time a step", ("host.step=0.004s",), 0.06, {"mean_ttft_ms": -0.03}),
        Cause(EVIL, (EVIL,), 0.12, {"mean_ttft_ms": 7.0}),
        Cause("kernels 10 % slower", ("host.kernels=1.1",), 0.139, {}),
    ),
    refused=(f"20 % more KV blocks: {EVIL}",),
)


def measured(result: Result, slower: float = 1.1, **facts: Any) -> MeasuredRun:
    """A run with the requests of `result`, of which every time is `slower` times as long."""
    rows = result.requests.filter(pl.col("status") == "finished")
    frame = rows.select(
        sent_s="arrival_s", input_tokens=pl.col("prompt_tokens").cast(pl.Int64), output_tokens="output_tokens",
        ttft_s=slower * pl.col("ttft_s"), tpot_s=slower * pl.col("tpot_s"), e2e_s=slower * pl.col("e2e_s"),
        error=pl.lit(None, pl.String), itl_s=pl.lit(None, pl.List(pl.Float64)),
    ).select(REQUEST_COLUMNS)  # fmt: skip
    known: dict[str, Any] = {
        "tool": "vllm", "version": "0.33", "source": "m.json", "model": "llama", "requests": frame,
        "summary": measured_figures.of(frame, 50.0), "duration_s": 50.0, "completed": len(frame), "failed": 0,
        "rate": None, "concurrency": None, "notes": ("a note",), "doubts": (),
    }  # fmt: skip
    return MeasuredRun(**(known | facts))


def validation(result: Result, run: MeasuredRun, causes: Causes = CAUSES, **facts: Any) -> Validation:
    matched = None
    if run.requests is not None and facts.pop("matched", True):
        matched = match(result, run, np.arange(len(run.requests)))
    predicted, theirs = figures(result, run, matched)
    return Validation(
        run=run, result=result, replayed="Replayed: all.", warnings=facts.get("warnings", ()), predicted=predicted,
        measured=theirs, matched=matched, causes=causes,
    )  # fmt: skip


def aggregates(result: Result, **summary: float) -> Validation:
    run = measured(result)
    return validation(result, replace(run, requests=None, summary=summary or run.summary))


CASES: dict[str, Callable[[Callable[[str], Result]], Validation]] = {
    "all requests": lambda runs: validation(runs("stable"), measured(runs("stable"))),
    "no rows matched": lambda runs: validation(runs("stable"), measured(runs("stable")), matched=False),
    "aggregates": lambda runs: aggregates(runs("stable")),
    "one figure": lambda runs: aggregates(runs("stable"), p99_tpot_ms=3.0),
    "no figure in common": lambda runs: aggregates(runs("one token each"), mean_tpot_ms=3.0),
    "one request": lambda runs: validation(runs("one request"), measured(runs("one request"))),
    "one token each": lambda runs: validation(runs("one token each"), measured(runs("one token each"))),
    "overloaded": lambda runs: validation(runs("saturated"), measured(runs("saturated"), 40.0)),
    "far too slow": lambda runs: validation(runs("stable"), measured(runs("stable"), 0.01)),
    "partial": lambda runs: validation(runs("closed loop"), measured(runs("closed loop")), Causes(None, why_none="x")),
    "evil": lambda runs: validation(
        runs("two replicas"),
        measured(runs("two replicas"), source=EVIL, tool=EVIL, model=EVIL, notes=(EVIL,), doubts=(EVIL,)),
        warnings=(EVIL,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pages(name: str, runs: Callable[[str], Result]) -> None:
    v = CASES[name](runs)
    page = validation_html(v)
    assert len(page.encode()) < 6_000_000
    text = page.replace(get_plotlyjs(), "")
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text) is None
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert "<b>ünïcode" not in text
    assert "not modelled" in text.lower()
    tree = json.loads(validation_json(v))
    assert tree["figures"].keys() == v.predicted.keys() | v.measured.keys()


@pytest.mark.parametrize("name", CASES)
def test_terminal(name: str, runs: Callable[[str], Result]) -> None:
    console = Console(file=StringIO(), width=80)
    print_validation(CASES[name](runs), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\b(nan|None|inf)\b", text) is None


def test_what_is_said(runs: Callable[[str], Result]) -> None:
    run = measured(runs("stable"), 1.25, doubts=("the clock goes back",))
    v = validation(runs("stable"), run, warnings=("Another GPU.",))
    page = validation_html(v)
    assert page.index("the clock goes back") < page.index("Another GPU.") < page.index("Off by")
    for said in (
        "<strong>Doubt about the file</strong>: the clock goes back.",
        '<span class="far">−20 %</span>',
        "With twice the host&#x27;s time a step the mean error falls from 14 % to 6.0 %.",
        "--set host.step=0.004s",
        "A change that fits is no proof",
        "All changes that were tried",
        "What could not be tried",
        "<h3>Request by request</h3>",
    ):
        assert said in page
    assert "With kernels 10 % slower the mean" not in page  # it takes away too little
    assert v.errors["p90_e2el_ms"] == pytest.approx(-0.2)
    assert v.per_request["ttft"] == pytest.approx({"count": 300, "mape": 0.2, "correlation": 1.0})


def test_the_mean_error_is_a_factor() -> None:
    keys = ("mean_ttft_ms", "mean_tpot_ms")
    ours = dict(zip(keys, (10.0, 10.0), strict=True))
    assert mean_error(ours, dict(zip(keys, (20.0, 5.0), strict=True))) == pytest.approx(1.0)
    assert mean_error(ours, {"mean_ttft_ms": 0.0, "duration": 3.0}) is None
    assert mean_error(ours, {**ours, "output_throughput": 5.0}) == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.0312, "+3.1 %"),
        (-0.0999, "−10 %"),
        (-0.5, "−50 %"),
        (1.5, "+150 %"),
        (7.0, "x 8.00"),
    ],
)
def test_errors_in_words(error: float | None, said: str) -> None:
    assert say.signed(error) == said


def test_mean_errors_in_words() -> None:
    assert (say.mean_error(0.0312), say.mean_error(0.14), say.mean_error(1.5)) == ("3.1 %", "14 %", "a factor of 2.50")
    assert say.mean_error(0.9, beside=1.5) == "a factor of 1.90"


def test_figures_are_those_that_there_are_data_for(runs: Callable[[str], Result]) -> None:
    assert list(figures_of(CASES["all requests"](runs))) == ["distributions", "requests", "time"]
    assert list(figures_of(CASES["aggregates"](runs))) == ["distributions"]
    assert list(figures_of(CASES["one token each"](runs))) == ["distributions", "requests", "time"]
    figure = figures_of(CASES["aggregates"](runs))["distributions"][0](CASES["aggregates"](runs))
    assert [trace.name for trace in figure.data[:2]] == ["forecast", "measured (percentiles)"]
    assert list(figure.data[1].y) == [50, 90, 99]


@pytest.mark.parametrize("name", ["all requests", "one figure", "one token each", "far too slow", "evil"])
def test_in_a_browser(name: str, runs: Callable[[str], Result], tmp_path: Path) -> None:
    v = CASES[name](runs)
    assert figures_drawn(validation_html(v), tmp_path) == len(figures_of(v))
