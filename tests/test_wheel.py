"""The built wheel: what is in it, and that it works from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("servecast", "sim", "calibrate", "workloads", "reports", "scenarios")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that build folders of the checkout neither matter nor appear."""
    source, out = tmp_path_factory.mktemp("source") / "servecast", tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=skip)
    # Without isolation where setuptools is at hand, since that needs no network.
    new_enough = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
    offline = subprocess.run([sys.executable, "-c", new_enough], capture_output=True).returncode == 0
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), *(["--no-isolation"] if offline else [])]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("servecast-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own, to be put before everything else on the path."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, "-P", *args], cwd=cwd, env=environment, capture_output=True, text=True)


def test_holds_code_and_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".yaml", ".css") or file.name == "py.typed"
    }
    assert shipped - names == set()
    for data in ("calibrate/catalog/gpus.yaml", "scenarios/quickstart.yaml", "reports/report.css"):
        assert data in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_comes_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, json, pkgutil; "
        f"roots = [importlib.import_module(name) for name in {PACKAGES}]; "
        "found = [m.name for r in roots for m in pkgutil.walk_packages(r.__path__, r.__name__ + '.')]; "
        "print(json.dumps([m.__file__ for m in roots + [importlib.import_module(name) for name in found]]))"
    )
    out = python(installed, tmp_path, "-c", code)
    assert out.returncode == 0, out.stderr
    files = json.loads(out.stdout)
    assert len(files) > 20
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_runs_a_bundled_scenario_from_another_folder(installed: Path, tmp_path: Path) -> None:
    servecast = ("-c", "from servecast.cli import main; main()")
    listed = python(installed, tmp_path, *servecast, "list", "scenarios")
    assert listed.returncode == 0, listed.stderr
    paths = [line.partition(": ")[0] for line in listed.stdout.splitlines()]
    quickstart = next(path for path in paths if path.endswith("quickstart.yaml"))
    assert Path(quickstart).is_relative_to(installed)
    ran = python(installed, tmp_path, *servecast, "run", quickstart, "--set", "workload.num_requests=50")
    assert ran.returncode == 0, ran.stderr
    assert "50 of 50 finished" in ran.stdout
    assert (tmp_path / "runs" / "quickstart" / "report.html").stat().st_size > 10_000
