"""A sweep as people see it: the fronts by brute force, the page for odd sweeps, and in a browser with its filters."""

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
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from rich.console import Console

from reports.sweeping import figures, words
from reports.sweeping.json import sweep_json
from reports.sweeping.levels import levels
from reports.sweeping.page import sweep_html
from reports.sweeping.points import FRONTS, INTERACTIVITY, THROUGHPUT, TTFT, Shown, Swept, unbeaten
from reports.sweeping.terminal import print_sweep
from tests.reports.browser import dom, figures_drawn

EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> "quotes"'
GPUS = ("h100-sxm", "l40s", "b200-sxm")
RATE, SEQS, GPU = "workload.arrivals.rate", "engine.max_num_seqs", "cluster.gpu"


def row(number: int, seed: int = 1, **facts: Any) -> dict[str, Any]:
    """A run that is done: the more requests, the more throughput and the longer everything takes."""
    load = 1.0 + number
    known: dict[str, Any] = {
        "id": f"{number}-{seed}", "point": number, "seed": seed, "draw": 0, "status": "done", "error": None,
        "scenario": f"{number}-{seed}", "wall_s": 0.1, "saturated": False, "undecided": False,
        THROUGHPUT: 100 * load + seed, INTERACTIVITY: 200 / load, TTFT: 20 * load, "p99_ttft_ms": 90 * load,
        "p99_tpot_ms": 5 * load, "p99_e2el_ms": 900 * load, "request_throughput": load, "slo_attainment": 1 / load,
        "unserved": 0.0, "kv_peak_fraction": 0.5, "preemptions": 0.0, "gpus": 1.0,
    }  # fmt: skip
    return known | facts


def swept(rows: list[dict[str, Any]], axes: tuple[Shown, ...] | None = None, **facts: Any) -> Swept:
    axes = axes or (Shown(RATE, None), Shown(GPU, GPUS))
    known: dict[str, Any] = {
        "title": "chat", "texts": tuple((axis.key, "some values") for axis in axes), "total": len(rows), "seeds": 1,
        "draws": 0, "again": 0, "complete": True, "version": "0.1.0", "scenario": "name: chat",
    }  # fmt: skip
    return Swept(axes=axes, rows=pl.DataFrame(rows, infer_schema_length=None), **(known | facts))


