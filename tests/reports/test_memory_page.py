"""The page of one request's memory: escaped, offline, and drawn by a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibrate.lifetime import Life, request_life
from reports.memory.page import life_html, sentences
from reports.memory.plan import Planned
from servecast.memory_cli import draw_up
from tests.reports.browser import figures_drawn

LAYOUT = {"tp": 1, "pp": 1, "dp": 1, "ep": False, "dcp": 1}


def planned(**options: object) -> Planned:
    return draw_up("llama-3.1-8b", "l4", {"preset": "vllm-0.19", "max_model_len": 8192, **options}, LAYOUT, {})


def life(of: Planned, prompt: int = 3000, output: int = 400) -> Life:
    return request_life(of.model, of.layout, of.engine, of.plan, prompt, output)


def said_of(of: Planned, prompt: int, output: int) -> list[str]:
    return sentences(of, life(of, prompt, output))


def test_a_browser_draws_it(tmp_path: Path) -> None:
    found = planned()
    assert figures_drawn(life_html(found, life(found)), tmp_path) == 3


def test_names_are_escaped() -> None:
    found = planned()
    html = life_html(replace(found, model=replace(found.model, name="<b>x</b>")), life(found))
    assert "<b>x</b>" not in html
    assert "&lt;b&gt;x&lt;/b&gt; on 1 x l4" in html
    assert "http-equiv" in html
    assert len(html) < 6_000_000


def test_where_it_ends_is_said() -> None:
    assert said_of(planned(), 8000, 400) == [
        "It cannot finish: output token 192 is the last, because max_model_len ends there.",
        "3 such requests run to their end together. With 4 the pool is full before all prompts are computed.",
    ]
    assert said_of(planned(), 9000, 12) == [
        "It cannot even begin to answer: max_model_len ends before its 9,000 prompt tokens."
    ]
    few = planned(max_num_seqs=2)
    assert said_of(few, 100, 100) == [
        "2 such requests run to their end together: as many as max_num_seqs allows; the KV pool would hold more."
    ]
    (said,) = said_of(planned(), 3000, 1200)
    assert said.startswith("7 such requests run to their end together. With 8 the pool is full when each has ")
