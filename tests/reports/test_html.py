"""The page: self-contained, escaped, the answer first, complete for odd runs too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from reports.figures import FIGURES
from reports.html import report_html
from tests.reports.browser import figures_drawn
from tests.reports.conftest import RUNS
from tests.reports.helpers import run

Pages = Callable[[str], str]
LIMIT_BYTES = 6_000_000
EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> 日本 & "quotes" \''


def own(page: str) -> str:
    """The page without plotly's own code."""
    return page.replace(get_plotlyjs(), "")


@pytest.mark.parametrize("name", RUNS)
def test_page_of_every_run(pages: Pages, name: str) -> None:
    page = pages(name)
    assert len(page.encode()) < LIMIT_BYTES
    text = own(page)
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text) is None
    assert text.index('class="banner') < text.index('class="cards"') < text.index("<h2>Latency</h2>")
    assert "not yet validated" in text


def test_nothing_is_loaded_from_elsewhere(pages: Pages) -> None:
    text = own(pages("stable"))
    assert "default-src 'none'" in text
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None


def test_strings_are_escaped() -> None:
    page = report_html(
        run(
            3, name=EVIL, model=EVIL, gpu=EVIL, engine=EVIL, servecast=EVIL, seed=EVIL, notes=[EVIL],
            not_modelled=[EVIL], scenario={EVIL: EVIL}, memory={EVIL: EVIL},
            cost={"kind": EVIL, "accuracy": EVIL, "sources": {EVIL: EVIL}},
            engine_options={EVIL: {"value": EVIL, "source": EVIL}},
            workload={"source": EVIL, "dropped": {EVIL: 2}, "notes": [EVIL]},
        )
    )  # fmt: skip
    assert "alert(1)</script>" not in page
    assert "<b>ünïcode" not in page
    assert page.count("&lt;b&gt;ünïcode&lt;/b&gt; 日本") > 12


def test_missing_manifest_entries_are_no_problem() -> None:
    result = run(3)
    result.manifest = {}
    assert "A forecast, not a measurement" in report_html(result)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stable", 'class="banner stable"><strong>Stable</strong>'),
        ("saturated", "<strong>Saturated</strong>"),
        ("closed loop", "<strong>Saturation not applicable</strong>: clients wait"),
        ("partial", "Partial run: stopped early"),
        ("failing", "lost with their replica"),
        ("failing", "<p>Replicas: mean 2."),
        ("failing", "peak 3, 1 failure, 1 start, 1 drain;"),
        ("all rejected", "Rejected at arrival: 5 of 5 requests (5: the prompt leaves no room"),
    ],
)
def test_verdict_and_notices(pages: Pages, name: str, expected: str) -> None:
    assert expected in pages(name)


def test_provenance_is_there(pages: Pages) -> None:
    text = own(pages("stable"))
    for expected in (
        "max_num_seqs",
        "vLLM v0.19",
        "KV cache per token",
        "128 KiB",
        "efficiencies.gemm_flops",
        "seed 1",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("name", "count"),
    [("saturated", len(FIGURES) - 3), ("two pools", len(FIGURES) - 2), ("failing", len(FIGURES) - 1)],
)
def test_in_a_browser(pages: Pages, tmp_path: Path, name: str, count: int) -> None:
    assert figures_drawn(pages(name), tmp_path) == count


def test_several_pools_stand_side_by_side(pages: Pages) -> None:
    assert "<h2>Pools</h2>" not in pages("saturated")
    text = own(pages("two pools"))
    for expected in ("<h2>Pools</h2>", ">h100-sxm 1</th>", "<th>GPU-hours</th>", "Engine options of h100-sxm 1"):
        assert expected in text
