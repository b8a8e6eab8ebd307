"""A deployment built to have one cause is diagnosed with it; a healthy one is healthy; what is not modelled is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import servecast
from reports.diagnosing import words
from reports.diagnosing.facts import Diagnosed, Symptom, plain
from reports.diagnosing.page import diagnose_html
from reports.formats import read_measured
from servecast.cli import main
from servecast.diagnosing import trial
from servecast.diagnosing.catalogue import CAUSES, look
from servecast.errors import ServecastError
from tests.servecast.helpers import QUICKSTART, fixed

COUNT = 60


def lengths(prompt: int, output: int, cv: float = 0.5) -> dict[str, Any]:
    return {
        "prompt": {"kind": "lognormal", "mean": prompt, "cv": cv},
        "output": {"kind": "lognormal", "mean": output, "cv": cv},
    }


def traffic(rate: float, prompt: int = 512, output: int = 128, count: int = COUNT) -> dict[str, Any]:
    return {
        "num_requests": count,
        "arrivals": {"kind": "poisson", "rate": rate},
        "lengths": lengths(prompt, output),
    }


def two(rate: float, chat: dict[str, Any], other: dict[str, Any], count: int = COUNT) -> dict[str, Any]:
    classes = [{"name": "chat", **chat}, {"name": "other", **other}]
    return {"num_requests": count, "arrivals": {"kind": "poisson", "rate": rate}, "classes": classes}


CHATS = {
    "num_sessions": 15,
    "sessions": {
        "kind": "chat",
        "arrivals": {"kind": "poisson", "rate": 2},
        "turns": {"kind": "fixed", "turns": 5},
        "think": {"kind": "fixed", "time": "2s"},
        "message": {"kind": "fixed", "tokens": 3000},
        "answer": {"kind": "fixed", "tokens": 100},
    },
}

# name of the cause -> what is wrong with the quickstart, what is seen, and the keys that are to be changed
BROKEN: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "capacity": ({"workload": traffic(120, 1024, 256, 160)}, [], ["cluster.replicas"]),
    "places": ({"workload": traffic(6), "engine.max_num_seqs": 4}, [], ["engine.max_num_seqs"]),
    "kv cache": (
        {"workload": traffic(4, 2000, 500), "engine.num_gpu_blocks_override": 1200},
        [],
        ["engine.num_gpu_blocks_override"],
    ),
    "lengths": (
        {"workload": traffic(3, 900, 100), "engine.max_model_len": 1024},
        [],
        ["engine.max_model_len"],
    ),
    "long prompts": (
        {
            "workload": two(3, {"lengths": lengths(300, 200)}, {"lengths": lengths(12000, 100, 0.3)}),
            "engine.max_num_batched_tokens": 16384,
            "slo": {"ttft": "5s"},
        },
        ["p99 tpot = 40ms"],
        ["engine.max_num_batched_tokens"],
    ),
    "chunks": (
        {"workload": traffic(0.5, 8000, 20, 60), "engine.max_num_batched_tokens": 256, "engine.max_num_seqs": 64},
        ["p50 ttft = 0.35s"],
        ["engine.max_num_batched_tokens"],
    ),
    "batch": (
        {
            "workload": {"num_requests": 200, "closed_loop": {"concurrency": 100}, "lengths": lengths(200, 200, 0.3)},
            "slo": {"ttft": "20s", "tpot": "10ms"},
        },
        [],
        ["engine.max_num_seqs"],
    ),
    "prefix cache": (
        {"workload": CHATS, "engine.enable_prefix_caching": False},
        ["mean ttft = 0.2s"],
        ["engine.enable_prefix_caching"],
    ),
    "prefix routing": (
        {"workload": CHATS, "cluster.replicas": 5, "cluster.router": "random"},
        ["mean ttft = 0.2s"],
        ["cluster.router"],
    ),
    "graphs": (
        {"workload": traffic(1), "engine.enforce_eager": True},
        ["mean tpot = 20ms"],
        ["engine.enforce_eager"],
    ),
    "host": (
        {"workload": traffic(2), "engine.async_scheduling": False, "host.step": "4ms"},
        ["mean tpot = 10ms"],
        ["engine.async_scheduling"],
    ),
    "batching": (
        {"engine": {"preset": "transformers", "batch_size": 8, "max_length": 8192}, "workload": traffic(1, 300, 200)},
        ["p99 ttft = 5s"],
        ["engine"],
    ),
    "weights": (
        {"model": "llama-3.3-70b", "cluster.tp": 4, "workload": traffic(0.5, 300, 100)},
        ["mean tpot = 15ms"],
        ["engine.quantization"],
    ),
    "link": (
        {"cluster.gpu": "l40s", "cluster.tp": 4, "workload": traffic(0.5, 4000, 20)},
        ["mean ttft = 1s"],
        ["cluster.tp", "cluster.replicas", "cluster.router"],
    ),
    "front end": (
        {"model": "qwen3-0.6b", "workload": traffic(40, 2000, 4), "host.prompt_token": "10us"},
        ["mean ttft = 100ms"],
        ["host.request", "host.prompt_token"],
    ),
    "class": (
        {
            "cluster.gpu": "l40s",
            "workload": two(
                2, {"lengths": lengths(400, 100), "slo": {"ttft": "2s"}}, {"lengths": lengths(6000, 20)}, 100
            ),
            "slo": None,
        },
        [],
        ["engine.scheduling_policy", "workload.classes.0.priority"],
    ),
    "gateway": ({"workload": traffic(12), "cluster.limits": {"outstanding": 8}}, [], ["cluster.limits"]),
    "traffic": (
        {"workload": {"num_requests": COUNT, "closed_loop": {"concurrency": 4}, "lengths": lengths(500, 100)}},
        ["throughput = 400 tokens/s"],
        ["workload.closed_loop.concurrency"],
    ),
}


def of(overrides: dict[str, Any], symptoms: list[str] | None = None, **more: Any) -> Diagnosed:
    return servecast.diagnose(QUICKSTART, overrides, symptoms=symptoms or [], **{"seeds": 3, "workers": 1, **more})


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_is_ranked_first(name: str) -> None:
    overrides, symptoms, keys = BROKEN[name]
    found = of(overrides, symptoms)
    assert found.verdict == "found"
    top = found.tried[0]
    assert (top.cause, top.likely) == (name, True), [(c.cause, c.score) for c in found.tried]
    assert [text.partition("=")[0] for text in top.sets] == keys
    assert top.gone > 0.2
    assert top.check == look(name, found.engine.lower())


def test_a_cache_that_is_off_finds_nothing() -> None:
    overrides, _, _ = BROKEN["prefix cache"]
    found = of(overrides, ["hit rate = 0 %"], seeds=1)
    assert found.symptoms[0].simulated == 0.0
    assert found.likely[0].cause == "prefix cache"
    assert found.likely[0].effects[0][1] > 0.3  # type: ignore[operator]


def test_what_takes_nothing_away_is_no_cause() -> None:
    """Llama 70B in 16 bit alone on four GPUs: a second replica does nothing for the time between tokens."""
    overrides, symptoms, _ = BROKEN["weights"]
    found = of(overrides | {"workload.arrivals.rate": 2}, symptoms)
    causes = {cause.cause: cause for cause in found.tried}
    assert [cause.cause for cause in found.likely] == ["weights"]
    assert abs(causes["capacity"].gone) < 0.1


def test_causes_that_cannot_be_are_not_run() -> None:
    overrides, symptoms, _ = BROKEN["places"]
    found = of(overrides, symptoms, seeds=1)
    out = {each.cause: each.why for each in found.ruled_out}
    assert {cause.name for cause in CAUSES} == out.keys() | {cause.cause for cause in found.tried}
    assert "KV cache peak" in out["kv cache"]
    assert out["link"] == "a replica is one GPU"
    assert "reserves no memory" in out["lengths"], "max_model_len holds nothing back in a paged engine"


def test_a_setting_comes_before_more_gpus_and_says_what_it_is_on_the_command_line() -> None:
    overrides, symptoms, _ = BROKEN["places"]
    found = of(overrides, symptoms)
    first, second = found.likely[:2]
    assert (first.cause, second.cause) == ("places", "capacity")
    assert (first.price, second.price) == ("", "gpus")
    assert first.flags == ("--max-num-seqs: 8, not 4",)
    assert first.effects[0][1] is not None
    assert first.effects[0][1] < 1.0, "the slo is met"
    assert servecast.simulate(servecast.load_scenario(QUICKSTART, [*_texts(overrides), *first.sets])).summary()[
        "p99_ttft_ms"
    ] == pytest.approx(1e3 * first.effects[0][1]), "what is printed can be run"


def _texts(overrides: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def test_a_change_that_harms_is_ranked_lower_and_says_so() -> None:
    """TPOT is shorter with fewer places, but then clients wait for one: without a limit for TTFT that counts."""
    overrides, _, _ = BROKEN["batch"]
    found = of(overrides | {"slo": None}, ["mean tpot = 12ms"])
    batch = next(cause for cause in found.tried if cause.cause == "batch")
    assert batch.gone > 0.05
    assert "p99 ttft" in [name for name, _, _ in batch.worse]
    assert batch.score < batch.gone


def test_a_healthy_deployment_is_healthy() -> None:
    found = of({"workload.num_requests": 200})
    assert (found.verdict, found.tried, found.symptoms) == ("healthy", (), ())
    assert words.answer(found)[0].startswith("Healthy: 99 % of the requests of the simulated deployment meet")
    assert "No slo says" in words.answer(of({"workload.num_requests": 200, "slo": None}))[1]


def test_the_same_again_and_with_more_workers() -> None:
    overrides, symptoms, _ = BROKEN["lengths"]
    first, again, apart = (plain(of(overrides, symptoms, seeds=2, workers=workers)) for workers in (1, 1, 2))
    assert first == again == apart


def test_what_the_simulation_does_not_show_is_outside_of_it() -> None:
    found = of({"workload.num_requests": 40}, ["p99 ttft = 500s"])
    assert (found.verdict, found.tried, found.like) == ("outside", (), ())
    said = " ".join([*words.answer(found), *found.compare])
    assert "outside of what is simulated" in said
    assert "vllm:time_to_first_token_seconds" in said


def test_a_setting_that_the_scenario_does_not_know_of_is_found_in_a_measured_run(tmp_path: Path) -> None:
    """The server runs with 4 places, the scenario says nothing of it."""
    scenario = servecast.load_scenario(QUICKSTART, {"workload": traffic(6), "engine.max_num_seqs": 4})
    servecast.simulate(scenario).export("vllm", tmp_path)
    run = read_measured(tmp_path / "vllm.json")
    found = of({"workload": traffic(6)}, measured=run)
    assert found.verdict == "outside"
    assert "max_num_seqs 4" in found.like[0]
    found = of({"workload": traffic(6), "engine.max_num_seqs": 4}, measured=run)
    assert found.verdict == "found"
    assert found.likely[0].cause == "places"
    assert found.one_course, "its requests are those of the file"
    assert found.symptoms[0].simulated == pytest.approx(found.symptoms[0].observed, rel=0.01)


def test_a_symptom_may_take_its_number_from_the_file(tmp_path: Path) -> None:
    servecast.simulate(servecast.load_scenario(QUICKSTART, ["workload.num_requests=60"])).export("vllm", tmp_path)
    run = read_measured(tmp_path / "vllm.json")
    (symptom,) = of({"workload.num_requests": 60}, ["p99 ttft"], measured=run, seeds=1).symptoms
    assert symptom.observed == pytest.approx(run.summary["p99_ttft_ms"] / 1e3)


def test_the_folder_of_a_result_is_a_scenario(tmp_path: Path) -> None:
    overrides, _, _ = BROKEN["places"]
    servecast.simulate(servecast.load_scenario(QUICKSTART, overrides)).save(tmp_path / "run")
    found = servecast.diagnose(tmp_path / "run", seeds=1, workers=1)
    assert found.likely[0].sets == of(overrides, seeds=1).likely[0].sets
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace(f'"{found.version}"', '"0.0.1"'), encoding="utf-8")
    with pytest.raises(ServecastError, match=r"of servecast 0\.0\.1"):
        servecast.diagnose(tmp_path / "run")
    (tmp_path / "run" / "steps.parquet").unlink()
    with pytest.raises(ServecastError, match=r"no steps\.parquet"):
        servecast.diagnose(tmp_path / "run")


def test_a_long_workload_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST", 50)
    overrides, symptoms, _ = BROKEN["gateway"]
    found = of(overrides, symptoms, seeds=1)
    assert (found.requests, found.of) == (50, COUNT)
    assert f"the first 50 of {COUNT}" in words.tried(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("p99 tftt = 4s", "did you mean 'ttft'"),
        ("ttft = 4s", "which figure is meant is missing"),
        ("p100 ttft = 4s", "'p100' is not a figure"),
        ("p99 ttft = 4", "not a duration"),
        ("p99 ttft < 4s", "a symptom is what is seen"),
        ("chat: p99 ttft = 1s", "no class 'chat'"),
        ("throughput = 4", "not a rate"),
        ("throughput = 0 tokens/s", "not a rate"),
        ("gpu idle = 140 %", "not a share"),
        ("hit rate = nan", "not a share"),
        ("chat: gpu idle = 4 %", "of the whole run only"),
        ("", "not a symptom"),
    ],
)
def test_symptoms_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(ServecastError) as error:
        of({"workload.num_requests": 20}, ["p99 ttft = 1s", text, text])
    assert len(error.value.problems) == 2, "all mistakes at once"
    assert problem in error.value.problems[0]


@pytest.mark.parametrize(
    ("overrides", "more", "problem"),
    [
        ({"workload.num_requests": 1}, {}, "one request"),
        ({"workload.num_requests": 20}, {"seeds": 0}, "--seeds"),
        ({"workload.num_requests": 20, "engine.max_num_seqs": 0}, {}, "max_num_seqs"),
    ],
)
def test_bad_input(overrides: dict[str, Any], more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ServecastError, match=problem):
        of(overrides, **more)


@pytest.mark.parametrize(
    ("symptom", "before", "after", "gone"),
    [
        (Symptom("ttft", 99.0), 4.0, 1.0, 0.75),
        (Symptom("ttft", 99.0, limit=1.0), 4.0, 0.5, 1.0),
        (Symptom("ttft", 99.0, limit=1.0), 4.0, 2.5, 0.5),
        (Symptom("ttft", 99.0, limit=1.0), 0.5, 2.0, None),
        (Symptom("ttft", 99.0), 1.0, 50.0, -1.0),
        (Symptom("ttft", 99.0), 1.0, None, -1.0),
        (Symptom("throughput"), 500.0, 1000.0, 0.5),
        (Symptom("goodput"), 0.6, 0.8, 0.5),
        (Symptom("hit rate"), 0.0, 0.7, 0.7),
        (Symptom("gpu idle"), 0.4, 0.1, 0.75),
    ],
)
def test_how_much_of_a_symptom_goes(symptom: Symptom, before: float, after: float | None, gone: float | None) -> None:
    assert symptom.gone(before, after) == (None if gone is None else pytest.approx(gone))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_every_cause_can_be_looked_up(engine: str) -> None:
    assert all(look(cause.name, engine) for cause in CAUSES)
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize("preset", ["sglang-0.5", "tensorrt-llm-1", "llama.cpp", "vllm-0.6"])
def test_other_engines_are_told_by_their_own_names(preset: str) -> None:
    option = {"sglang-0.5": "max_running_requests", "tensorrt-llm-1": "max_batch_size", "llama.cpp": "parallel"}
    name = option.get(preset, "max_num_seqs")
    found = of({"engine": {"preset": preset, name: 4}, "workload": traffic(6)}, ["p99 ttft"], seeds=1)
    assert found.likely[0].cause == "places"
    assert found.likely[0].sets[0].startswith(f"engine.{name}=")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, _, _ = BROKEN["places"]
    sets = [word for text in _texts(overrides) for word in ("--set", text)]
    line = ["diagnose", str(QUICKSTART), *sets, "--seeds", "1", "--workers", "1"]
    shown = CliRunner().invoke(main, line, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "Most likely: batch limit too small" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    page = (tmp_path / "runs" / "quickstart-diagnosis" / "report.html").read_text(encoding="utf-8")
    assert page.index("Most likely") < page.index("What is wrong") < page.index("Ruled out")
    printed = CliRunner().invoke(main, [*line, "--json"])
    facts = json.loads(printed.stdout)
    assert facts["tried"][0]["cause"] == "places"
    assert facts == json.loads((tmp_path / "runs/quickstart-diagnosis/diagnosis.json").read_text(encoding="utf-8"))
    wrong = CliRunner().invoke(main, [*line, "--format", "vllm"])
    assert (wrong.exit_code, "give --measured FILE too" in wrong.stderr) == (2, True)


def test_the_page_escapes_what_users_write() -> None:
    name = "<script>alert(1)</script>"
    found = of(
        {"name": name, "workload": {**traffic(6), "lengths": fixed(500, 100)}, "engine.max_num_seqs": 4}, seeds=1
    )
    assert name not in diagnose_html(found)
    assert "&lt;script&gt;alert(1)" in diagnose_html(found)
