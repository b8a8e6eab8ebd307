"""From a scenario to a saved result."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import servecast
from servecast.errors import ServecastError
from servecast.run import Result, simulate
from servecast.scenario import load_scenario
from servecast.yamlfile import dump_yaml
from sim.steplog import REQUEST_COLUMNS, STEP_COLUMNS
from tests.servecast.helpers import QUICKSTART, fixed, setup_of, small

FILES = ["manifest.json", "report.html", "requests.parquet", "steps.parquet", "summary.json"]


def read_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {path.name}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def check(result: Result) -> dict[str, Any]:
    """The summary, after what must hold of every result."""
    s = result.summary()
    json.dumps(s, allow_nan=False)
    json.dumps(result.manifest, allow_nan=False)
    assert s["submitted"] == s["completed"] + s["cancelled"] + s["rejected"] + s["unfinished"]
    assert s["rejected"] == sum(s["rejected_reasons"].values())
    assert result.complete is (s["unfinished"] == 0)
    assert result.requests.height == s["submitted"]
    assert result.steps["output_tokens"].sum() >= s["total_output_tokens"]
    return s


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    result = simulate(small(cluster__replicas=2))
    return result, result.save(tmp_path_factory.mktemp("saved") / "deep" / "folder")


def test_files(saved: tuple[Result, Path]) -> None:
    assert sorted(path.name for path in saved[1].iterdir()) == FILES
    assert all(path.stat().st_size for path in saved[1].iterdir())


def test_summary_has_the_names_that_people_know(saved: tuple[Result, Path]) -> None:
    summary = read_json(saved[1] / "summary.json")
    assert summary == json.loads(json.dumps(saved[0].summary()))
    stats = ("mean", "median", "std", "p50", "p90", "p99")
    distributions = ["ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "queue_ms", "prefill_latency_ms"]
    distributions += ["decode_latency_per_token_ms", "input_tokens_per_request", "output_tokens_per_request"]
    gauges = ("queue_size", "batch_size_current", "kv_cache_memory_used", "gpu_memory_used")
    expected = {f"{stat}_{name}" for name in distributions for stat in stats}
    expected |= {f"{stat}_{name}" for name in gauges for stat in ("mean", "peak")}
    expected |= {
        "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
        "total_token_throughput", "request_goodput", "max_concurrent_requests", "kv_peak_fraction", "preemptions",
        "rejected", "saturated", "gpu_seconds", "submitted", "unfinished", "complete",
    }  # fmt: skip
    assert expected <= set(summary)
    assert all(not isinstance(value, float) or math.isfinite(value) for value in summary.values())


def test_tables_agree_with_the_summary(saved: tuple[Result, Path]) -> None:
    summary = read_json(saved[1] / "summary.json")
    requests = pl.read_parquet(saved[1] / "requests.parquet")
    steps = pl.read_parquet(saved[1] / "steps.parquet")
    assert {"status", "reason", "queue_s", "ttft_s", "tpot_s", "e2e_s"} | set(REQUEST_COLUMNS) - {"outcome"} <= set(
        requests.columns
    )
    assert set(STEP_COLUMNS) <= set(steps.columns)
    assert requests["id"].to_list() == list(range(40))
    assert set(requests["replica"]) == {0, 1}
    assert requests.height == summary["completed"] == summary["submitted"] == 40
    assert requests["prompt_tokens"].sum() == summary["total_input_tokens"]
    assert requests["output_tokens"].sum() == summary["total_output_tokens"] == steps["output_tokens"].sum()
    assert requests["ttft_s"].mean() * 1e3 == pytest.approx(summary["mean_ttft_ms"])  # type: ignore[operator]
    assert requests["tpot_s"].median() * 1e3 == pytest.approx(summary["p50_tpot_ms"])  # type: ignore[operator]
    assert requests["finish_s"].max() == summary["duration"]
    assert steps["steps"].sum() == summary["engine_steps"]
    assert summary["gpu_seconds"] == 2 * summary["duration"]


def test_manifest_says_what_decided_the_numbers(saved: tuple[Result, Path]) -> None:
    manifest = read_json(saved[1] / "manifest.json")
    assert manifest["seed"] == manifest["scenario"]["seed"] == 1
    assert manifest["servecast"]
    assert {"python", "numpy", "simpy", "polars"} <= set(manifest["versions"])
    pool = manifest["pools"][0]
    cost = pool["cost"]
    assert (cost["kind"], cost["gpu"]) == ("profile", "h100-sxm")
    assert re.match(r"kernels off by gemm \d.*\(medians, held out of the fit\)", cost["accuracy"])
    assert "aiconfigurator" in cost["sources"]["gemm"]
    assert 0 < cost["outside"]["elementwise"] < 0.1
    assert pool["engine_options"]["max_num_seqs"] == {"value": 1024, "source": "vLLM v0.19.1 default for 79 GiB"}
    assert manifest["workload"]["requests"] == 40
    assert pool["memory"]["num_gpu_blocks"] > 1
    assert manifest["not_modelled"]
    assert str(Path.home()) not in json.dumps(manifest)


AGENTS = ("workload.mix=agent", "workload.num_sessions=4", "workload.arrivals=null", "workload.lengths=null",
          "workload.num_requests=null")  # fmt: skip


def test_what_prompts_share_is_found() -> None:
    result = simulate(load_scenario(QUICKSTART, AGENTS))
    found, s = result.requests, check(result)
    assert s["total_cached_tokens"] == found["cached_tokens"].sum()
    assert s["prefix_cache_hit_rate"] == pytest.approx(found["cached_tokens"].sum() / found["prompt_tokens"].sum())
    assert 0.8 < s["prefix_cache_hit_rate"] < 1
    assert (found["cached_tokens"] < found["prompt_tokens"]).all()
    assert (found["cached_tokens"] % 16 == 0).all()
    assert not any("prefix caching" in note for note in result.manifest["notes"])
    off = simulate(load_scenario(QUICKSTART, (*AGENTS, "engine.enable_prefix_caching=false")))
    assert (check(off)["prefix_cache_hit_rate"], off.summary()["total_cached_tokens"]) == (None, 0)
    assert off.summary()["mean_ttft_ms"] > s["mean_ttft_ms"]


@pytest.mark.parametrize("preset", ["vllm-0.24", "vllm-0.32"])
def test_what_prompts_share_is_found_beyond_windows(preset: str) -> None:
    """Nearly as much as without the hybrid manager, where all is kept; 0.32 keeps only ends, where sessions go on."""
    windows = (*AGENTS, "model=gpt-oss-20b", f"engine.preset={preset}")
    result = simulate(load_scenario(QUICKSTART, windows))
    everything = simulate(load_scenario(QUICKSTART, (*windows, "engine.disable_hybrid_kv_cache_manager=true")))
    hybrid, whole = (check(r)["prefix_cache_hit_rate"] for r in (result, everything))
    assert whole > 0.8
    assert hybrid == whole if preset == "vllm-0.24" else 0.9 * whole < hybrid < whole
    assert result.manifest["notes"] == everything.manifest["notes"]


def test_a_workload_that_does_not_say_what_prompts_share(saved: tuple[Result, Path]) -> None:
    assert saved[0].summary()["prefix_cache_hit_rate"] == 0
    assert any("nobody knows what prompts share" in note for note in saved[0].manifest["notes"])
    off = simulate(small(engine__enable_prefix_caching=False))
    assert off.manifest["notes"] == []


def test_same_scenario_same_bytes(saved: tuple[Result, Path], tmp_path: Path) -> None:
    again = simulate(small(cluster__replicas=2)).save(tmp_path / "again")
    other = simulate(small(cluster__replicas=2, seed=2)).save(tmp_path / "other")
    for name in set(FILES) - {"report.html"}:
        assert (again / name).read_bytes() == (saved[1] / name).read_bytes(), name
    assert (other / "summary.json").read_bytes() != (saved[1] / "summary.json").read_bytes()


def test_resolved_scenario_gives_the_same_summary(saved: tuple[Result, Path], tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_yaml(saved[0].manifest["scenario"]), encoding="utf-8")
    assert simulate(load_scenario(file)).summary() == saved[0].summary()


def test_python_api(tmp_path: Path) -> None:
    assert servecast.__doc__ is not None
    scenario = servecast.load_scenario(str(QUICKSTART), ["cluster.replicas=2", "workload.num_requests=5"])
    result = servecast.simulate(scenario)
    assert result.summary()["p99_ttft_ms"] > 0
    assert isinstance(result.requests, pl.DataFrame)
    assert isinstance(result.steps, pl.DataFrame)
    assert (result.save(str(tmp_path / "runs")) / "report.html").exists()
    assert {"Result", "Scenario", "ServecastError"} <= set(dir(servecast)) | set(servecast.__all__)
    with pytest.raises(AttributeError, match="simulat"):
        servecast.simulat  # noqa: B018


@pytest.mark.parametrize(
    "workload",
    [
        {"trace": "t.csv"},
        {"trace": "t.csv", "window": ["1s", "3s"], "rate_scale": 2.0, "num_requests": 2},
        {"arrivals": {"kind": "poisson", "rate": 2}, "num_requests": 5, "lengths": fixed(10, 5)},
        {"arrivals": {"kind": "constant", "rate": 2}, "num_requests": 5, "lengths": fixed(10, 1)},
        {"arrivals": {"kind": "all-at-once"}, "num_requests": 5, "lengths": fixed(1, 1)},
        {"arrivals": {"kind": "all-at-once"}, "num_requests": 5, "lengths": {"trace": "t.csv"}},
        {"closed_loop": {"concurrency": 2}, "num_requests": 5, "lengths": fixed(10, 5)},
        {"closed_loop": {"concurrency": 10**15}, "num_requests": 5, "lengths": {"trace": "t.csv", "format": "table"}},
        {"arrivals": {"kind": "poisson", "rate": 1e-6}, "num_requests": 3, "lengths": fixed(10, 5)},
        {"arrivals": {"kind": "poisson", "rate": 1e9}, "num_requests": 30, "lengths": fixed(10, 5)},
        {"arrivals": {"kind": "poisson", "rate": 2}, "num_requests": 1, "lengths": fixed(10, 5)},
        {"trace": "t.csv", "max_tokens": 50},
        {"trace": "t.csv", "max_tokens": "unlimited"},
    ],
    ids=str,
)
def test_every_kind_of_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{i},{100 + i},{10 + i}" for i in range(5))
    Path("t.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    setup = setup_of(QUICKSTART, {"workload": workload})
    result = simulate(setup)
    s = check(result)
    assert s["completed"] == s["submitted"] == workload.get("num_requests", 5)
    assert result.requests["output_tokens"].to_list() == setup.requests.trace.output_tokens.tolist()
    assert result.requests["max_tokens"].to_list() == setup.requests.trace.max_tokens.tolist()
    if "closed_loop" in workload:
        assert s["saturated"] is None
        assert s["max_concurrent_requests"] == min(5, workload["closed_loop"]["concurrency"])
    if workload.get("max_tokens"):
        cap = 50 if workload["max_tokens"] == 50 else 131_072 - 100
        assert result.requests["max_tokens"][0] == cap
        assert set(result.requests["reason"]) == {"stop"}


@pytest.mark.parametrize(
    ("prompt", "output", "reason"),
    [
        (2047, 1, None),
        (2047, 2, "over_max_model_len"),
        (2048, 1, "prompt_too_long"),
        (2049, 1, "prompt_too_long"),
        (2**31 - 1, 1, "prompt_too_long"),
        (1000, 1048, None),
        (1000, 1049, "over_max_model_len"),
    ],
)
def test_requests_at_the_edge_of_max_model_len(prompt: int, output: int, reason: str | None) -> None:
    s = check(simulate(small(engine__max_model_len=2048, workload__lengths=fixed(prompt, output))))
    assert s["rejected_reasons"] == ({reason: 40} if reason else {})


def test_a_request_that_never_fits_the_kv_cache_is_rejected() -> None:
    s = check(simulate(small(engine__num_gpu_blocks_override=9, workload__lengths=fixed(128, 2))))
    assert s["rejected_reasons"] == {"over_kv_cache": 40}


def test_tokens_computed_again_are_counted() -> None:
    """Two requests of which each has two of four blocks. When the older one needs a third, the newer one, a step behind
    it, loses its own with 31 tokens, and 32 are computed when the older one has finished."""
    changes = {
        "engine": {"preset": "vllm-0.10", "num_gpu_blocks_override": 5, "enable_prefix_caching": False},
        "workload": {"num_requests": 2, "arrivals": {"kind": "all-at-once"}, "lengths": fixed(16, 20)},
    }
    s = check(simulate(load_scenario(QUICKSTART, changes)))
    assert s["preemptions"] == 1
    assert s["recomputed_tokens"] == 32
    assert s["recomputed_fraction"] == 32 / (16 + 16 + 32 + 19 + 15 + 3)
    assert simulate(small()).summary()["recomputed_fraction"] == 0


def test_swapping_computes_nothing_again_and_copies_take_time() -> None:
    """Two requests of two blocks each, of five. The older one takes the last; the newer one's two go to the host."""
    engine = {"preset": "vllm-0.6", "max_model_len": 64, "num_gpu_blocks_override": 5, "preemption_mode": "swap"}
    changes = {
        "engine": engine,
        "workload": {"num_requests": 2, "arrivals": {"kind": "all-at-once"}, "lengths": fixed(16, 20)},
    }
    result = simulate(load_scenario(QUICKSTART, changes))
    s = check(result)
    assert (s["preemptions"], s["recomputed_tokens"]) == (1, 0)
    took_s, prefilled = result.steps["first_step_s"], result.steps["prefill_tokens"]
    out, alone, back = took_s[4], took_s[5], took_s[6]
    assert prefilled.to_list()[2:] == [0] * 6
    assert out - alone == pytest.approx(2 * (64 * 5e-6 + 2**21 / 55.6e9), rel=1e-3)
    assert back - alone == pytest.approx(out - alone, rel=1e-3)
    assert any("2,048 blocks a GPU, 0.36 ms to copy one, there or back" in note for note in result.manifest["notes"])
    with pytest.raises(ServecastError, match="needs 3 blocks there, of which 1 of 1 are free"):
        simulate(load_scenario(QUICKSTART, changes | {"engine": engine | {"swap_space": 0.002}}))


