"""Imports point down only, and each library is used where it belongs: read from the source of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BELOW = {
    "servecast": {"servecast", "reports", "sim", "calibrate", "workloads"},
    "reports": {"reports", "sim", "calibrate", "workloads"},
    "sim": {"sim", "calibrate", "workloads"},
    "calibrate": {"calibrate"},
    "workloads": {"workloads"},
}
"""Room -> rooms that it may import, beside `servecast.errors`."""
WITHOUT_SIMPY = {"kvcache", "decodes", "state", "metrics", "result", "steplog", "request"}


def modules() -> Iterator[tuple[str, Path]]:
    """(room, file) of every module."""
    for room in BELOW:
        for file in sorted((ROOT / room).rglob("*.py")):
            yield room, file


def imports(file: Path) -> set[str]:
    """The modules that a file imports, in full, also inside functions and for typing only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write the full module name"
            found.add(str(node.module))
    return found


def top_level_imports(file: Path) -> set[str]:
    """Those that run when the file is imported."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    plain = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}


def importers(library: str) -> set[Path]:
    """Files, relative to the checkout, that import a library."""
    return {
        file.relative_to(ROOT) for _, file in modules() if library in {name.partition(".")[0] for name in imports(file)}
    }


def test_imports_point_down_only() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for room, file in modules()
        for name in imports(file)
        if name.partition(".")[0] in BELOW and name.partition(".")[0] not in BELOW[room] and name != "servecast.errors"
    ]
    assert wrong == []


def test_errors_know_no_room() -> None:
    assert not {name.partition(".")[0] for name in imports(ROOT / "servecast" / "errors.py")} & set(BELOW)


def test_the_clock_stays_in_the_simulation() -> None:
    users = importers("simpy")
    assert users
    assert {file.parts[0] for file in users} == {"sim"}
    assert not [file for file in users if "schedulers" in file.parts or file.stem in WITHOUT_SIMPY]


def test_figures_stay_in_reports() -> None:
    assert {file.parts[0] for file in importers("plotly")} == {"reports"}


def test_torch_is_for_measuring_only() -> None:
    users = importers("torch")
    assert users
    assert {file.parent for file in users} == {Path("calibrate", "measure")}
    at_import = {name for file in users for name in top_level_imports(ROOT / file)}
    assert not {name for name in at_import if name.partition(".")[0] == "torch"}


def test_scenarios_hold_no_code() -> None:
    assert [file.name for file in (ROOT / "scenarios").rglob("*.py") if file.read_text().strip()] == []
    assert {file.suffix for file in (ROOT / "scenarios").iterdir() if file.is_file()} <= {".yaml", ".py"}


def test_nothing_shipped_imports_the_tests() -> None:
    assert importers("tests") | importers("benchmarks") == set()
