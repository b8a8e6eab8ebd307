"""Where runs are done: all backends give the same rows, workers that are killed lose nothing, and ctrl-C ends it.

Dask and Ray are tested on a cluster of each that is started here; where they are not installed, those tests skip.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from servecast.errors import ServecastError
from servecast.sweeping import backends
from servecast.sweeping.backends import BACKENDS, KILLED
from servecast.sweeping.sweep import sweep
from tests.servecast.helpers import QUICKSTART

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # other libraries' own
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes as on Linux"),
]

MODULES = {"dask": "distributed", "ray": "ray"}
FEW = ("workload.num_requests=30", "engine.enable_prefix_caching=false")
VARY = ["workload.arrivals.rate=1:12:12"]

POLICY = """
import os, signal, time
from pathlib import Path
from sim.schedulers import Scheduler
from sim.batch import Batch

class Mine(Scheduler):
    def __init__(self):
        self.begun = False

    def plan(self, state):
        if not self.begun:
            self.begun = True
            with open({log!r}, "a") as file:
                file.write("begun\\n")
            if {always} or not Path({marker!r}).exists():
                Path({marker!r}).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        batch = Batch()
        state.kv.free -= state.decodes.demand(state.decodes.step)
        batch.decodes, batch.kv_tokens = state.decodes.count, state.decodes.kv_tokens
        while state.waiting:
            state.admit(batch, state.waiting[0].target)
        return batch
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend; skips the test where its library is not installed."""
    name = str(request.param)
    if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"needs {MODULES[name]}: pip install 'servecast[{name}]'")
    return name


def policy(name: str, *, always: bool) -> str:
    """A scheduler that kills its worker: the first time, or `always`."""
    paths = {"log": str(Path(f"{name}.log").absolute()), "marker": str(Path(f"{name}.once").absolute())}
    Path(f"{name}.py").write_text(POLICY.format(always=always, **paths), encoding="utf-8")
    return f"{name}.py:Mine"


def raw_rows() -> pl.DataFrame:
    return pl.concat(map(pl.read_parquet, sorted(Path("out/rows").glob("*.parquet"))), how="diagonal_relaxed")


def test_all_give_the_rows_of_this_process(backend: str) -> None:
    alone = sweep(QUICKSTART, VARY, "alone", overrides=FEW, workers=1).rows
    found = sweep(QUICKSTART, VARY, "out", overrides=FEW, workers=2, backend=backend).rows
    assert found.drop("wall_s").equals(alone.drop("wall_s"))
    assert raw_rows().height == 12


def test_a_worker_that_is_killed_loses_nothing(backend: str) -> None:
    own = policy("once", always=False)
    found = sweep(QUICKSTART, VARY, "out", overrides=(*FEW, f"engine.scheduler={own}"), workers=2, backend=backend)
    assert Path("once.once").exists()  # it was killed
    assert found.rows["status"].to_list() == ["done"] * 12
    assert raw_rows()["id"].n_unique() == raw_rows().height == 12
    assert len(Path("once.log").read_text().splitlines()) > 12  # that run was begun again


def test_a_run_that_kills_its_workers_is_given_up(backend: str) -> None:
    settings = [[policy("once", always=True), 2], [None, 2], [None, 4], [None, 6]]
    vary = {"engine.scheduler+workload.arrivals.rate": settings}
    found = sweep(QUICKSTART, vary, "out", overrides=FEW, workers=2, backend=backend)
    assert found.rows["status"].to_list() == ["failed"] + ["done"] * 3
    ((error, count, _),) = found.errors("failed")
    assert (error, count) == (KILLED, 1)
    assert raw_rows().height == 4


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_an_address_that_does_not_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_library", lambda module, extra: None)  # it is not needed for that
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(ServecastError, match=f"--address {address}: no cluster answers there: Connection refused"):
        sweep(QUICKSTART, VARY, "out", overrides=FEW, backend=name, address=address)
    assert time.monotonic() - started < 30
    with pytest.raises(ServecastError, match="--address nonsense: is not an address; write it like"):
        sweep(QUICKSTART, VARY, "out", overrides=FEW, backend=name, address="nonsense")


def test_an_address_without_a_cluster() -> None:
    with pytest.raises(ServecastError, match="give --backend dask or --backend ray too"):
        sweep(QUICKSTART, VARY, "out", overrides=FEW, address="tcp://10.0.0.1:8786")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ServecastError, match=r"distributed is not installed; pip install 'servecast\[dask\]'"):
        sweep(QUICKSTART, VARY, "out", overrides=FEW, backend="dask")


def test_workers_of_another_version_are_refused() -> None:
    with pytest.raises(ServecastError, match=r"workers have servecast 0\.0\.9"):
        backends._same_version({"a": "0.0.9"})


@pytest.mark.parametrize("name", ["dask"])
def test_a_cluster_that_is_already_there(name: str) -> None:
    distributed: Any = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        found = sweep(QUICKSTART, VARY, "out", overrides=FEW, backend=name, address=cluster.scheduler_address)
    assert found.rows["status"].to_list() == ["done"] * 12


def test_a_port_where_something_else_answers() -> None:
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "ANSWER_S", 1.0)
            with pytest.raises(ServecastError, match=f"--address {address}: no cluster answers there"):
                sweep(QUICKSTART, VARY, "out", overrides=FEW, backend="dask", address=address)


LISTENING = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from servecast.cli import main; main()"
)
"""The program, which hears of ctrl-C even where these tests run in the background and so do not."""


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(backend: str) -> None:
    """The signal goes to every process of the terminal, workers too."""
    command = [
        sys.executable, "-c", LISTENING, "sweep", str(QUICKSTART), "--out", "out",
        "--vary", "workload.arrivals.rate=1:30:30", "--set", "workload.num_requests=6000",
        "--workers", "2", "--backend", backend,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        end = time.monotonic() + 120
        while not list(Path("out").glob("rows/*.parquet")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    kept = raw_rows().height
    assert 0 < kept < 30
    assert f"Ended early: {kept} of 30 runs are kept; the same command goes on." in stderr.decode()
    assert b"Traceback" not in stderr
    whole = sweep(QUICKSTART, ["workload.arrivals.rate=1:30:30"], "out", overrides=["workload.num_requests=6000"])
    assert whole.rows["status"].to_list() == ["done"] * 30
    assert raw_rows().height == 30