def test_a_time_of_your_own_is_added_to_every_step() -> None:
    plain, more = (simulate(small(**({"host__bubble": bubble} if bubble else {}))) for bubble in (None, "1.4ms"))
    longer = more.steps["first_step_s"][0] - plain.steps["first_step_s"][0]
    assert abs(longer - 1e-3) < 1e-9  # the preset's is 0.4 ms
    assert "host times of your own, in place of the preset's: bubble 0.0014s" in more.manifest["notes"]
    assert not any("host" in note for note in plain.manifest["notes"])
    engine = {"preset": "vllm-0.6", "max_model_len": 4096}
    host = {"step": "1.8ms", "kernels": 1.1, "bubble": "1ms"}
    notes = simulate(load_scenario(QUICKSTART, {"engine": engine, "host": host})).manifest["notes"]
    assert "host times of your own, in place of the preset's: step 0.0018s, bubble 0.001s, kernels 1.1" in notes
    assert any(note.startswith("host.bubble has no influence") for note in notes)


def test_what_is_not_modelled_takes_the_time_that_the_user_gives() -> None:
    """On top of every step, waited for or overlapped, and of every request; each is a note of the result."""
    extras = {"LoRA adapters": {"step": "1ms"}, "vision": {"step": "0.5ms", "request": "40ms"}}
    for preset in ("vllm-0.19", "vllm-0.6"):
        options: dict[str, object] = {"engine": {"preset": preset, "max_model_len": 4096}}
        plain = simulate(load_scenario(QUICKSTART, options))
        more = simulate(load_scenario(QUICKSTART, options | {"host": {"extras": extras}}))
        longer = more.steps["first_step_s"][0] - plain.steps["first_step_s"][0]
        assert longer == pytest.approx(1.5e-3, abs=1e-9)
        later = more.requests["ttft_s"][0] - plain.requests["ttft_s"][0]
        assert later == pytest.approx(40e-3 + 1.5e-3, abs=1e-6)
        notes = more.manifest["notes"]
        assert "LoRA adapters: 0.001s a step, a time of yours for what is not modelled" in notes
        assert "vision: 0.0005s a step and 0.04s a request, a time of yours for what is not modelled" in notes
        assert not any(note.startswith("host times of your own") for note in notes)


