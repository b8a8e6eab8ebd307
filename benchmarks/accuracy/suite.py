"""All comparisons that the data allow, in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.accuracy import blis, cases, coverage, instances, page, recorded, silicon
from benchmarks.accuracy.ranking import rankings, regret
from benchmarks.accuracy.rows import Row, Uncovered

NOT_READ = (Uncovered("LLMServingSim's ISPASS runs", "RTX A6000 and TPU v6e", "no profile of these", 5),)


def write(reference: Path, out: Path) -> None:
    """Compare everything and write the page."""
    found: list[Row | Uncovered] = list(silicon.compare(reference))
    points = [each for each in found if isinstance(each, Row)]
    with tempfile.TemporaryDirectory() as scratch:
        found += recorded.compare(reference, Path(scratch))
        found += blis.compare(reference, Path(scratch))
        found += instances.compare(reference, Path(scratch))
    found += cases.compare()
    rows = [each for each in found if isinstance(each, Row)]
    uncovered = [*(each for each in found if isinstance(each, Uncovered)), *NOT_READ]
    sure = coverage.section(coverage.coverages(reference))
    out.write_text(page.text(rows, uncovered, rankings(points), regret(points), sure), "utf-8")
