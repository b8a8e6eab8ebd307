"""Figures one by one, and pages on paper."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import plotly.graph_objects as go
import pytest
from click.testing import CliRunner

import servecast
from reports.html import report_html
from servecast import printing
from servecast.cli import main
from servecast.errors import ServecastError
from tests.servecast.helpers import QUICKSTART, small


def test_a_result_s_figures_are_those_of_its_page() -> None:
    result = servecast.simulate(small())
    drawn = servecast.figures(result)
    assert all(isinstance(figure, go.Figure) for figure in drawn.values())
    found = re.search(r"const FIGURES = \{(.*?)\};", report_html(result), re.DOTALL)
    assert found
    assert re.findall(r'^"(\w+)": ', found[1], re.MULTILINE) == list(drawn)
    assert json.loads(drawn["kv"].to_json())["data"]


def test_what_was_compared_and_swept_has_figures_too(tmp_path: Path) -> None:
    compared = servecast.compare([QUICKSTART], vary=["engine.max_num_seqs=4,8"], overrides=["workload.num_requests=30"])
    assert list(servecast.figures(compared)) == ["spent", "distributions", "time"]
    axes = ["engine.max_num_seqs=4,8", "workload.arrivals.rate=4,8", "cluster.replicas=1,2"]
    swept = servecast.sweep(QUICKSTART, axes, tmp_path, overrides=["workload.num_requests=20"], workers=1)
    assert list(servecast.figures(swept)) == ["fronts", "heat", "heat_2", "heat_3", "coordinates"]


def test_what_has_no_figures_says_so() -> None:
    with pytest.raises(ServecastError, match="figures: dict has none; give a result, what compare returns"):
        servecast.figures({})  # type: ignore[arg-type]


def test_a_page_is_printed(tmp_path: Path) -> None:
    if not any(map(shutil.which, printing.BROWSERS)):
        pytest.skip("needs a browser that prints")
    servecast.simulate(small()).save(tmp_path)
    done = CliRunner().invoke(main, ["export", str(tmp_path), "--format", "pdf"])
    assert done.exit_code == 0, done.output
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 5 < len(re.findall(rb"/Type\s*/Page\b", printed)) < 30


def test_no_page_and_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServecastError, match=r"report.html: no such file"):
        servecast.export(tmp_path, "pdf")
    (tmp_path / "report.html").write_text("<p>", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(printing, "BROWSERS", ("chromium", "chrome", ""))
    with pytest.raises(ServecastError, match=r"none is found .chromium, chrome.; install one, or open"):
        servecast.export(tmp_path, "pdf")


def test_a_browser_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no display >&2\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "report.html").write_text("<p>", encoding="utf-8")
    monkeypatch.setattr(printing, "BROWSERS", (str(broken), ""))
    with pytest.raises(ServecastError, match=r"does not print .*: no display"):
        servecast.export(tmp_path, "pdf")
