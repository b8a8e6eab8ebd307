"""The figures show the run's data, in sensible units, at a size that does not grow with the run."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from reports import figures, look
from sim.result import Result
from tests.reports.conftest import RUNS
from tests.reports.helpers import run

Runs = Callable[[str], Result]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("figure", figures.FIGURES)
def test_every_figure_of_every_run(runs: Runs, name: str, figure: str) -> None:
    made = figures.FIGURES[figure][0](runs(name))
    assert "NaN" not in re.sub('"bdata":"[^"]*"', "", made.to_json())  # base64 may spell it by chance
    assert made.layout.annotations[0].text
    for trace in made.data:
        for values in (trace.x, trace.y):
            assert np.isfinite(np.array([v for v in values if v is not None], dtype=float)).all()


def test_cdfs_mark_percentiles_and_slo(runs: Runs) -> None:
    result = runs("stable")
    made, summary = figures.latency_cdfs(result), result.summary()
    marks = [t for t in made.data if t.mode == "markers+text"]
    assert len(marks) == 4
    assert list(marks[0].x) == pytest.approx([summary[f"p{q}_ttft_ms"] for q in (50, 90, 99)])
    assert [list(t.x) for t in made.data if t.line.dash == "dash"] == [[1000, 1000], [50, 50]]  # ms
    assert [made.layout[f"xaxis{n}"].title.text for n in ("", 2, 3, 4)] == ["ms", "ms", "ms", "ms"]


def test_long_latencies_are_in_seconds(runs: Runs) -> None:
    assert figures.latency_cdfs(runs("saturated")).layout.xaxis4.title.text == "s"


def test_kv_shows_the_pool_and_preemptions(runs: Runs) -> None:
    result = runs("saturated")
    traces = {t.name: t for t in figures.kv_over_time(result).data}
    assert traces["preemptions"].customdata.sum() == result.summary()["preemptions"]
    assert max(traces["peak"].y) == pytest.approx(100 * result.summary()["kv_peak_fraction"])
    assert set(traces["pool is full"].y) == {100}


def test_scatter_samples_and_says_so() -> None:
    made = figures.requests_scatter(
        run(4000, 8.0, lengths=({"kind": "fixed", "tokens": 64}, {"kind": "fixed", "tokens": 2}))
    )
    assert sum(len(t.x) for t in made.data) == 2 * figures.SCATTER_POINTS
    assert "3,000 of 4,000 requests" in made.layout.annotations[0].text


def test_narrow_layout_stacks_panels(runs: Runs) -> None:
    made = figures.latency_cdfs(runs("stable")).to_plotly_json()
    narrow = look.one_column(made)
    assert narrow["xaxis2"]["domain"] == [0.0, 1.0]
    assert narrow["height"] > made["layout"]["height"]
    assert narrow["yaxis2"]["title"] == made["layout"]["yaxis2"]["title"]


def test_log_axis_writes_its_ticks_out() -> None:
    axis = look.scaled(10.0, 5000.0, "ms")
    assert axis["type"] == "log"
    assert axis["ticktext"][:4] == ["10", "30", "100", "300"]
    assert "type" not in look.scaled(10.0, 50.0, "ms")
    assert "type" not in look.scaled(0.0, 5000.0, "ms")