def test_all_rejected_is_a_result(tmp_path: Path) -> None:
    lengths = fixed(5000, 1)
    closed = {"closed_loop": {"concurrency": 3}, "num_requests": 2000, "lengths": lengths}
    for changes in ({"workload__lengths": lengths}, {"workload": closed}):
        result = simulate(load_scenario(QUICKSTART, {k.replace("__", "."): v for k, v in changes.items()}
                                        | {"engine.max_model_len": 2048}))  # fmt: skip
        s = check(result)
        assert (s["completed"], s["rejected"], s["mean_ttft_ms"], s["request_throughput"]) == (0, 2000, None, None)
        result.save(tmp_path / "rejected")


def test_stopped_early_is_partial_and_counted(tmp_path: Path) -> None:
    asked: list[tuple[int, int, float]] = []

    def keep_going(done: int, total: int, now: float) -> bool:
        asked.append((done, total, now))
        return False

    result = simulate(load_scenario(QUICKSTART, {"workload.num_requests": 30_000}), keep_going)
    s = check(result)
    assert not result.complete
    assert len(asked) == 1
    assert s["completed"] == asked[0][0]
    assert asked[0][1] == 30_000
    assert 0 < s["unfinished"] < s["submitted"] < 30_000
    assert "Partial run" in (result.save(tmp_path / "partial") / "report.html").read_text(encoding="utf-8")


