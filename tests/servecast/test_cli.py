"""The command line, as a person and as a script see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from tests.servecast.helpers import QUICKSTART

FEW = ("--set", "workload.num_requests=20")
FILES = ["manifest.json", "report.html", "requests.parquet", "steps.parquet", "summary.json"]
COMMAND = [sys.executable, "-c", "from servecast.cli import main; main()"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_run_prints_a_summary_and_writes_files() -> None:
    out = call("run", QUICKSTART, *FEW)
    assert out.exit_code == 0, out.output
    for word in (
        "chat on one H100",
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "20 of 20 finished",
        "docs/accuracy.md",
        "Report: ",
    ):
        assert word in out.stdout
    assert sorted(path.name for path in Path("runs/quickstart").iterdir()) == FILES


def test_run_says_what_was_resolved() -> None:
    out = call("run", QUICKSTART, *FEW, "--set", "engine=vllm-0.20")
    assert "vllm-0.20 is not a preset: resolved to vllm-0.19" in " ".join(out.stdout.split())


def test_json_is_pure_and_writes_nothing_without_out() -> None:
    out = call("run", QUICKSTART, *FEW, "--json")
    assert json.loads(out.stdout)["completed"] == 20
    assert list(Path().iterdir()) == []


def test_json_with_out_keeps_stdout_pure() -> None:
    out = call("run", QUICKSTART, *FEW, "--json", "--out", "a/b")
    assert json.loads(out.stdout) == json.loads(Path("a/b/summary.json").read_text())
    assert "Report: " in out.stderr
    assert sorted(path.name for path in Path("a/b").iterdir()) == FILES


def test_resolved_scenario_can_be_run_again() -> None:
    shown = call("run", QUICKSTART, *FEW, "--set", "engine.max_num_seqs=8", "--show-resolved")
    assert shown.exit_code == 0
    assert "max_num_seqs: 8  # user" in shown.stdout
    assert "max_num_batched_tokens: 8192  # vLLM v0.19.1 default" in shown.stdout
    assert not Path("runs").exists()
    Path("again.yaml").write_text(shown.stdout, encoding="utf-8")
    first = call("run", QUICKSTART, *FEW, "--set", "engine.max_num_seqs=8", "--json")
    assert call("run", "again.yaml", "--json").stdout == first.stdout


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("models", "llama-3.1-8b"),
        ("gpus", "h100-sxm"),
        ("gpus", " 0.02 TFLOPS"),
        ("presets", "vLLM v0.19.1, policy vllm-v1"),
        ("scenarios", "quickstart.yaml: "),
    ],
)
def test_list(what: str, word: str) -> None:
    out = call("list", what)
    assert out.exit_code == 0
    assert word in out.stdout


def test_listed_scenarios_can_be_run() -> None:
    for line in call("list", "scenarios").stdout.splitlines():
        path, _, question = line.partition(": ")
        assert question.endswith("?")
        assert call("run", path, "--show-resolved").exit_code == 0


def test_help_and_version() -> None:
    assert call("-h").stdout == call("--help").stdout
    assert "--set" in call("run", "-h").stdout
    assert call("--version").stdout.startswith("servecast, version ")


def test_every_mistake_is_said_and_the_exit_code_is_2() -> None:
    out = call("run", QUICKSTART, "--set", "sede=1", "--set", "slo.tfft=1s", "--set", "cluster.tp=x")
    assert (out.exit_code, out.stdout) == (2, "")
    assert [line[:19] for line in out.stderr.splitlines()] == [
        "Error: --set cluste",
        "Error: --set slo.tf",
        "Error: --set sede: ",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "workload.lengths.prompt={kind: lognormal, mean: 3, cv: -1}",
            "workload.lengths.prompt.cv: -1 is not a number",
        ),
        ("workload.lengths.prompt.cv=-1", "workload.lengths.prompt.cv: -1 is not a number"),
        ("workload.priority={by: predicted-output, sigma: -1}", "workload.priority.sigma: -1 is not 0 or more"),
        ("workload.priority.by=predicted-output", "workload.priority.sigma: missing"),
    ],
)
def test_a_mistake_in_an_override_names_each_key_once(change: str, said: str) -> None:
    assert call("run", QUICKSTART, "--set", change).stderr.startswith(f"Error: --set {said}")


@pytest.mark.parametrize("draws", ["abc", "2.5"])
def test_intervals_are_a_number_of_draws(draws: str) -> None:
    assert f"'{draws}' is not a number of draws, 5 to 1000" in call("run", QUICKSTART, "--intervals", draws).stderr


@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("run", "no.yaml"),
        ("run", "."),
        ("run", QUICKSTART, "--set"),
        ("run", QUICKSTART, "--set", "seed"),
        ("run", QUICKSTART, "--out", QUICKSTART),
        ("run", QUICKSTART, "--out", QUICKSTART / "x"),
        ("run", QUICKSTART, "--nonsense"),
        ("list", "model"),
        ("rum",),
        ("run", QUICKSTART, "--set", "model=llama-3.1-405b"),
    ],
    ids=str,
)
def test_bad_input_exits_with_2_and_a_reason(args: tuple[object, ...]) -> None:
    out = call(*args)
    assert out.exit_code == 2
    assert out.stdout == ""
    assert "Error: " in out.stderr
    assert "Traceback" not in out.stderr


def test_a_folder_that_takes_no_files_is_said_before_the_run() -> None:
    Path("file").write_text("x")
    out = call("run", QUICKSTART, "--out", "file/deep")
    assert out.exit_code == 2
    assert out.stderr.startswith("Error: --out file/deep: no files can be written there")
    assert out.stdout == ""


def test_results_that_cannot_be_written_do_not_hide_the_summary() -> None:
    Path("out/summary.json").mkdir(parents=True)
    out = call("run", QUICKSTART, *FEW, "--out", "out")
    assert out.exit_code == 2
    assert "20 of 20 finished" in out.stdout
    assert "cannot write the results" in out.stderr


def test_a_process_with_bad_input() -> None:
    out = subprocess.run([*COMMAND, "run", "no.yaml"], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr.startswith("Error: no.yaml: no such file")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_keeps_what_is_done() -> None:
    args = ["run", str(QUICKSTART), "--set", "workload.num_requests=2000000", "--out", "out"]
    process = subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while not Path("out").exists() and time.monotonic() < end:  # made when the simulation is about to start
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Partial run" in stdout
    assert "Traceback" not in stderr
    summary = json.loads(Path("out/summary.json").read_text())
    assert not summary["complete"]
    assert 0 < summary["completed"] < summary["submitted"] < 2_000_000
    assert sorted(path.name for path in Path("out").iterdir()) == FILES


@pytest.mark.parametrize("args", ["'--help'", "'run', '--help'", "'--version'"])
def test_help_imports_nothing_heavy(args: str) -> None:
    code = (
        f"import sys; from servecast.cli import main\n"
        f"try: main([{args}])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'polars', 'pydantic', 'plotly', 'rich', 'scipy', 'simpy', 'yaml'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
