"""The page of a trace: self-contained, escaped, complete for odd traces, drawn by a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from reports.trace_figures import figures_of
from reports.trace_page import trace_html
from tests.reports.browser import figures_drawn
from tests.workloads.test_statistics import example
from workloads.trace import Trace, Turns

EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> "quotes"'


def many(n: int) -> Trace:
    rng = np.random.Generator(np.random.PCG64(0))
    prompts = rng.lognormal(6, 2, n).clip(1, 1e6).astype(int)
    return Trace.from_columns(np.sort(rng.uniform(0, 1e5, n)), prompts, rng.integers(1, 900, n), source="many")


TRACES = {
    "everything": example(),
    "one request": Trace.from_columns([0], [5], [1], source="one"),
    "all at once": Trace.from_columns([0, 0, 0], [5, 6, 7], [1, 1, 1], source="at once"),
    "many": many(50_000),
    "sessions of one turn": replace(example(), turns=Turns(np.full(6, -1), np.zeros(6)), prefix=None),
    "evil": replace(
        example(), source=EVIL, notes=(EVIL,), dropped={EVIL: 2}, classes=(np.zeros(6, dtype=int), (EVIL,))
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_pages(name: str) -> None:
    page = trace_html(TRACES[name], EVIL)
    assert len(page.encode()) < 6_000_000
    text = page.replace(get_plotlyjs(), "")
    assert len(text) < 300_000
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text) is None
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert "<b>ünïcode" not in text


def test_what_is_said() -> None:
    trace = replace(example(), dropped={"output_tokens is 0": 3}, notes=("format table recognised",))
    page = trace_html(trace, "t.csv")
    for said in (
        "<title>t.csv</title>",
        "Dropped: 3 rows (3: output_tokens is 0).",
        "1 request with one output token",
        "57.14 % of blocks, 60.61 % of tokens",
        "<li>format table recognised</li>",
        "a 3, b 3",
    ):
        assert said in page
    assert list(figures_of(trace)) == ["arrivals", "lengths", "prefix", "sessions"]
    assert list(figures_of(many(10))) == ["arrivals", "lengths"]


def test_in_a_browser(tmp_path: Path) -> None:
    assert figures_drawn(trace_html(example(), "t.csv"), tmp_path) == len(figures_of(example()))
