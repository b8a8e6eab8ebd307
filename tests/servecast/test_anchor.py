"""`servecast calibrate anchor`: files "measured" in simulations of known truth give it back, or why they cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from click.testing import CliRunner, Result

from reports.formats import read_measured
from servecast.anchoring.anchor import Anchored, anchor_runs, anchor_steps
from servecast.anchoring.cli import anchor
from servecast.anchoring.points import Point, with_values
from servecast.anchoring.text import put_host
from servecast.errors import ServecastError
from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from tests.calibrate.test_anchor import made
from tests.reference import reference
from tests.reports.formats.samples import VLLM_33

SCENARIO = """# my deployment
model: llama-3.1-8b
engine: {preset: vllm-0.19, async_scheduling: false, max_num_batched_tokens: 2048, max_num_seqs: 256}  # as ours
cluster: {gpu: h100-sxm}
workload:
  num_requests: 240
  arrivals: {kind: poisson, rate: 8}
  lengths:
    prompt: {kind: lognormal, mean: 512, cv: 1.0}
    output: {kind: lognormal, mean: 64, cv: 0.5}
"""
TRUTH = {"host.request": "11ms", "host.step": "1.6ms", "host.kernels": 1.08}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@cache
def _measured(text: str, overrides: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """What a run of this scenario gives: its summary and its requests."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "s.yaml")
        path.write_text(text, encoding="utf-8")
        result = simulate(load_scenario(path, json.loads(overrides)))
    return result.summary(), result.requests


def bench(path: Path, truth: Mapping[str, object] = TRUTH, load: Mapping[str, object] = {}, **changes: Any) -> Path:
    """`vllm bench serve --save-detailed` of the scenario with other values; `load` are more overrides."""
    summary, table = _measured(SCENARIO, json.dumps({**truth, **load}))
    gaps = zip(table["tpot_s"].fill_null(0), table["output_tokens"], strict=True)
    run: dict[str, Any] = {key: summary[key] for key in VLLM_33 if key in summary and "itl" not in key}
    run |= {
        "num_prompts": len(table),
        "request_rate": 8.0,
        "max_concurrency": None,
        "failed": 0,
        "model_id": "llama-3.1-8b",
    }
    run |= {"input_lens": table["prompt_tokens"].to_list(), "output_lens": table["output_tokens"].to_list()}
    run |= {"ttfts": table["ttft_s"].to_list(), "itls": [[gap] * (n - 1) for gap, n in gaps]}
    run |= {"start_times": (table["arrival_s"] + 7e3).to_list(), "errors": [""] * len(table)}
    path.write_text(json.dumps({key: value for key, value in (run | changes).items() if value != "left out"}))
    return path


def clients(count: int) -> dict[str, Any]:
    """Overrides: so many clients who wait for their answers."""
    return {"workload.closed_loop": {"concurrency": count}, "workload.arrivals": None}


def table(path: Path, *loads: dict[str, Any], truth: Mapping[str, object] = TRUTH) -> Path:
    """A table of aggregates, a row a load: TPOT, and other figures that are named."""
    rows = []
    for load in loads:
        summary, _ = _measured(SCENARIO, json.dumps({**truth, **load.get("set", {})}))
        row = {"completed": summary["completed"], "mean_tpot_ms": summary["mean_tpot_ms"], "model": "llama-3.1-8b"}
        rows.append(row | {key: summary[key] for key in load.get("figures", ())} | load.get("says", {}))
    pl.DataFrame(rows).write_csv(path)
    return path


def anchored(scenario: Path, *files: Path) -> Anchored:
    return anchor_runs(scenario, {file.name: read_measured(file) for file in files})


def values(found: Anchored) -> dict[str, float]:
    return {each.scalar.name: each.value for each in found.anchor.estimates if each.told}


def call(*args: object) -> Result:
    return CliRunner().invoke(anchor, [str(arg) for arg in args])


def refusal(*args: object) -> str:
    out = call(*args)
    assert isinstance(out.exception, ServecastError), out.output
    return "\n".join(out.exception.problems)