def test_keep_going_hears_of_progress_and_changes_nothing() -> None:
    asked: list[int] = []

    def keep_going(done: int, total: int, now: float) -> bool:
        asked.append(done)
        return True

    scenario = load_scenario(QUICKSTART, {"workload.num_requests": 10_000})
    assert simulate(scenario, keep_going).summary() == simulate(scenario).summary()
    assert len(asked) > 1
    assert asked == sorted(asked)


def test_results_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = simulate(small())
    with pytest.raises(ServecastError, match="cannot write the results"):
        result.save(tmp_path / "file")
    (tmp_path / "taken" / "requests.parquet").mkdir(parents=True)
    with pytest.raises(ServecastError, match="cannot write the results"):
        result.save(tmp_path / "taken")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.part").symlink_to("/dev/full")
    with pytest.raises(ServecastError, match="cannot write the results"):
        simulate(small()).save(tmp_path)


def test_stopped_before_anything_finished_still_has_a_summary_and_a_report(tmp_path: Path) -> None:
    scenario = load_scenario(QUICKSTART, {"workload.num_requests": 30_000, "workload.arrivals.rate": 100_000})
    result = simulate(scenario, lambda *_: False)
    s = check(result)
    assert s["completed"] == 0
    assert s["unfinished"] == s["submitted"] == s["max_concurrent_requests"] > 0
    assert s["mean_ttft_ms"] is None
    assert s["peak_queue_size"] > 0
    assert (result.save(tmp_path) / "report.html").stat().st_size > 1000
    statuses = result.requests["status"].to_list()
    assert set(statuses) == {"unfinished"}


def test_an_overloaded_run_that_is_stopped_counts_those_still_in_the_system() -> None:
    scenario = load_scenario(QUICKSTART, {"workload.num_requests": 20_000, "workload.arrivals.rate": 60})
    s = check(simulate(scenario, lambda done, *_: done < 4000))
    assert s["saturated"] is True
    assert s["max_concurrent_requests"] >= s["unfinished"] > 1000
