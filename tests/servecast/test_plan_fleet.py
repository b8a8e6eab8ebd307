"""Plans for several models at once: the sum of their own plans, and what one type of GPU for all would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from servecast.cli import main
from servecast.planning import plan as planning
from servecast.planning.candidates import Candidate
from servecast.planning.evidence import Evidence, verify
from servecast.planning.examine import Case
from servecast.planning.rent import Rent
from servecast.planning.slo import parse_requirements
from servecast.sweeping.runs import Base
from servecast.yamlfile import dump_yaml
from tests.servecast.helpers import fixed
from tests.servecast.test_plan import SCENARIO

PRICES = {"h100-sxm": 2.4, "l40s": 1.1}
SLO = "p80 ttft < 500ms, p80 tpot < 40ms"


def scenarios(folder: Path) -> list[Path]:
    """A small model with much to read, and a large one that no single L40S serves fast enough."""
    small = SCENARIO | {"name": "chat", "workload": SCENARIO["workload"] | {"num_requests": 200}}
    workload = {"num_requests": 200, "arrivals": {"kind": "poisson", "rate": 4}, "lengths": fixed(600, 60)}
    large = SCENARIO | {"name": "code", "model": "qwen3-32b", "workload": workload}
    found = []
    for data in (small, large):
        found.append(folder / f"{data['name']}.yaml")
        found[-1].write_text(dump_yaml(data), encoding="utf-8")
    return found


def run(*args: object) -> Any:
    return CliRunner().invoke(main, ["plan", *map(str, args)])


def test_several_models_take_what_each_takes_or_one_type_of_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "evidence", lambda *args: Evidence(args[4], 1.0, "", (), ()))  # weighed elsewhere
    monkeypatch.setattr(planning, "limits", lambda *args: ())
    paths, out = scenarios(tmp_path), tmp_path / "plans"
    asked: list[object] = [
        *paths, "--slo", SLO, "--gpus", "h100-sxm,l40s", "--price", "h100-sxm=2.4", "--price", "l40s=1.1", "--tp", "1",
        "--vary", "engine.max_num_seqs=64", "--draws", "0", "--workers", "1", "--out", out,
    ]  # fmt: skip
    done = run(*asked, "--budget", "1/h")
    assert done.exit_code == 0, done.output
    assert "Nothing that was tried meets the requirements of chat, code" in done.output  # each alone is beyond it
    done = run(*asked, "--max-gpus", "5")
    assert done.exit_code == 0, done.output
    told = json.loads((out / "plans.json").read_text(encoding="utf-8"))
    answers = {name: plan["answer"] for name, plan in told["plans"].items()}
    assert told["gpus"] == sum(answer["gpus"] for answer in answers.values())
    assert told["dollars_per_hour"] == pytest.approx(sum(answer["dollars_per_hour"] for answer in answers.values()))
    assert all((out / name / "report.html").exists() for name in answers)
    one = told["one_type"]
    assert one["dollars_per_hour"] >= told["dollars_per_hour"] - 1e-9
    for path in paths:  # it serves them all, on fresh seeds
        count, who = one["takes"][path.stem].split(" x ")
        assert who.startswith(one["gpu"])
        candidate = Candidate(one["gpu"], settings=(("engine.max_num_seqs", 64),))
        case = Case(Base.of(path), parse_requirements([SLO]), Rent(PRICES))
        assert verify(case, candidate, int(count), 1_000_003).meets(case.requirements)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--growth", "10%/month"), "of one scenario at a time"),
        (("--day", "1"), "of one scenario at a time"),
        (("--gpus", "h100"), "did you mean 'h100-"),
    ],
)
def test_mistakes_are_said_before_anything_runs(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    done = run(*scenarios(tmp_path), "--slo", SLO, *more)
    assert done.exit_code == 2
    assert said in done.output


def test_two_files_of_one_name_would_share_a_folder(tmp_path: Path) -> None:
    (path, _) = scenarios(tmp_path)
    done = run(path, path, "--slo", SLO)
    assert done.exit_code == 2
    assert "two scenario files of that name" in done.output
