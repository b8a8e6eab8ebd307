"""A plan's page: odd plans, what users write, and in a browser at the widths of a laptop and a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from reports.planning.facts import Change, Day, Facts, Figure, Fleet, Growth, Hour, Limit, Month, Option, Point
from reports.planning.fleet import OneType, Together, rows, sentences
from reports.planning.page import plan_html
from reports.planning.terminal import print_plan, print_together
from tests.reports.browser import dom, figures_drawn

EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> "quotes"'
TTFT, TPOT = "p99 ttft <= 1 s", "p95 tpot <= 50 ms"


def figures(ttft: float, tpot: float) -> tuple[Figure, ...]:
    return (
        Figure(TTFT, "ttft", 1.0, ttft, f"{1e3 * ttft:.3g} ms", ttft <= 1),
        Figure(TPOT, "tpot", 0.05, tpot, f"{1e3 * tpot:.3g} ms", tpot <= 0.05),
    )


def option(what: str, replicas: int, price: float, status: str = "meets", why: str = "") -> Option:
    gpus = replicas * 2
    return Option(what, what.split(",")[0], status, replicas, gpus, gpus, 0, gpus * price, why, figures(0.4, 0.03), {})


def growth(months: int = 12) -> Growth:
    fleets = tuple(Fleet(n, 2 * n, 2 * n, 5000.0 * n, 1 + 4 * (n - 2), 0.6 * n, n < 4) for n in (2, 3, 4))
    of = [next(f for f in reversed(fleets) if f.since <= m) for m in range(1, months + 1)]
    each = tuple(Month(m, 1.1 ** (m - 1), f.replicas, f.gpus, f.dollars) for m, f in enumerate(of, 1))
    return Growth(0.1, each, fleets, sum(f.dollars for f in of), 9, 21)


def day(period_s: float = 86_400.0) -> Day:
    sizes = [1] * 8 + [3] * 10 + [2] * 6
    hours = tuple(Hour(i * period_s / 24, period_s / 24, n / 3, n, 2 * n) for i, n in enumerate(sizes))
    return Day(period_s, 40.0, hours, 100.0, 350.0, 6, 504.0, 2, 106.0, figures(0.4, 0.03), True, "", 9)


def plan(**changes: object) -> Facts:
    best = option("h100-sxm, tp 2", 2, 3.5)
    others = [
        option(f"l40s, tp 2, max_num_seqs {i}", i + 5, 1.1, "fails", "p99 ttft <= 1 s: missed by 63 of the first 400")
        for i in range(30)
    ]
    facts = Facts(
        title="The cheapest deployment for chat", traffic="llama-3.1-8b, 40 requests a second", rate=40.0,
        required=(TTFT, TPOT), answer=best, spare=0, raised=1, starts=("vllm serve x",),
        verified=(figures(0.4, 0.03), figures(0.42, 0.031)), verified_requests=20_000, enough_requests=20_000,
        one_course=False, headroom=1.2, breaks="p99 ttft <= 1 s: 1.2 s",
        changes=(Change("rate", 1.25, False, figures(1.4, 0.06)), Change("rate", 0.8, True, figures(0.3, 0.02))),
        draws=10, draws_met=6, runner_up=option("a100-sxm", 5, 1.6), closest=None,
        options=(best, option("a100-sxm", 5, 1.6), *others), same=3, simulations=40,
        points=tuple(Point(10.0 + i, 1.2 - 0.1 * i, f"{i} x h100-sxm", i > 1) for i in range(8)), limit=1.0,
        limits=(Limit("p99 ttft <= 500 ms", 0.5, "3 x h100-sxm", 21.0, False),
                Limit("p99 ttft <= 2 s", 2.0, "", None, False)),
        growth=growth(), day=day(), prices={"h100-sxm": 3.5, "l40s": 1.1}, price_source="a test", notes=("a note",),
        scenario="name: chat", version="0.1.0",
    )  # fmt: skip
    return replace(facts, **changes)  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Facts]] = {
    "everything": plan,
    "the least": lambda: plan(growth=None, day=None, limits=(), changes=(), draws=0, draws_met=0, runner_up=None),
    "nothing meets it": lambda: plan(
        answer=None, closest=option("l40s", 4, 1.1, "fails"), growth=None, day=None, limits=(), points=(), verified=(),
        changes=(), runner_up=None, headroom=None, draws=0,
    ),
    "nothing was tried": lambda: plan(
        answer=None, options=(), growth=None, day=None, limits=(), points=(), verified=(), changes=(), runner_up=None,
    ),
    "a closed loop": lambda: plan(rate=None, day=replace(day(), rate=None)),
    "a short day": lambda: plan(day=replace(day(1200.0), checked=(), start_s=None)),
    "a day that misses": lambda: plan(day=replace(day(), met=False, why="p99 ttft <= 1 s: 3 s")),
    "too many GPUs": lambda: plan(
        growth=Growth(0.1, (Month(1, 1.0, None, None, None),), (), None, None, 3),
        day=replace(day(), hours=(Hour(0.0, 86_400.0, 1.0, None, None),), gpu_hours=None, dollars=None,
                    static_gpus=None, static_dollars=None, checked=()),
    ),
    "one month": lambda: plan(growth=growth(1)),
    "goodput": lambda: plan(points=(), limit=None, limits=()),
    "evil": lambda: plan(
        title=EVIL, traffic=EVIL, breaks=EVIL, starts=(EVIL,), notes=(EVIL,), scenario=EVIL, price_source=EVIL,
        required=(f"{EVIL} <= 1 s",), points=(Point(1.0, 1.0, EVIL, True),), answer=option(EVIL, 2, 3.5),
        limits=(Limit(EVIL, 0.5, EVIL, 2.0, False),), options=(option(EVIL, 2, 3.5, "invalid", EVIL),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pages(name: str) -> None:
    facts = CASES[name]()
    page = plan_html(facts)
    text = page.replace(get_plotlyjs(), "")
    assert len(page.encode()) < 6_000_000
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text) is None
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert "<b>ünïcode" not in text
    json.dumps(facts.plain(), allow_nan=False)


@pytest.mark.parametrize("name", CASES)
def test_terminal(name: str) -> None:
    console = Console(file=StringIO(), width=80)
    print_plan(CASES[name](), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\b(nan|None|inf)\b", text) is None


def test_what_is_said() -> None:
    page = plan_html(plan())
    assert "With 10 % more traffic every month: 4 GPUs in the first month, 8 in month 12 for 2.85 times" in page
    assert "The fleet grows in months 5 and 9." in page
    assert "From month 9 on it takes more than the budget." in page
    assert "2 to 6 GPUs: 100 GPU-hours and $350.00 a day, 31 % less than 6 all the time ($504.00)" in page
    assert "p99 ttft &lt;= 500 ms: at most $21.00 an hour (+50 %), 3 x h100-sxm." in page
    assert "p99 ttft &lt;= 2 s: nothing that was tried" in page
    assert page.index("As traffic grows") < page.index("Over the day") < page.index("What the limit costs")


def test_what_is_said_of_several_plans() -> None:
    def said(together: Together) -> str:
        return " ".join(sentences(together))

    one = OneType("h100-sxm", {"chat": "2 x h100-sxm", "code": "4 x h100-sxm"}, 6, 42.0)
    plans = {"chat": plan(), "code": plan()}
    assert said(Together(plans, one, None, 64)).startswith("2 scenarios: 8 GPUs, $28.00 an hour, $20,440 a month.")
    assert "All on h100-sxm: 6 GPUs, $42.00 an hour (+50 %; chat: 2 x h100-sxm;" in said(Together(plans, one, None, 64))
    assert "One type of GPU is enough: h100-sxm." in said(
        Together(plans, replace(one, dollars_per_hour=28.0), None, 64)
    )
    assert "$8.00 an hour more than the budget" in said(Together(plans, None, 20.0, 64))
    assert "more than the 7 GPUs" in said(Together(plans, None, None, 7))
    assert "No type of GPU serves all of them." in said(Together(plans, None, None, 64))
    without = Together(plans | {"code": CASES["nothing meets it"]()}, None, None, 64)
    assert said(without).startswith("Nothing that was tried meets the requirements of code; the others: 1 scenario: 4")
    assert [row[:2] for row in rows(without)] == [("chat", "2 x h100-sxm, tp 2"), ("code", "nothing meets it")]
    json.dumps(without.plain(), allow_nan=False)
    console = Console(file=StringIO(), width=80)
    print_together(without, console)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["the least", "nothing meets it", "too many GPUs", "evil"])
def test_in_a_browser(name: str, tmp_path: Path) -> None:
    page = plan_html(CASES[name]())
    drawn = len(re.findall(r'<div id="\w+" role="img"', page))
    assert figures_drawn(page, tmp_path) == drawn


ACT = """
const said = [];
const text = (id) => [...document.querySelectorAll(`#${id} .hovertext text`)].map((t) => t.textContent).join();
const pause = () => new Promise((done) => setTimeout(done, 200));   // Plotly hears of a hover now and then only
const act = async () => {
  for (const [id, curve, panel] of [
    ["growth", 0, "xy"], ["growth", 2, "x2y2"], ["day", 0, "xy"], ["prices", 0, "xy"], ["prices", 3, "xy"],
  ]) {
    Plotly.Fx.hover(id, [{curveNumber: curve, pointNumber: 0}], [panel]);
    await pause();
    said.push(text(id));
  }
  said.push(["growth", "day", "prices"].map((id) => document.querySelectorAll(`#${id} .legendtoggle`).length));
  Plotly.restyle("prices", {visible: "legendonly"}, [1]);
  said.push(document.querySelectorAll("#prices .scatterlayer .trace").length);
  said.push(document.documentElement.scrollWidth <= document.documentElement.clientWidth);
  said.push([...document.querySelectorAll("figure")].every((f) => f.scrollWidth <= f.clientWidth));
  document.body.dataset.said = JSON.stringify(said);
};
act();
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_hover_legend_and_width_in_a_browser(width: int, tmp_path: Path) -> None:
    """Nothing is wider than the screen: tables that are scroll in their place."""
    page = plan_html(plan()).replace("</body>", f"<script>{ACT}</script></body>")
    said = json.loads(dom(page, tmp_path, "said", width=width))
    assert said[0] == "month 1: 4 GPUs, $10,000"
    assert said[1] == "month 1: traffic 40.0"
    assert said[2] == "00:00 to 01:00: 2 GPUs"
    assert said[3] == "2 x h100-sxm1.00 s, $12.00 an hour"
    assert said[4] == "2 x h100-sxm, tp 2limit 1.00 s, $14.00 an hour"
    assert said[5] == [3, 3, 4]
    assert said[6] == 3
    assert said[7:] == [True, True]
