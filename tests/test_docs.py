"""What the documentation tells people to type works: commands, snippets and scenarios, run small."""

from __future__ import annotations

import gzip
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import servecast
from servecast.cli import main
from servecast.scenario import Scenario
from servecast.setup import set_up
from servecast.workload import KINDS
from workloads.arrivals import ARRIVALS
from workloads.lengths import LENGTHS
from workloads.readers import READERS
from workloads.sessions import SESSIONS

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
SWEEPS = (REPO / "docs" / "sweeps.md").read_text(encoding="utf-8")
EXPLAIN = (REPO / "docs" / "explain.md").read_text(encoding="utf-8")
DIAGNOSE = (REPO / "docs" / "diagnose.md").read_text(encoding="utf-8")
PAGES = (README, SWEEPS, EXPLAIN, DIAGNOSE)
SCENARIOS = sorted((REPO / "scenarios").glob("*.yaml"))


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def commands():
    """Every `servecast ...` line of the shell blocks of the README and of some pages, and of scenarios' comments."""
    lines = [line for text in PAGES for block in blocks("sh", text) for line in block.splitlines()]
    for path in SCENARIOS:
        lines += [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines if line.startswith("servecast ")})


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    """A folder in which the scenarios lie as in a checkout, and where results may be written."""
    (tmp_path / "scenarios").symlink_to(REPO / "scenarios")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", commands())
def test_documented_commands(command):
    words = shlex.split(command)[1:]
    if words[0] == "plan":  # a small one: few configurations, and a percentile that needs few requests
        words = [word.replace("p99", "p80").replace("p95", "p80") for word in words]
        words += ["--gpus", "h100-sxm,l40s", "--tp", "1", "--vary", "engine.max_num_seqs=256", "--draws", "0"]
        words += ["--months", "3"] * ("--growth" in words)
    if words[0] == "diagnose":
        words += ["--seeds", "1", "--workers", "1"]
    if words[0] in ("run", "compare", "sweep", "plan", "diagnose"):
        unit = "sessions" if "num_sessions" in (REPO / words[1]).read_text(encoding="utf-8") else "requests"
        words += ["--set", f"workload.num_{unit}=40"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output


def test_the_reference_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("make_reference", REPO / "docs" / "make_reference.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (REPO / "docs" / "reference.md").read_text(encoding="utf-8") == made.text()


def test_links_between_pages_lead_somewhere():
    pages = [REPO / "README.md", REPO / "ARCHITECTURE.md", *(REPO / "docs").rglob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 30
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_there_are_documented_commands():
    assert len(commands()) > 10


def test_the_readme_shows_what_the_quickstart_prints():
    (shown,) = blocks("text")
    result = CliRunner().invoke(main, ["run", "scenarios/quickstart.yaml"], env={"COLUMNS": "80"})
    assert [line.rstrip() for line in result.output.splitlines()] == shown.splitlines()


def test_the_diagnosis_that_is_shown_is_what_is_printed():
    (shown,) = blocks("text", DIAGNOSE)
    (command,) = [block for block in blocks("shell", DIAGNOSE) if "kv-pressure" in block]
    result = CliRunner().invoke(main, [*shlex.split(command)[1:], "--workers", "1"], env={"COLUMNS": "80"})
    printed = iter(line.rstrip() for line in result.output.splitlines())
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


@pytest.mark.parametrize(("text", "folder"), [(README, "from-python"), (SWEEPS, "seqs")])
def test_the_python_snippet(text, folder, tmp_path):
    (snippet,) = blocks("python", text)
    exec(snippet, {})
    assert (tmp_path / "runs" / folder / "report.html").exists()


def test_the_scenario_in_the_readme(tmp_path):
    (text,) = blocks("yaml")
    with gzip.open(tmp_path / "azure.csv.gz", "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n")
    (tmp_path / "scenario.yaml").write_text(text, encoding="utf-8")
    setup = set_up(servecast.load_scenario("scenario.yaml"))
    assert (setup.pool.replicas, len(setup.requests.trace.prompt_tokens)) == (2, 1)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_every_scenario_is_one_commented_question(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith("?")
    assert "# Answer: " in path.read_text(encoding="utf-8")
    assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= {
        "name", "model", "engine", "cluster", "workload", "slo", "seed", "speculation",
    }  # fmt: skip


def test_the_quickstart_sets_only_preset_and_workload():
    scenario = yaml.safe_load((REPO / "scenarios" / "quickstart.yaml").read_text(encoding="utf-8"))
    assert scenario["engine"] == {"preset": "vllm-0.19"}
    assert scenario["cluster"] == {"gpu": "h100-sxm"}


WORKLOADS = (REPO / "docs" / "workloads.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", WORKLOADS, flags=re.M | re.S))
def test_documented_workloads_are_valid(text):
    base = {"name": "x", "model": "llama-3.1-8b", "engine": "vllm-0.19", "cluster": {"gpu": "h100-sxm"}}
    Scenario.model_validate(base | yaml.safe_load(text))


def test_every_kind_and_format_is_documented():
    for word in (*KINDS, *ARRIVALS, *LENGTHS, *READERS, *SESSIONS):
        assert f"`{word}`" in WORKLOADS or f"{word}:" in WORKLOADS or f"kind: {word}" in WORKLOADS, word