def test_one_detailed_run_is_fitted_by_its_first_half_and_checked_by_its_second(scenario: Path) -> None:
    found = anchored(scenario, bench(scenario.with_name("run.json")))
    request = found.anchor.estimates[0]
    assert request.low < 11e-3 < request.high
    assert (found.unseen, found.better, found.checked[:15]) == (True, True, "the second half")
    assert [error.what for error in found.errors] == ["ttft_ms", "tpot_ms", "e2el_ms"]
    for error in found.errors:
        assert all(off is not None and off < -0.08 for off in error.before)
        assert all(off is not None and abs(off) < 0.05 for off in error.after)


def test_the_second_half_moves_its_errors_and_nothing_else(scenario: Path) -> None:
    whole = bench(scenario.with_name("run.json"))
    run = json.loads(whole.read_text())
    later = scenario.with_name("later.json")
    run["ttfts"] = [t * (1 if i < 120 else 2) for i, t in enumerate(run["ttfts"])]
    later.write_text(json.dumps(run))
    one, two = anchored(scenario, whole), anchored(scenario, later)
    assert values(one) == values(two)
    assert one.errors[0].after[0] > 1.5 * two.errors[0].after[0] + 0.4  # type: ignore[operator]


def test_slow_and_busy_runs_together_tell_host_from_kernels(scenario: Path) -> None:
    files = [
        bench(scenario.with_name(f"{n}.json"), load=clients(n), request_rate="inf", max_concurrency=n) for n in (1, 48)
    ]
    found = anchored(scenario, *files)
    told = {each.scalar.name: each for each in found.anchor.estimates if each.told}
    assert told.keys() >= {"request", "step", "kernels"}
    for name, true in (("request", 11e-3), ("step", 1.6e-3), ("kernels", 1.08)):
        assert told[name].value == pytest.approx(true, rel=0.15)
        assert told[name].low < true < told[name].high
    assert found.checked == "each of the 2 runs, predicted by a fit without it"
    assert all(abs(off or 0) < 0.07 for error in found.errors if error.what == "tpot_ms" for off in error.after)
    assert any("by 48 clients who wait" in note for note in found.notes)


def test_an_asynchronous_engine_hides_its_host_and_one_run_tells_the_kernels(scenario: Path) -> None:
    scenario.write_text(SCENARIO.replace("false", "true"), encoding="utf-8")
    truth = {"engine.async_scheduling": True, "host.request": "11ms", "host.kernels": 1.08}
    found = anchored(scenario, bench(scenario.with_name("run.json"), truth, start_times="left out"))
    assert values(found) == pytest.approx({"request": 11e-3, "kernels": 1.08}, rel=0.08)
    assert found.host.keys() == {"request", "kernels"}
    assert {each.scalar.name: each.value for each in found.anchor.estimates if not each.told} == {
        "step": 2e-3, "per_sequence": 10e-6, "bubble": 0.4e-3,
    }  # fmt: skip


def test_one_number_cannot_tell_host_from_kernels_and_says_what_would(scenario: Path) -> None:
    file = table(scenario.with_name("t.csv"), {})
    said = refusal(scenario, "--measured", file)
    for part in (
        "cannot tell host times from kernels",
        "step: cannot be told from kernels",
        "low concurrency",
        "saturation",
    ):
        assert part in said


def test_one_aggregate_holds_nothing_out(scenario: Path) -> None:
    file = table(scenario.with_name("t.csv"), {"figures": ["mean_ttft_ms"], "says": {"rate": 8}})
    out = call(scenario, "--measured", file)
    assert out.exit_code == 0, out.output
    assert "Nothing was held out" in out.output
    assert "kernels also holds what step may be off" in " ".join(out.output.split())
    assert max(map(len, out.output.splitlines())) <= 80
    assert "nan" not in out.output.lower().split()


def test_rates_and_clients_of_the_file_replace_the_scenarios(scenario: Path) -> None:
    loads = [
        {"set": {"workload.arrivals.rate": 2}, "says": {"rate": 2.0, "max_concurrency": None}},
        {"set": clients(24), "says": {"rate": None, "max_concurrency": 24}},
    ]
    file = table(
        scenario.with_name("t.csv"), *({**load, "figures": ["mean_ttft_ms", "mean_e2el_ms"]} for load in loads)
    )
    out = call(scenario, "--measured", file)
    assert out.exit_code == 0, out.output
    assert "t.csv run 1" in out.output
    assert "each of the 2 runs" in out.output
    one = call(scenario, "--measured", file, "--run", 1)
    assert "Nothing was held out" in one.output


