"""Whatever stands in a file, it becomes runs whose numbers can be taken, or is refused in words: nothing else."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reports.formats import FORMATS, read_all
from reports.formats.figures import KEYS
from reports.measured import REQUEST_COLUMNS, MeasuredRun
from servecast.errors import ServecastError
from tests.reports.formats.samples import GOOD

FOLDER_ONCE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
HUGE = [2**31, 2**63, 2**64, 10**30, 10**400, -1, 0, 0.0, -0.0, 1.5, 1e300, 5e-324, float("nan"), float("inf")]
WRONG: list[Any] = [None, "", " ", "x", "\ud800", True, [], {}, [[1]], {"a": [1]}, "nan", "1e400", "inf", *HUGE]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def outcome(path: Path, format: str | None) -> list[MeasuredRun] | str:
    """The runs, or what is wrong with the file; anything else fails the test."""
    try:
        runs = read_all(path, format)
    except ServecastError as error:
        str(error).encode()
        return "\n".join(error.problems)
    assert len(runs) >= 1
    for run in runs:
        _usable(run)
    return runs


def _usable(run: MeasuredRun) -> None:
    assert set(run.summary) <= set(KEYS)
    facts = (run.duration_s, run.completed, run.failed, run.rate, run.concurrency, *run.summary.values())
    assert np.isfinite([fact for fact in facts if fact is not None]).all()
    "\n".join((run.tool, run.version, run.source, run.model or "", *run.notes, *run.doubts)).encode()
    if run.requests is None:
        return
    assert run.requests.columns == list(REQUEST_COLUMNS)
    for name in ("sent_s", "ttft_s", "tpot_s", "e2e_s"):
        assert np.isfinite(run.requests[name].drop_nulls().to_numpy()).all()
    assert np.isfinite(run.requests["itl_s"].explode().drop_nulls().to_numpy()).all()
    assert run.completed == run.summary["completed"]


@settings(max_examples=200, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.binary(max_size=60), st.sampled_from([None, *FORMATS]))
@example(b"{" * 3000, None)
@example(b'{"a":' * 3000, None)
@example(b"[" * 100_000, None)
@example(b"1" * 5000, None)
@example(b'{"duration": ' + b"1" * 5000 + b"}", "vllm")
@example(b"ttft_ms\n1,2\n", "table")
@example(b'"ttft_ms\n1\n', None)
def test_any_bytes(tmp_path: Path, content: bytes, format: str | None) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    outcome(path, format)


@settings(max_examples=150, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from(list(GOOD)), st.booleans(), st.booleans())
def test_damaged_bytes(tmp_path: Path, data: st.DataObject, name: str, packed: bool, named: bool) -> None:
    """Truncated, overwritten, with noise at the end, two formats in one file; also inside gzip."""
    content = bytearray(GOOD[name].encode())
    if data.draw(st.booleans()):
        content += GOOD[data.draw(st.sampled_from(list(GOOD)))].encode()
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=12))
    path = tmp_path / "r"
    path.write_bytes(gzip.compress(bytes(content)) if packed else bytes(content))
    outcome(path, name if named else None)


@settings(max_examples=100, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(JSON, st.sampled_from([None, *FORMATS]))
def test_any_json(tmp_path: Path, content: Any, format: str | None) -> None:
    path = tmp_path / "r"
    path.write_text(json.dumps(content))
    outcome(path, format)


@settings(max_examples=500, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from([name for name in GOOD if name not in ("vllm_cpu", "table")]), st.booleans())
def test_wrong_values(tmp_path: Path, data: st.DataObject, name: str, named: bool) -> None:
    """Values of other types, huge ones, missing keys, anywhere in a file of a known format."""
    text = GOOD[name]
    objects = [json.loads(text)] if name == "aiperf" else [json.loads(line) for line in text.splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        _spoil(data, data.draw(st.sampled_from(objects)))
    path = tmp_path / "r"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in objects))
    outcome(path, name if named else None)


@settings(max_examples=200, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from(["vllm_cpu", "table"]), st.booleans())
def test_wrong_cells(tmp_path: Path, data: st.DataObject, name: str, named: bool) -> None:
    cells = [line.split(",") for line in GOOD[name].splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(cells if data.draw(st.booleans()) else cells[1:]))
        wrong = data.draw(st.sampled_from([value for value in WRONG if value != "\ud800"]))
        row[data.draw(st.integers(0, len(row) - 1))] = "" if wrong is None else str(wrong)
    path = tmp_path / "r"
    path.write_text("\n".join(",".join(row) for row in cells))
    outcome(path, name if named else None)


def _spoil(data: st.DataObject, value: Any) -> None:
    """Change, or take away, something somewhere inside an object or a list."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if isinstance(value[key], dict | list) and value[key] and data.draw(st.integers(0, 3)):
        _spoil(data, value[key])
    elif data.draw(st.booleans()):
        value[key] = copy.deepcopy(data.draw(st.sampled_from(WRONG) | st.floats()))
    else:
        del value[key]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("content", [b"{}", b"{}\n{}\n", b"[]", b"null\n", b"\xff\xfe\0", b",\n,\n", b"a,b\n"])
def test_nearly_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    assert isinstance(outcome(path, name), str)
