"""Where TTFT and TPOT were spent, in words and bars: what the summary says, and all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reports import pool_words, spent
from sim.result import Result
from tests.reports.conftest import RUNS

Runs = Callable[[str], Result]


@pytest.mark.parametrize("name", RUNS)
def test_bars_are_whole_and_say_how_long_that_is(runs: Runs, name: str) -> None:
    result = runs(name)
    made = spent.where_spent(result)
    for axis, metric in (("", "ttft_ms"), ("2", "tpot_ms")):
        bars = [t for t in made.data if t.type == "bar" and t.yaxis == f"y{axis}"]
        if metric not in result.summary()["spent"]:
            assert not bars
            continue
        assert np.sum([bar.x for bar in bars], axis=0) == pytest.approx(np.full(len(bars[0].x), 100.0))
        labels = made.layout[f"yaxis{axis}"].ticktext
        assert len(labels) == len(bars[0].x)
        assert labels[0].startswith("mean<br>")
    names = [t.name for t in made.data if t.type == "bar" and t.showlegend]
    assert len(names) == len(set(names)), "each part is in the legend once"


def test_pools_have_bars_of_their_own(runs: Runs) -> None:
    labels = spent.where_spent(runs("two pools")).layout.yaxis.ticktext
    assert [label.split("<br>")[0] for label in labels][:2] == ["mean", "slowest 1 %"]
    assert {label.split(":")[0] for label in labels[2:]} == {"h100-sxm", "h100-sxm 1"}


def test_rows_add_up_to_the_whole(runs: Runs) -> None:
    result = runs("stable")
    s = result.summary()
    (ttft, rows), (tpot, _) = spent.rows(s["spent"])
    assert (ttft, tpot) == ("TTFT (ms)", "TPOT (ms)")
    assert rows[0][1][0] == f"{s['mean_ttft_ms']:.1f}"
    shares = [int(cells[0].split("(")[1].split(" ")[0]) for _, cells in rows[1:]]
    assert sum(shares) == pytest.approx(100, abs=2), "but for rounding"
    assert {"queue", "own prompt"} <= {name for name, _ in rows}


def test_sentences_name_the_largest_parts() -> None:
    parts = {"queue": 50.0, "prefill": 30.0, "front_end": 15.0, "other_prompts": 5.0, "other_decodes": 0.0}
    said = list(spent.said({"ttft_ms": {"mean": parts, "slowest": {"queue": 1.0, "prefill": 0.0}}}))
    assert said == [("TTFT", "queue 50 %, own prompt 30 %, front end 15 %; slowest 1 %: queue 100 %")]
    assert list(spent.said({})) == []


def test_pool_facts_have_a_figure_for_each_pool(runs: Runs) -> None:
    for name in ("two pools", "failing"):
        facts = dict(pool_words.pool_facts(runs(name).summary()["pools"]))
        assert all(len(cells) == 2 for cells in facts.values())
        assert {"GPU-hours", "wait for the pool, p99 (ms)", "busiest replica over the mean"} <= set(facts)
    assert "mean replicas" in facts