def test_requests_unlike_the_scenarios_are_refused(scenario: Path) -> None:
    file = table(
        scenario.with_name("t.csv"), {"says": {"total_input_tokens": 240 * 2000, "total_output_tokens": 240 * 64}}
    )
    assert "its prompts have 2,000 tokens on average" in refusal(scenario, "--measured", file)


def test_requests_that_the_engine_would_refuse_are_said(scenario: Path) -> None:
    file = bench(scenario.with_name("run.json"))
    scenario.write_text(SCENARIO.replace("vllm-0.19,", "vllm-0.19, max_model_len: 600,"), encoding="utf-8")
    assert "the scenario's engine refuses" in refusal(scenario, "--measured", file)


def test_a_time_that_is_set_to_nothing_stays_so(scenario: Path) -> None:
    scenario.write_text(f"{SCENARIO}host: {{request: 0s}}\n", encoding="utf-8")
    found = anchored(scenario, bench(scenario.with_name("run.json"), {**TRUTH, "host.request": "0s"}))
    assert "request" not in {each.scalar.name for each in found.anchor.estimates}
    assert found.errors[0].after[0] == pytest.approx(0, abs=0.05)


def test_what_the_scenario_says_already_is_where_it_starts(scenario: Path) -> None:
    scenario.write_text(SCENARIO + yaml.safe_dump({"host": {"kernels": 1.08, "step": "1.6ms"}}), encoding="utf-8")
    out = call(scenario, "--measured", bench(scenario.with_name("run.json")))
    assert "scenario's" in out.output
    assert " 1.080 " in out.output
    setup = set_up(load_scenario(scenario))
    again = with_values(setup, {"kernels": 1.08, "step": 1.6e-3, "request": 6e-3, "per_sequence": 8e-6, "bubble": 4e-4})
    assert again.pool.cost.step_s([(300, 0)], 7, 900) == pytest.approx(setup.pool.cost.step_s([(300, 0)], 7, 900))


def test_the_copy_has_the_block_and_every_comment_and_runs(scenario: Path) -> None:
    out = scenario.with_name("out.yaml")
    printed = call(scenario, "--measured", bench(scenario.with_name("run.json")), "--out", out).output
    copy = out.read_text(encoding="utf-8")
    assert copy.startswith(SCENARIO)
    assert copy.removeprefix(SCENARIO) in printed
    assert load_scenario(out).host.request is not None
    assert "exists already" in refusal(scenario, "--measured", scenario.with_name("run.json"), "--out", out)


def test_a_copy_that_would_not_run_is_not_kept(scenario: Path) -> None:
    prefix = "workload: {trace: t.csv}\n"
    pl.DataFrame({"arrival_s": [0.0, 1.0], "input_tokens": [9, 9], "output_tokens": [9, 9]}).write_csv(
        scenario.with_name("t.csv")
    )
    scenario.write_text(SCENARIO.partition("workload:")[0] + prefix, encoding="utf-8")
    (there := scenario.parent / "there").mkdir()
    said = refusal(scenario, "--measured", bench(scenario.with_name("run.json")), "--out", there / "out.yaml")
    assert "was not kept" in said
    assert "t.csv" in said
    assert not list(there.iterdir())


NEW = {"request": "3ms", "kernels": 1.1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1 # one\nb:\n  c: 2 # two", "a: 1 # one\nb:\n  c: 2 # two\nhost:\n  request: 3ms\n  kernels: 1.1\n"),
        ("a: 1\r\n", "a: 1\r\nhost:\r\n  request: 3ms\r\n  kernels: 1.1\r\n"),
        ("host: {step: 2ms} # ours\na: 1\n", "host: {step: 2ms, request: 3ms, kernels: 1.1} # ours\na: 1\n"),
        ("host: # ours\n  # old\n  request: 9ms # was\n  step: 2ms\na: 1\n",
         "host: # ours\n  # old\n  request: 3ms # was\n  step: 2ms\n  kernels: 1.1\na: 1\n"),
        ("host:\na: 1\n", "host: {request: 3ms, kernels: 1.1}\na: 1\n"),
        ("{a: 1, b: {c: 2}}\n", "{a: 1, b: {c: 2}, host: {request: 3ms, kernels: 1.1}}\n"),
    ],
)  # fmt: skip
def test_the_block_is_put_into_any_shape_of_file(text: str, expected: str) -> None:
    made = put_host(text, NEW)
    assert made == expected
    before, after = yaml.safe_load(text), yaml.safe_load(made)
    assert after.pop("host") == {**(before.pop("host", None) or {}), **NEW}
    assert before == after


