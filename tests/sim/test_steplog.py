"""A long log is the same log: rows that went to a file come back as they were, and memory does not grow with them."""

from __future__ import annotations

import errno
import gc
import io
import json
import pickle
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.figures import latency_cdfs, requests_scatter
from reports.series import Series, over_time
from servecast.errors import ServecastError
from servecast.run import Result, simulate
from servecast.setup import set_up
from sim import cluster, steplog
from sim.request import Request
from sim.steplog import Rows
from tests.servecast.helpers import fixed, small

BLOCK = 256
MANY = {"workload__num_requests": 1500, "cluster__replicas": 3, "workload__arrivals__rate": 30}


def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which even a small run fills many."""
    monkeypatch.setattr(steplog, "BLOCK", BLOCK)
    monkeypatch.setattr(cluster, "EVENTS_PER_CHECK", 50)


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 9])
def test_rows_come_back_from_the_file(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    short_blocks(monkeypatch)
    values = np.random.default_rng(n).normal(size=(n, 3))
    rows = Rows(("a", "b", "c"))
    for i, row in enumerate(values):
        rows.extend(rows.pack(*row))
        if i % 40 == 0:
            rows.spill()
    assert len(rows) == n
    table = rows.table()
    assert list(table) == ["a", "b", "c"]
    assert table.height == n
    for i, name in enumerate(table):
        assert (table[name] == values[:, i]).all()
        for start, stop in ((0, n), (n // 2, n), (BLOCK // 2, BLOCK + 1), (n - 3, n - 1), (2, 2)):
            assert (rows.column(name, max(start, 0), stop) == values[max(start, 0) : max(stop, 0), i]).all()
    order = np.random.default_rng(0).permutation(n)
    mixed, chosen = values[order], values[order][:, 0] > 0
    assert (table.take(order)["b"] == mixed[:, 1]).all()
    assert (table.take(order).where(chosen)["c"] == mixed[chosen][:, 2]).all()
    for whole, expected in ((table, values), (table.take(order), mixed)):
        blocks = list(whole.blocks())
        assert [block.height for block in blocks[:-1]] == [BLOCK] * (len(blocks) - 1)
        assert (np.concatenate([block["b"] for block in blocks]) == expected[:, 1]).all()
    assert (pickle.loads(pickle.dumps(rows)).table()["b"] == values[:, 1]).all()


@pytest.mark.parametrize(
    ("changes", "statuses"),
    [
        (MANY, {"finished"}),
        (
            MANY | {"engine__num_gpu_blocks_override": 900, "engine__max_model_len": 4000, "workload__timeout": "4s"},
            {"finished", "cancelled", "rejected"},
        ),
        ({"workload__num_requests": 1, "engine__max_model_len": 1}, {"rejected"}),
    ],
    ids=["all finished", "cancelled and rejected", "nothing ran"],
)
def test_a_spilled_run_gives_the_same_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, object], statuses: set[str]
) -> None:
    scenario = small(**changes)
    kept, expected = outcome(simulate(scenario), tmp_path / "kept")
    assert set(kept.requests["status"]) == statuses
    short_blocks(monkeypatch)
    spilled, got = outcome(simulate(scenario), tmp_path / "spilled")
    assert len(list(spilled.step_blocks())) > 10 or not len(kept.steps)
    assert got == expected
    assert spilled.requests.equals(kept.requests)
    assert spilled.steps.equals(kept.steps)
    assert rounded(pickle.loads(pickle.dumps(spilled)).summary()) == rounded(kept.summary())


def outcome(result: Result, folder: Path) -> tuple[Result, dict[str, object]]:
    """The result and what people get from it: files, tables, points of figures."""
    result.write(folder, {})
    seen: dict[str, object] = {path.name: path.read_bytes() for path in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    seen["summary.json"] = summary | {"spent": rounded(summary.get("spent"))}  # sums, as the series below
    seen |= {"rows": (result.requests.height, result.steps.height)}
    if result.finished:
        seen |= {make.__name__: make(result).to_json() for make in (latency_cdfs, requests_scatter)}
    series = over_time(result)  # sums, of which the last digits depend on where blocks end
    seen |= {name: np.round(getattr(series, name), 6).tolist() for name in Series.__slots__}
    return result, seen


def rounded(value: Any) -> Any:
    """Numbers inside to nine digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value


def peak_bytes(requests: int) -> int:
    """What a run of short requests allocates at most, its workload aside."""
    setup = set_up(small(workload__num_requests=requests, workload__lengths=fixed(16, 2), workload__arrivals__rate=100))
    tracemalloc.start()
    try:
        simulate(setup)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_hardly_grows_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    peak_bytes(100)  # what is imported or cached on the way
    few, many = peak_bytes(1000), peak_bytes(6000)
    assert (many - few) / 5000 < 100  # a request's row has 104 bytes, a step's 136


def test_requests_that_are_over_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "EVENTS_PER_CHECK", 500)
    alive: list[int] = []

    def count(done: int, total: int, now: float) -> bool:
        alive.append(sum(isinstance(thing, Request) for thing in gc.get_objects()))
        return True

    simulate(small(workload__num_requests=3000, workload__lengths=fixed(16, 2)), count)
    assert len(alive) > 5
    assert max(alive) < 50


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)

    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(ServecastError, match="No space left on device; let TMPDIR name a folder"):
        simulate(small(**MANY))
