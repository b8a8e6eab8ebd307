"""A session of measuring: what it writes down, what it leaves out, and what it refuses."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.measure import measure
from calibrate.measure import session as sessions
from calibrate.measure.kit import Kit, Prepared
from calibrate.measure.machine import open_machine
from calibrate.measure.record import Record
from calibrate.measure.session import Session
from calibrate.measure.system import gpu_id, nvidia_smi, processor_seconds
from calibrate.measurements import load_measurements, measured_rates
from calibrate.models import load_model
from servecast.errors import ServecastError
from tests.calibrate.measure.tiny import GRID, TINY, every


@pytest.mark.usefixtures("small", "torch")
def test_a_session_measures_saves_and_goes_on(tmp_path: Path, config: str) -> None:
    out, told = tmp_path / "out", []
    found = measure("cpu", out, 60, models=(config,), grid=GRID, progress=lambda *what: told.append(what))
    assert load_measurements(out).tables.keys() == found.tables.keys()
    for family, table in found.tables.items():
        assert load_measurements(out).tables[family].equals(table)
        assert set(table["kernel"].str.contains("torch")) == {True}
        assert table["spread"].null_count() == 0
    points = every(GRID, [replace(load_model(config), dtype="fp32")])
    assert sum(len(table) for table in found.tables.values()) == len(points)
    assert {what[0] for what in told} == set(found.tables)
    assert [what[1] for what in told] == list(range(1, len(points) + 1))
    assert found.device.gpu == "cpu"
    assert "torch" in found.device.software
    flops, bandwidth = measured_rates(found)
    assert flops.keys() == {"fp32"}
    assert 1e6 < min(flops["fp32"], bandwidth) < 1e14

    (out / "step.csv").unlink()  # what is missing is measured, and what is there stays
    again = measure("cpu", out, 60, models=(config,), grid=GRID)
    assert len(again.tables["step"]) == len(found.tables["step"])
    for family, table in found.tables.items():
        assert family == "step" or again.tables[family].equals(table)


@pytest.mark.usefixtures("small", "torch")
def test_a_killed_session_leaves_what_it_had(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SAVE_S", 0.0)

    def stop(family: str, done: int, of: int, left: float) -> None:
        if done == 12:
            raise KeyboardInterrupt

    def die(*_: object) -> None:
        raise SystemExit  # in the last save, too: as a kill leaves it

    with pytest.raises(KeyboardInterrupt):
        measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID, progress=stop)
    rows = sum(len(table) for table in load_measurements(tmp_path / "out").tables.values())
    assert rows == 12
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", die)
        with pytest.raises(SystemExit):
            measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID)
    assert sum(len(table) for table in load_measurements(tmp_path / "out").tables.values()) == 12
    measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID)
    assert sum(len(table) for table in load_measurements(tmp_path / "out").tables.values()) > 12


@pytest.mark.usefixtures("small", "torch")
def test_what_cannot_be_measured_is_counted(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kit: Kit, sizes: Any) -> Prepared:
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setitem(sessions.BUILDERS, "moe", broken)
    monkeypatch.setattr(sessions, "CPU_POOL_BYTES", 2**20)
    big = replace(GRID.rounds[0], decode=((3, 20), (64, 5000)))
    grid = replace(GRID, rounds=(big,))
    found = measure("cpu", tmp_path / "out", 60, models=(config,), grid=grid)
    said = "\n".join(found.device.notes)
    assert "moe: 3 points failed, the first with: no kernel image is available" in said
    assert "1 of " in said
    assert "left out: they do not fit the memory" in said
    assert "moe" not in found.tables
    assert len(found.tables["decode_attention"]) == 1


@pytest.mark.usefixtures("small", "torch")
def test_the_time_is_kept(tmp_path: Path, config: str) -> None:
    """Points that would take too long are left out by their FLOPs and bytes, and counted."""
    long = replace(GRID.rounds[0], tokens=(1, 3_000_000), moe=(), steps=())
    found = measure("cpu", tmp_path / "out", 3, models=(config,), grid=replace(GRID, rounds=(long,)))
    assert max(found.tables["gemm"]["m"]) == 2  # the samples
    assert any(
        "left out: each would take more than 3% (a whole step 6%) of the budget of 3 s" in note
        for note in found.device.notes
    )
    with pytest.raises(ServecastError, match=r"nothing could be measured in 1e-06 s"):
        measure("cpu", tmp_path / "none", 1e-6, models=(config,), grid=GRID)
    assert not (tmp_path / "none").exists()


def session_of(kit: Kit, folder: Path) -> Session:
    machine, dtype = open_machine("cpu", None)
    return Session(machine, dtype, [TINY], Record(machine, folder), 60, GRID)


def test_a_library_that_does_not_work_is_done_without(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(kit, failed={})

    def choose(kit: Kit, sizes: Any) -> Prepared:
        def fail() -> None:
            raise ValueError("head size 16 is not supported")

        if "flashy attention" in kit.failed:
            return Prepared([lambda: None], "torch")
        return Prepared([fail], "flashy", library="flashy attention")

    monkeypatch.setitem(sessions.BUILDERS, "decode_attention", choose)
    session = session_of(kit, tmp_path)
    assert session._prepared(mine, "decode_attention", {}).kernel == "torch"
    said = list(session._notes(mine, 1))
    assert said == ["flashy attention is installed but was done without: head size 16 is not supported"]


def test_drift_of_the_reference_is_said(kit: Kit, tmp_path: Path) -> None:
    session = session_of(kit, tmp_path)
    session.references = [1e-3, 1.04e-3, 0.97e-3]
    assert list(session._notes(kit, 1)) == []
    session.references += [1.3e-3]
    (said,) = session._notes(kit, 1)
    assert "took 1 ms at the start and 0.97 to 1.3 ms (-3% to +30%) in 3 later looks" in said


@pytest.mark.usefixtures("small", "torch")
def test_another_machine_s_folder_is_refused(tmp_path: Path, config: str) -> None:
    measure("cpu", tmp_path, 60, models=(config,), grid=replace(GRID, rounds=()))
    with pytest.raises(ServecastError, match="holds measurements in fp32, not in bf16; give another folder"):
        measure("cpu", tmp_path, 60, dtype="bf16", models=(config,), grid=GRID)
    facts = (tmp_path / "device.yaml").read_text()
    (tmp_path / "device.yaml").write_text(facts.replace("device: ", "device: not "))
    with pytest.raises(ServecastError, match="holds measurements of another device"):
        measure("cpu", tmp_path, 60, models=(config,), grid=GRID)


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(ServecastError, match=r'pip install "servecast\[calibrate\]"'):
        measure("cpu", tmp_path, 60)


def test_every_mistake_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServecastError) as error:
        measure("cpu", tmp_path, 0, models=("lama-3-8b", "qwen2.5-0.5b"))
    assert len(error.value.problems) == 2
    assert "expected more than 0 seconds" in str(error.value)
    assert "did you mean 'llama-3-8b'?" in str(error.value)
    with pytest.raises(ServecastError, match=r"'cdua' is not known \(did you mean 'cuda'\?\); known: cuda, cpu"):
        measure("cdua", tmp_path, 60)


def test_dtypes_that_the_device_lacks(tmp_path: Path, torch: Any) -> None:
    with pytest.raises(ServecastError, match=r"dtype: 'fp8' cannot be measured on .*; possible there: fp32, bf16"):
        measure("cpu", tmp_path, 60, dtype="fp8")
    if not torch.cuda.is_available():
        with pytest.raises(ServecastError, match="finds no CUDA device"):
            measure("cuda", tmp_path, 60)


def test_other_processes_are_said(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = open_machine("cpu", None)
    monkeypatch.setattr("calibrate.measure.machine.Cpu._cores", lambda machine: {0, 1})
    looks: Iterator[tuple[float, float, float]] = iter([(0, 0, 0), (1, 1.4, 0.1), (1, 1.4, 0.1), (11, 22.4, 17.1)])
    monkeypatch.setattr("calibrate.measure.machine.processor_seconds", lambda cores: next(looks))
    monkeypatch.setattr("calibrate.measure.machine.time.sleep", lambda seconds: None)
    assert any("other processes kept 1.3 of 2 cores busy at the start" in note for note in machine.notes("fp32"))
    (said,) = machine.afterwards()
    assert "other processes kept 0.4 of 2 cores busy on average" in said


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_processor_time_is_read() -> None:
    cores = os.sched_getaffinity(0)
    first = processor_seconds(cores)
    sum(range(2_000_000))
    second = processor_seconds(cores)
    assert first is not None
    assert second is not None
    assert second[0] > first[0]
    assert second[2] > first[2]


@pytest.mark.parametrize(
    ("name", "gib", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H100 NVL", 94, "h100-nvl"),
        ("NVIDIA H200", 141, "h200-sxm"),
        ("NVIDIA H20", 96, "h20"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-sxm-40gb"),
        ("NVIDIA B200", 180, "b200-sxm"),
        ("NVIDIA GB200", 186, "gb200"),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA A10", 24, "a10"),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, "rtx-4090-laptop-gpu"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("Tesla V100-SXM2-16GB", 16, "tesla-v100-sxm2-16gb"),
    ],
)
def test_gpus_are_known_by_their_driver_s_name(name: str, gib: int, gpu: str) -> None:
    assert gpu_id(name, gib * 2**30) == gpu


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi(["driver_version"], "0") is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$2" = "--query-gpu=a,b" ] && echo "580.1, 0x4"\n')
    tool.chmod(0o755)
    assert nvidia_smi(["a", "b"], "0") == ["580.1", "0x4"]
    assert nvidia_smi(["c"], "0") is None  # it failed