def test_an_aliased_part_is_left_alone() -> None:
    with pytest.raises(ServecastError, match="alias"):
        put_host("a: &x {step: 2ms}\nhost: *x\n", NEW)


def test_all_mistakes_are_said_at_once(scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(SCENARIO.replace("h100-sxm", "h1000"), encoding="utf-8")
    file = tmp_path / "none.json"
    said = refusal(
        scenario,
        "--measured",
        file,
        "--measured",
        file,
        "--steps",
        tmp_path / "no.jsonl",
        "--run",
        1,
        "--out",
        scenario,
    )
    for part in (
        "one of them",
        "--run",
        "given twice",
        "exists already",
        "h1000",
        "none.json: no such file",
        "no.jsonl",
    ):
        assert part in said
    assert "one of them" in refusal(scenario)
    assert "there is no folder" in refusal(scenario, "--out", tmp_path / "no" / "s.yaml")


def test_a_file_without_latencies_is_refused(scenario: Path) -> None:
    file = scenario.with_name("t.csv")
    pl.DataFrame({"model": ["llama-3.1-8b"], "completed": [99], "output_throughput": [5.0]}).write_csv(file)
    run = read_measured(file)
    with pytest.raises(ServecastError, match="nothing can be fitted"):
        anchor_runs(scenario, {"t.csv": run})


def test_a_handful_of_requests_is_refused(scenario: Path) -> None:
    (file := scenario.with_name("run.json")).write_text(json.dumps(VLLM_33))
    assert "run.json: only 3 requests; measure 20 or more" in refusal(scenario, "--measured", file)


def test_steps_tell_the_host_and_the_second_half_is_held_out(scenario: Path) -> None:
    setup = set_up(load_scenario(scenario))
    truth = {"step": 1.6e-3, "per_sequence": 20e-6, "bubble": 0.4e-3, "request": 6e-3, "kernels": 1.1}
    found = anchor_steps(scenario, made(with_values(setup, truth).pool.cost, count=600))
    assert values(found) == pytest.approx({name: truth[name] for name in ("step", "per_sequence", "kernels")}, rel=0.15)
    whole = found.errors[-1]
    assert (whole.of, whole.what, found.unseen, found.notes) == ("all steps", "300", True, ())
    assert whole.before[0] is not None
    assert whole.after[0] is not None
    assert whole.before[0] > 0.1 > 0.03 > whole.after[0]
    assert {error.of for error in found.errors} == {"decode steps", "prefill steps", "mixed steps", "all steps"}


def test_what_the_observer_wrote_is_read_and_kinds_of_steps_are_shown(scenario: Path) -> None:
    setup = set_up(load_scenario(scenario))
    truth = {"step": 2e-3, "per_sequence": 8e-6, "bubble": 0.4e-3, "request": 6e-3, "kernels": 1.0}
    run = made(with_values(setup, truth).pool.cost)
    lines: list[Any] = [{"servecast_steps": 1, "vllm": "0.10.2"}, ["q", 0, 0, 0.0, 9, 9, 0.0, 0, ""]]
    for n, s in enumerate(run.steps.iter_rows(named=True)):
        chunks = [[0, q, kv] for q, kv in zip(s["chunk_tokens"], s["chunk_cached"], strict=True)]
        times = [round(s[name], 6) for name in ("begin_s", "begin_s", "end_s", "end_s")]
        lines.append(["s", n, n, *times, chunks, s["decodes"], s["kv_tokens"], 0, 0, 0, [], 0, 0])
    file = scenario.with_name("steps.jsonl")
    file.write_text("\n".join(map(json.dumps, [*lines, ["e", 1e6, "exit"]])), encoding="utf-8")
    out = call(scenario, "--steps", file)
    assert out.exit_code == 0, out.output
    said = " ".join(out.output.split())
    for part in (
        "the second half of the steps",
        "median before",
        "decode steps",
        "mixed steps",
        "the engine is vLLM 0.10.2",
    ):
        assert part in said
    assert 1.8 < float(yaml.safe_load(out.output[out.output.index("host:") :])["host"]["step"].removesuffix("ms")) < 2.2


def test_too_few_steps_are_refused(scenario: Path) -> None:
    with pytest.raises(ServecastError, match="only 10 steps"):
        anchor_steps(scenario, made(set_up(load_scenario(scenario)).pool.cost, count=10))


def test_times_for_what_is_not_modelled_are_not_counted_twice(scenario: Path) -> None:
    with scenario.open("a", encoding="utf-8") as file:
        file.write("\nhost: {extras: {LoRA: {step: 1ms}}}\n")
    with pytest.raises(ServecastError, match=r"host\.extras: the measurements hold these times already"):
        anchor_steps(scenario, made(set_up(load_scenario(scenario)).pool.cost, count=600))


def test_a_point_knows_which_of_its_requests_are_fitted(scenario: Path) -> None:
    from servecast.anchoring.points import point_replay

    run, replay = point_replay(scenario, read_measured(bench(scenario.with_name("run.json"))))
    point = Point("run", run, replay, lambda: None)
    assert point.halve()
    seen = sorted(i for part in point.fit for i in part.at)  # type: ignore[union-attr]
    assert seen == list(range(120))
    assert list(point.check.at) == list(range(120, 240))  # type: ignore[arg-type]


def test_vllm_on_a_cpu_recorded_its_steps() -> None:
    """vLLM 0.32 in fp32 on two cores, priced with our profile of another machine's bf16: far off before, within the
    spread of its repeats after."""
    steps = reference("reference", "vllm_cpu", "ref", "steps_poisson2_r1.csv")
    scenario = reference("reference", "vllm_cpu", "model_config.json")
    from tempfile import TemporaryDirectory

    from calibrate.observe.read import read_steps
    from calibrate.profile import FOLDER

    data = {
        "model": str(scenario),
        "engine": {"preset": "vllm-0.32", "max_num_seqs": 32, "max_num_batched_tokens": 1024, "block_size": 32,
                   "async_scheduling": False, "enforce_eager": True, "dtype": "bfloat16",
                   "num_gpu_blocks_override": 5461},
        "cluster": {"gpu": "cpu", "profile": str(FOLDER / "cpu.json")},
        "workload": {"num_requests": 1, "arrivals": {"kind": "poisson", "rate": 1},
                     "lengths": {"prompt": {"kind": "fixed", "tokens": 9}, "output": {"kind": "fixed", "tokens": 9}}},
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        (path := Path(folder, "cpu.yaml")).write_text(yaml.safe_dump(data), encoding="utf-8")
        found = anchor_steps(path, read_steps(steps))
    whole = found.errors[-1]
    assert whole.before[0] is not None
    assert whole.after[0] is not None
    assert whole.before[0] > 0.3
    assert whole.after[0] < 0.12
    assert 8e-3 < values(found)["step"] < 16e-3


def test_llama_8b_on_rtx_pro_6000_is_anchored_by_its_first_half(tmp_path: Path) -> None:
    """LLMServingSim's record of vLLM 0.19 (300 requests, overloaded): errors of the second half, which was not seen."""
    file = reference("reference", "llmservingsim", "serving_runs", "rtxpro6000_llama-3.1-8b_tp1", "requests.jsonl")
    data = yaml.safe_load(SCENARIO) | {
        "engine": {"preset": "vllm-0.19", "max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "cluster": {"gpu": "rtx-pro-6000"},
    }
    (path := tmp_path / "rtx.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    found = anchored(path, file)
    assert values(found) == pytest.approx({"kernels": 1.039}, abs=0.01)
    off = {error.what: (error.before[0], error.after[0]) for error in found.errors}
    assert off["ttft_ms"] == pytest.approx((-0.084, 0.0), abs=0.015)
    assert off["tpot_ms"] == pytest.approx((-0.039, -0.004), abs=0.01)
    assert off["e2el_ms"] == pytest.approx((-0.057, -0.003), abs=0.01)
