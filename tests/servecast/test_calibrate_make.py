"""`servecast calibrate import`, `fit` and `measure`: from tables to a profile that a scenario can use."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from tests.calibrate.published import aiconfigurator_rows, write_aiconfigurator
from tests.measured import measured
from tests.servecast.helpers import QUICKSTART


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_saved_measurements_become_a_profile_that_prices_a_run(tmp_path: Path) -> None:
    measured().save(tmp_path / "points")
    profile = tmp_path / "p.json"
    made = call("calibrate", "fit", tmp_path / "points", "--out", profile)
    assert made.exit_code == 0, made.output
    assert made.output.rstrip().endswith(f"Profile: {profile}")
    few = ["--set", "workload.num_requests=20", "--json"]
    mine, shipped = (
        call("run", QUICKSTART, "--set", f"cluster.profile={word}", *few) for word in (profile, "datasheet")
    )
    assert json.loads(mine.output)["mean_tpot_ms"] != json.loads(shipped.output)["mean_tpot_ms"]


def test_published_tables_are_counted_kept_and_fitted_or_refused(tmp_path: Path) -> None:
    system = write_aiconfigurator(tmp_path / "h100_sxm", aiconfigurator_rows())
    out = call(
        "calibrate", "import", "aiconfigurator", system, "--save", tmp_path / "kept", "--out", tmp_path / "p.json"
    )
    assert "gemm: 12 points" in out.output
    assert (tmp_path / "kept" / "gemm.csv").is_file()
    wrong = call("calibrate", "import", "aiconfiguratr", system, "--out", tmp_path / "p.json")
    assert (wrong.exit_code, "did you mean 'aiconfigurator'?" in wrong.stderr) == (2, True)
    nowhere = call("calibrate", "fit", tmp_path / "kept", "--out", tmp_path / "none" / "p.json")
    assert nowhere.exit_code == 2
    assert "there is no folder" in nowhere.stderr


def test_measuring_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    out = tmp_path / "cpu.json"
    default = call("calibrate", "measure", "--device", "cpu", "--out", out)
    assert (default.exit_code, 'pip install "servecast[calibrate]"' in default.stderr) == (2, True)
    bare = call("calibrate", "measure", "--device", "cpu", "--budget", "10", "--out", out)
    assert (bare.exit_code, "--budget: '10' is not a duration" in bare.stderr) == (2, True)
    assert not out.exists()