def grid(count: int = 12, seeds: int = 1, **facts: Any) -> list[dict[str, Any]]:
    return [
        row(i, seed, **({RATE: 1.0 + i // 3, GPU: GPUS[i % 3]} | facts))
        for i in range(count)
        for seed in range(1, seeds + 1)
    ]


def drawn(rows: list[dict[str, Any]], draws: int = 10, but: Callable[[int, int], dict[str, Any]] | None = None) -> Any:
    """The rows and their draws: draw d scales all figures of all points alike, by up to 1.1; `but` gives the facts of a
    point (its number) in a draw that are others."""
    found = list(rows)
    for d in range(1, draws + 1):
        by = 0.9 + 0.2 * d / draws
        for r in rows:
            facts = {key: by * r[key] for key in (THROUGHPUT, INTERACTIVITY, TTFT, "p99_ttft_ms") if r[key] is not None}
            more = {} if but is None else but(r["point"], d)
            found.append(r | {"id": f"{r['id']}-{d}", "draw": d} | facts | more)
    return swept(found, draws=draws)


def many(count: int) -> Swept:
    """A sampled sweep of five axes."""
    rng = np.random.default_rng(0)
    rows = pl.DataFrame([row(0)]).select(pl.all().repeat_by(count).explode())
    changes = {key: rng.lognormal(5, 1, count) for key in (THROUGHPUT, INTERACTIVITY, TTFT, "p99_ttft_ms", RATE, "x.y")}
    named = {
        GPU: np.array(GPUS)[rng.integers(0, 3, count)],
        "engine.preset": np.array(["a", "b"])[rng.integers(0, 2, count)],
    }
    columns = {"point": np.arange(count), "id": np.arange(count).astype(str), SEQS: rng.integers(1, 500, count)}
    rows = rows.with_columns(pl.Series(name, values) for name, values in (columns | changes | named).items())
    axes = (
        Shown(RATE, None),
        Shown(GPU, GPUS),
        Shown(SEQS, None),
        Shown("engine.preset", ("a", "b")),
        Shown("x.y", None),
    )
    made = swept([row(0, **{RATE: 1.0, GPU: "l40s"})], axes, total=count)
    return Swept(**{name: getattr(made, name) for name in made.__dataclass_fields__} | {"rows": rows})


def many_drawn(count: int, draws: int) -> Swept:
    found = many(count)
    rows = [found.rows, *(found.rows.with_columns(
        pl.lit(d).cast(pl.Int64).alias("draw"), pl.format("{}-{}", "id", pl.lit(d)).alias("id"),
        *(pl.col(key) * (1 + 0.01 * d) for key in (THROUGHPUT, INTERACTIVITY, TTFT, "p99_ttft_ms", "p99_tpot_ms")),
    ) for d in range(1, draws + 1))]  # fmt: skip
    return replace(found, rows=pl.concat(rows), draws=draws)


def only(status: str) -> list[dict[str, Any]]:
    facts = {"id": "x", "point": 99, "seed": 1, RATE: 9.0, GPU: "l40s", "status": status, "error": f"because {EVIL}"}
    return [*grid(), facts]


CASES: dict[str, Callable[[], Swept]] = {
    "grid": lambda: swept(grid()),
    "seeds": lambda: swept(grid(seeds=3), seeds=3),
    "one axis": lambda: swept([row(i, **{RATE: float(i)}) for i in range(8)], (Shown(RATE, None),), seeds=2),
    "one axis of names": lambda: swept([row(i, **{GPU: g}) for i, g in enumerate(GPUS)], (Shown(GPU, GPUS),)),
    "one point": lambda: swept([row(0, **{RATE: 1.0, GPU: "l40s"})]),
    "switches": lambda: swept(
        [row(i, **{"engine.eager": bool(i % 2), RATE: float(i // 2)}) for i in range(6)],
        (Shown("engine.eager", None), Shown(RATE, None)),
    ),
    "a varied seed": lambda: swept(
        [row(i, i, **{RATE: 1.0}) for i in range(3)], (Shown("seed", None), Shown(RATE, None))
    ),
    "all saturated": lambda: swept(grid(saturated=True)),
    "too short": lambda: swept(grid(saturated=None, undecided=True)),
    "closed loop": lambda: swept(grid(saturated=None)),
    "one token each": lambda: swept(grid(**{INTERACTIVITY: None, "p99_tpot_ms": None})),
    "nothing finished": lambda: swept(
        grid(**{INTERACTIVITY: None, TTFT: None, "p99_ttft_ms": None, "p99_tpot_ms": None, "p99_e2el_ms": None,
                THROUGHPUT: 0.0, "unserved": 1.0})
    ),
    "invalid": lambda: swept(only("invalid")),
    "failed": lambda: swept(only("failed"), complete=False, total=40, again=3),
    "evil": lambda: swept(
        [row(i, **{"a.b": f"{EVIL}{i}", "c.d": EVIL}) for i in range(3)],
        (Shown("a.b", tuple(f"{EVIL}{i}" for i in range(3))), Shown("c.d", (EVIL,))), title=EVIL, scenario=EVIL,
        texts=((EVIL, EVIL),),
    ),
    "many": lambda: many(5000),
    "draws": lambda: drawn(grid(), but=lambda point, d: {"saturated": point == 5 and d < 4}),
    "draws, undefined": lambda: drawn(grid(**{INTERACTIVITY: None, "p99_tpot_ms": None})),
    "draws, all saturated": lambda: drawn(grid(saturated=True)),
    "draws, too few yet": lambda: drawn(grid(), 4),
    "draws of many": lambda: many_drawn(3000, 5),
}  # fmt: skip


def brute_force(a: list[float], b: list[float]) -> list[bool]:
    pairs = list(zip(a, b, strict=True))
    return [not any(x >= p and y >= q and (x, y) != (p, q) for x, y in pairs) for p, q in pairs]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_a_front_is_what_no_other_point_beats(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(pair[i]) for pair in pairs] for i in (0, 1))
    assert unbeaten(np.array(a), np.array(b)).tolist() == brute_force(a, b)


def test_fronts_have_steady_points_only() -> None:
    rows = grid()
    rows[11] |= {"saturated": True}
    rows[10] |= {"undecided": True, "saturated": None}
    rows[9] |= {TTFT: 1e6, INTERACTIVITY: 1.0}  # the most throughput still
    rows[4] |= {THROUGHPUT: 1.0}
    found = swept(rows)
    expected = [9, 8, 7, 6, 5, 3, 2, 1, 0]
    assert found.front(INTERACTIVITY)["point"].to_list() == expected
    assert found.front(TTFT)["point"].to_list() == expected
    assert found.best(THROUGHPUT, True)["point"] == 9  # type: ignore[index]
    assert found.best(TTFT, False)["point"] == 0  # type: ignore[index]


def test_points_are_means_over_seeds_and_saturated_if_one_is() -> None:
    rows = grid(seeds=3)
    rows[4] |= {"saturated": True}
    rows[7] |= {"status": "failed"}
    points = swept(rows, seeds=3).points
    assert points["runs"].to_list()[:4] == [3, 3, 2, 3]
    assert points["saturated"].to_list() == [False, True] + [False] * 10
    first = points.row(0, named=True)
    assert (first[THROUGHPUT], first[f"{THROUGHPUT}_low"], first[f"{THROUGHPUT}_high"]) == (102, 101, 103)


def test_ranges_are_the_central_share_of_the_draws() -> None:
    points = drawn(grid(), 10).points
    factors = 0.9 + 0.2 * np.arange(1, 11) / 10
    for point in points.iter_rows(named=True):
        for key in (THROUGHPUT, TTFT):
            assert point[f"{key}_under_error"] == pytest.approx(np.quantile(point[key] * factors, [0.1, 0.9]))
    assert points[THROUGHPUT].to_list() == swept(grid()).points[THROUGHPUT].to_list(), "draws are in no mean"
    assert CASES["draws, undefined"]().points[TTFT].null_count() == 0
    assert f"{INTERACTIVITY}_under_error" not in CASES["draws, undefined"]().columns


def test_an_error_that_all_have_alike_leaves_fronts_and_order_alone() -> None:
    """Though their ranges overlap."""
    found = drawn(grid())
    assert found.points[f"{THROUGHPUT}_under_error"][11][0] < found.points[f"{THROUGHPUT}_under_error"][10][1]
    for against in FRONTS:
        assert set(found.front(against)[f"{against}_front_under_error"]) == {10}
        _, rows, _ = words.front_rows(found, against, 20)
        assert [row[-1] for row in rows] == ["both"] * 11 + [""]
    assert found.rivals(THROUGHPUT, True, found.best(THROUGHPUT, True) or {}).height == 0
    assert "No other one gives as much" in words.answer(found)[1]


def test_fronts_are_counted_draw_by_draw() -> None:
    """Point 10 gives more than 11 in four of ten draws, and is as good in the other figures in three of these; point 4
    piles up in two; 3 is told from 2 in TTFT only."""

    def but(point: int, d: int) -> dict[str, Any]:
        if point == 10 and d <= 4:
            return {THROUGHPUT: 2000.0} | ({} if d == 4 else {INTERACTIVITY: 30.0, TTFT: 200.0})
        if point == 11 and d == 4:
            return {INTERACTIVITY: 1.0, TTFT: 1e4}
        return {"saturated": point == 4 and d <= 2} | ({THROUGHPUT: 400.0} if point in (2, 3) and d % 2 else {})

    found = drawn(grid(), but=but)
    on = dict(zip(found.points["point"], found.points[f"{TTFT}_front_under_error"], strict=True))
    assert (on[11], on[10], on[4], on[0]) == (6, 10, 8, 10)
    assert found.points["saturated_under_error"].to_list() == [0, 0, 0, 0, 2] + [0] * 7
    _, rows, _ = words.front_rows(found, TTFT, 20)
    assert [row[-1] for row in rows[:2]] == ["TTFT p50", "both"]
    assert rows[8][:2] == ["2", "h100-sxm"]
    assert rows[8][-1] == "TTFT p50"
    best = found.best(THROUGHPUT, True)
    assert best is not None
    assert found.rivals(THROUGHPUT, True, best)["point"].to_list() == [10]
    assert "another one may give as much: rate 4, gpu l40s." in words.answer(found)[1]
    assert "1 configuration of 12 keep up, but" in " ".join(words.counted(found))


def test_neighbours_that_cannot_be_told_apart() -> None:
    def swapped(point: int, d: int) -> dict[str, Any]:
        if point not in (10, 11) or d % 2:
            return {}
        return {key: row(21 - point)[key] for key in (THROUGHPUT, INTERACTIVITY, TTFT)}

    found = drawn(grid(), but=swapped)
    _, rows, _ = words.front_rows(found, INTERACTIVITY, 20, brief=True)
    assert [r[-1] for r in rows[:2]] == ["neither", "both"]
    assert json.loads(sweep_json(found))["next_differs"][INTERACTIVITY][:2] == [[], [THROUGHPUT, INTERACTIVITY]]


def test_draws_that_not_all_points_have_do_not_count() -> None:
    found = drawn(grid(), 8)
    partial = replace(found, rows=found.rows.filter((pl.col("draw") < 7) | (pl.col("point") != 3)))
    assert partial.under_error is not None
    assert partial.under_error.draws == 6
    assert "6 of 8 draws have been run for all configurations." in words.counted(partial)
    few = CASES["draws, too few yet"]()
    assert few.under_error is None
    assert "0 of 4 draws have been run for all configurations; ranges need 5." in words.counted(few)


@pytest.mark.parametrize("name", CASES)
def test_pages(name: str) -> None:
    found = CASES[name]()
    page = sweep_html(found)
    assert len(page.encode()) < 6_000_000
    text = page.replace(get_plotlyjs(), "")
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text.replace("Number.isNaN", "")) is None
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert "<b>ünïcode" not in text
    said, more, _ = words.answer(found)
    assert page.index("<h1>") < page.index("<strong>") < page.index('<div class="cards">') < page.index("<figure>")
    assert said
    assert more
    tree = json.loads(sweep_json(found))
    assert len(tree["points"]) == found.points.height


@pytest.mark.parametrize("name", CASES)
def test_terminal(name: str) -> None:
    console = Console(file=StringIO(), width=80)
    print_sweep(CASES[name](), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\b(nan|None|inf)\b", text) is None


def test_what_is_said() -> None:
    def said(name: str) -> str:
        return " ".join([*words.answer(CASES[name]())[:2], *words.counted(CASES[name]())])

    assert said("grid").startswith("Most output per GPU: rate 4, gpu b200-sxm 1,201 tokens/s/GPU at 16.7 tokens/s/user")
    assert "With the SLO met for 99% of the requests: rate 1, gpu h100-sxm" in said("grid")
    assert said("all saturated").startswith("No configuration of 12 keeps up with its load 12 saturated: there")
    assert "ran too short to tell" in said("too short")
    assert "No request got its answer" in said("nothing finished")
    assert "12 configurations of 12 did not serve all requests" in said("nothing finished")
    assert "1 run of 13 were left out" in said("invalid")
    assert "27 runs of 40 are still to be done" in said("failed")
    assert "3 configurations were drawn twice" in said("failed")
    (error,) = words.wrong(CASES["failed"](), "failed", 3)
    assert error.startswith("1 run (rate 9, gpu l40s): because")


def test_equal_scenarios_are_pointed_out() -> None:
    assert "11 runs came to the same scenario as another one" in " ".join(words.counted(swept(grid(scenario="same"))))


def test_short_names_stay_apart() -> None:
    keys = ["cluster.pools.0.replicas", "cluster.pools.1.replicas", "engine.max_num_seqs", "cluster.events.0"]
    assert [words.short(key, keys) for key in keys] == [*keys[:2], "max_num_seqs", "cluster.events.0"]


def test_heat_maps_hold_means_of_steady_points() -> None:
    rows = grid()
    rows[0] |= {"saturated": True}
    found = swept(rows)
    drawn = figures.heat(found, (found.axes[1], found.axes[0]))
    assert drawn.data[0].z[0][0] is None
    assert list(drawn.data[0].z[0][1:]) == [201, 301]
    assert list(drawn.data[0].z[3]) == [1001, 1101, 1201]
    assert len(figures.pairs(many(500))) == 10


def test_levels() -> None:
    points = many(500).points
    for key, names in ((GPU, GPUS), ("engine.preset", ("a", "b"))):
        assert levels(Shown(key, names), points).names == names
    rates = levels(Shown(RATE, None), points)
    assert (rates.log, len(rates.names)) == (True, 8)
    shares = rates.shares(points[RATE])
    assert (shares.min(), shares.max()) == (0, 1)
    assert set(rates.cells(points[RATE])) <= set(range(8))
    assert levels(Shown(RATE, None), swept(grid()).points).names == ("1", "2", "3", "4")


def test_figures_are_bounded_and_keep_the_fronts() -> None:
    found = CASES["many"]()
    kept = figures.kept(found, figures.room(found))
    assert kept.height <= figures.POINTS
    assert found.fronts <= set(kept["point"])


@pytest.mark.parametrize("name", ["grid", "one axis", "all saturated", "evil", "many", "draws"])
def test_in_a_browser(name: str, tmp_path: Path) -> None:
    found = CASES[name]()
    page = sweep_html(found)
    drawn = len(re.findall(r'<div id="\w+" role="img"', page))
    assert figures_drawn(page, tmp_path) == drawn
    assert drawn >= 2


ACT = """
const said = [];
const rows = () => document.querySelectorAll("#table tbody tr").length;
const first = () => document.querySelector("#table tbody td").textContent;
const set = (id, value, event) => {
  const field = find(id); field.value = value; field.dispatchEvent(new Event(event));
};
const bright = () =>
  FIGURES.fronts.data.filter((t) => t.meta).reduce((n, t) => n + (t.selectedpoints ?? t.x).length, 0);
const lines = () => FIGURES.coordinates.data.reduce((n, t) => n + t.x.filter((x) => x === null).length, 0);
said.push(rows(), first(), bright(), lines());
set("filter1", "1", "change");            // one of three GPUs
said.push(rows(), bright(), lines());
set("filter2", ">600", "input");          // tokens/s/GPU
said.push(rows(), bright());
set("filter2", "bad", "input");
said.push(rows(), find("filter2").classList.contains("wrong"));
set("filter2", "", "input"); set("filter1", "", "change");
find("front").click();
said.push(rows());
find("front").click();
document.querySelector("#table thead th button").click();   // by rate, upwards
said.push(first());
document.querySelector("#table thead th button").click();
said.push(first(), rows());
Plotly.Fx.hover("fronts", [{curveNumber: 1, pointNumber: 0}]);
said.push([...document.querySelectorAll("#fronts .hovertext text")].map((t) => t.textContent).join());
document.body.dataset.said = JSON.stringify(said);
"""


def test_filters_and_hover_in_a_browser(tmp_path: Path) -> None:
    rows = grid()
    rows[11] |= {TTFT: 9e9, INTERACTIVITY: 1e-3, THROUGHPUT: 1.0}  # on no front
    axes = (Shown(RATE, None), Shown(GPU, GPUS))
    page = sweep_html(swept(rows, axes))
    said = json.loads(dom(page.replace("</body>", f"<script>{ACT}</script></body>"), tmp_path, "said"))
    assert said[:4] == [12, "4", 24, 12]
    assert said[4:7] == [4, 8, 4]
    assert said[7:9] == [2, 4]
    assert said[9:11] == [4, True]
    assert said[11] == 11
    assert said[12:15] == ["1", "4", 12]
    assert re.fullmatch(r"rate \d.*gpu h100-sxm.*Output \(tokens/s/GPU\) \d+.*", said[15])


def test_ranges_in_a_browser(tmp_path: Path) -> None:
    """In the cells, in the hover; what is saturated in some draws still keeps up."""
    page = sweep_html(CASES["draws"]())
    act = """
    const cells = (i) => [...document.querySelectorAll("#table tbody tr")[i].children].map((c) => c.innerText);
    const said = [cells(0)[2], cells(0).slice(-2).join(), document.querySelectorAll("tr.unsteady").length];
    find("steady").click();
    said.push(document.querySelectorAll("#table tbody tr").length);
    find("steady").click();
    said.push(hover(5));
    document.body.dataset.said = JSON.stringify(said);
    """
    said = json.loads(dom(page.replace("</body>", f"<script>{act}</script></body>"), tmp_path, "said"))
    assert said[:4] == ["1,201\n1,127–1,300", "10,10", 0, 12]
    assert "Output (tokens/s/GPU) <b>601</b> (564–650)<br>" in said[4]
    assert "Front by TTFT, of 10 <b>7</b><br>saturated in 3 of 10 draws" in said[4]


def test_heat_maps_can_be_chosen_in_a_browser(tmp_path: Path) -> None:
    page = sweep_html(many(300))
    act = """
    const pick = find("pair"), before = FIGURES.heat.layout.xaxis.title.text;
    const count = pick.options.length;
    pick.value = String(count - 1); pick.dispatchEvent(new Event("change"));
    document.body.dataset.said = JSON.stringify([count, before, FIGURES.heat.layout.xaxis.title.text]);
    """
    count, before, after = json.loads(dom(page.replace("</body>", f"<script>{act}</script></body>"), tmp_path, "said"))
    assert count == 10
    assert before != after
