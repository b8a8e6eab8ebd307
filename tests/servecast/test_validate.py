"""Forecast against measurement: our own runs come back without error, wrong settings are found, mistakes are said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from click.testing import CliRunner, Result

from reports.formats import read_measured
from reports.validation.compared import Validation
from servecast import load_scenario, simulate
from servecast.cli import main
from servecast.validation import causes as validate_causes
from servecast.validation.validate import validate
from tests.reference import reference
from tests.reports.formats.samples import VLLM_8, VLLM_33

SCENARIO: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "engine": {"preset": "vllm-0.10", "max_num_seqs": 64},
    "cluster": {"gpu": "h100-sxm"},
    "workload": {
        "num_requests": 150,
        "arrivals": {"kind": "poisson", "rate": 8},
        "lengths": {
            "prompt": {"kind": "lognormal", "mean": 600, "cv": 1.0},
            "output": {"kind": "lognormal", "mean": 150, "cv": 1.0},
        },
    },
}
BUSY = {"workload.arrivals.rate": 30}
TIGHT = BUSY | {"engine.num_gpu_blocks_override": 1500}
CLOSED = {"workload.arrivals": None, "workload.closed_loop": {"concurrency": 4}}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(SCENARIO), encoding="utf-8")


def record(truth: Mapping[str, object] = {}, late_s: float = 0.0, **scenario: Any) -> Path:
    """What a client would have written of the scenario under the settings `truth`, `late_s` late, in a random order."""
    rows = simulate(load_scenario("s.yaml", {**scenario, **truth})).requests.sample(fraction=1, shuffle=True, seed=1)
    lines = [
        {
            "input_toks": row["prompt_tokens"], "output_toks": row["output_tokens"], "arrival_time": row["arrival_s"],
            "queued_ts": row["arrival_s"], "first_token_ts": row["first_token_s"] + late_s,
            "last_token_ts": row["finish_s"] + late_s,
        }
        for row in rows.iter_rows(named=True)
    ]  # fmt: skip
    return write("measured.jsonl", *lines)


def write(name: str, *objects: Mapping[str, Any]) -> Path:
    Path(name).write_text("\n".join(map(json.dumps, objects)), encoding="utf-8")
    return Path(name)


def found(file: Path, **overrides: Any) -> Validation:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return validate(load_scenario("s.yaml", changes), read_measured(file))


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, args)])


def test_our_own_run_has_no_error() -> None:
    v = found(record())
    assert v.matched is not None
    assert len(v.matched) == 150
    assert {"mean_ttft_ms", "p99_tpot_ms", "mean_itl_ms", "p90_e2el_ms", "output_throughput"} <= v.errors.keys()
    # the clock starts at the first send, ours before it
    assert all(abs(error) < 1e-6 for key, error in v.errors.items() if key.endswith("_ms"))
    assert v.mean_error == pytest.approx(0, abs=1e-3)
    for agreement in v.per_request.values():
        assert agreement == pytest.approx({"count": agreement["count"], "mape": 0, "correlation": 1}, abs=1e-6)
    assert v.causes.why_none == "the forecast is close enough"
    assert not v.causes.tried


TRUTHS: dict[str, dict[str, Any]] = {
    "twice the host's time a step": {"host.step": "1.6ms", "host.per_sequence": "16us"},
    "half the host's time a step": {"host.step": "0.4ms", "host.per_sequence": "4us"},
    "20 ms more of the front end a request": {"host.request": "26ms"},
    "no front end (requests handed to the engine itself)": {"host.request": "0s", "host.prompt_token": "0s"},
    "kernels 10 % slower": {"host.kernels": 1.1},
    "kernels 10 % faster": {"host.kernels": 0.9},
    "20 % fewer KV blocks": TIGHT | {"engine.num_gpu_blocks_override": 1200},
    "20 % more KV blocks": TIGHT | {"engine.num_gpu_blocks_override": 1800},
    "a KV cache of dtype fp8": {"engine.kv_cache_dtype": "fp8"},
    "the scheduler and the defaults of vllm-0.15": {"engine.preset": "vllm-0.15"},
    "max_num_seqs 256 instead of 64": BUSY | {"engine.max_num_seqs": 256},
    "max_num_batched_tokens 2,048 instead of 8,192": BUSY | {"engine.max_num_batched_tokens": 2048},
}


@pytest.mark.parametrize("words", TRUTHS)
def test_the_right_cause_comes_first(words: str) -> None:
    truth = TRUTHS[words]
    load = {key: value for key, value in (TIGHT if "KV blocks" in words else BUSY).items() if key in truth}
    file = record(truth)
    v = found(file, **load)
    best = v.causes.likely[0]
    assert best.words == words
    assert best.mean_error < 2e-3 < v.mean_error
    texts = [f"{key}={value}" for key, value in load.items() if not key.startswith("engine")] + list(best.sets)
    again = call("s.yaml", "--measured", file, "--json", *(arg for text in texts for arg in ("--set", text)))
    assert json.loads(again.stdout)["mean_error"] == pytest.approx(best.mean_error, abs=1e-6)


def test_asynchronous_scheduling_and_the_gap_between_steps() -> None:
    v = found(record({"engine.preset": "vllm-0.19", "host.bubble": "0.8ms"}), engine__preset="vllm-0.19")
    assert v.causes.likely[0].words == "twice the gap between steps"
    v = found(record({"engine.preset": "vllm-0.19"}), engine__preset="vllm-0.19", engine__async_scheduling=False)
    assert v.causes.likely[0].words == "asynchronous scheduling on"


def test_options_that_another_version_lacks_are_dropped() -> None:
    v = found(record(), engine__preset="vllm-0.19", engine__scheduler_reserve_full_isl=True)
    (cause,) = [cause for cause in v.causes.tried if "vllm-0.10" in cause.words]
    assert cause.words.endswith("(which has no scheduler_reserve_full_isl)")
    assert cause.sets == ("engine.preset=vllm-0.10", "engine.scheduler_reserve_full_isl=null")
    assert cause.mean_error < 2e-3


def test_a_slow_client() -> None:
    v = found(record(late_s=0.05))
    assert v.causes.likely[0].words == "50 ms of the client's own on every request (TTFT and E2E)"
    assert v.causes.likely[0].sets == ()


def test_nothing_explains_everything() -> None:
    host = {"host.request": "0s", "host.prompt_token": "0s"}
    rows = [json.loads(line) for line in record(host).read_text(encoding="utf-8").splitlines()]
    for row in rows:  # the first token comes in half of the time, the others as forecast
        row["first_token_ts"] = row["arrival_time"] + (row["first_token_ts"] - row["arrival_time"]) / 2
    out = call("s.yaml", "--measured", write("measured.jsonl", *rows), *(f"--set={k}={v}" for k, v in host.items()))
    assert out.exit_code == 0
    assert "Nothing that we vary explains it." in out.stdout
    assert "no proof" not in out.stdout


def test_long_runs_are_explained_by_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_causes, "FIRST", 40)
    monkeypatch.setattr(validate_causes, "COMPANY", 60)
    v = found(record({"host.kernels": 1.1}))
    assert v.causes.over == "the first 40 requests"
    assert v.causes.likely[0].words == "kernels 10 % slower"
    assert v.causes.likely[0].mean_error < 0.02
    assert "mean_ttft_ms" in v.causes.likely[0].errors
    assert "output_throughput" not in v.causes.likely[0].errors


def test_failed_and_incomplete_rows_are_left_out_and_said() -> None:
    rows = [json.loads(line) for line in record().read_text(encoding="utf-8").splitlines()]
    rows[0]["last_token_ts"] = rows[1]["last_token_ts"] = None
    rows[2]["output_toks"] = 0
    v = found(write("measured.jsonl", *rows))
    assert v.replayed == "Replayed: 147 of the file's 150 requests, at the times at which they were sent."
    assert v.matched is not None
    assert len(v.matched) == 147
    said = " ".join(v.warnings)
    assert "2 requests that failed are left out of the replay" in said
    assert "1 request without lengths or time is left out of the replay" in said


def test_waiting_clients_are_recognised() -> None:
    v = found(record(CLOSED, **{"workload.num_requests": 60}))
    (said,) = [warning for warning in v.warnings if "pile up" in warning]
    assert said.startswith("It looks as if 4 clients had waited for their answers; requests are replayed when")
    assert not any("pile up" in warning for warning in found(record()).warnings)


def vllm(**changes: Any) -> dict[str, Any]:
    return VLLM_33 | {"model_id": "meta-llama/Llama-3.1-8B"} | changes


def test_a_hand_written_file() -> None:
    v = found(write("m.json", vllm(max_concurrency=2)))
    assert v.matched is not None
    assert v.matched.select("sent_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s").rows() == [
        (0.0, 100, 4, 0.2, 0.4), (0.5, 50, 1, 0.3, 0.3), (1.0, 200, 3, 0.6, 0.7),
    ]  # fmt: skip
    assert v.per_request["tpot"]["count"] == 2
    assert any(warning.startswith("The client kept at most 2 requests running; ") for warning in v.warnings)
    assert any(warning == "Of 3 requests, p99 is hardly more than the slowest one." for warning in v.warnings)


def test_chunks_of_several_tokens_have_no_itl() -> None:
    v = found(write("m.json", vllm(output_lens=[40, 1, 30], total_output_tokens=71)))
    assert any("its ITL is no time between tokens, and is left out" in warning for warning in v.warnings)
    assert not any(key.endswith("itl_ms") for key in v.measured)


def test_lengths_without_times_take_the_scenarios_times() -> None:
    """vLLM before 0.33 and sglang write no times of sending."""
    file = write("m.json", VLLM_8)
    v = found(file)
    assert v.replayed.startswith("Replayed: the 3 requests of the file, at the scenario's times: ")
    assert v.matched is not None
    assert v.matched["input_tokens"].to_list() == [100, 50, 200]
    v = found(file, **CLOSED)
    assert "by 4 clients who wait for their answers, as the scenario says" in v.replayed
    v = found(file, workload__num_requests=2)
    assert v.matched is None
    assert "since the file does not say when its 3 requests were sent, and the scenario has only 2" in v.replayed


def test_aggregates_are_compared_with_the_scenarios_own_workload() -> None:
    Path("m.csv").write_text(
        "model,mean_ttft_ms,p99_ttft_ms,mean_tpot_ms,request_throughput,output_throughput,completed,"
        "total_input_tokens,total_output_tokens,rate,concurrency\nllama,50,400,20,20,1000,1000,100000,500000,20,32\n",
        encoding="utf-8",
    )
    v = found(Path("m.csv"))
    assert v.replayed == "Simulated: the scenario's own 150 requests, since the file has aggregates only."
    assert v.matched is None
    assert v.per_request == {}
    assert v.errors.keys() == {
        "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "request_throughput", "output_throughput",
    }  # fmt: skip
    assert v.causes.tried
    said = " ".join(v.warnings)
    for part in (
        "at most 32 requests ran at a time; the scenario's do not wait for each other (workload.closed_loop)",
        "a rate of 20.0 requests/s; the scenario sends",
        "1,000 requests were measured, more than the scenario's 150 (workload.num_requests)",
        "longer on average than those measured",
        "he scenario's answers are",
    ):
        assert part in said
    said = " ".join(found(Path("m.csv"), **CLOSED).warnings)
    assert "at most 32 requests ran at a time; the scenario's come from 4 clients" in said
    assert "the scenario's clients send as answers come" in said


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("meta-llama/Llama-3.1-8B", ""),
        ("Meta-Llama-3.1-8B-Instruct", ""),
        ("/models/llama3.1-8b/", ""),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "is quantised (fp8)"),
        ("meta-llama/Llama-3-8B", "The file says that meta-llama/Llama-3-8B was served"),
        ("meta-llama/Llama-3.1-70B", "was served; the scenario's model is"),
        ("tiny", "The file says that tiny was served"),
    ],
)
def test_other_models(name: str, warned: str) -> None:
    said = [warning for warning in found(write("m.json", vllm(model_id=name))).warnings if name in warning]
    assert [warned in warning for warning in said] == ([True] if warned else [])


@pytest.mark.parametrize(
    ("folder", "warned"),
    [
        ("h100", False),
        ("rtx4090_llama", True),
        ("RTX-4090 run", True),
        ("b200-sxm", True),
        ("al4x", False),
        (".", False),
    ],
)
def test_other_gpus(folder: str, warned: bool) -> None:
    Path(folder).mkdir(exist_ok=True)
    v = found(write(f"{folder}/m.json", vllm()))
    assert any("The file's name speaks of" in warning for warning in v.warnings) == warned


def test_requests_that_do_not_fit() -> None:
    file = write("m.json", vllm())
    v = found(file, engine__max_model_len=128, engine__max_num_batched_tokens=128)
    assert any(warning.startswith("Rejected at arrival: 1 of 3 requests") for warning in v.warnings)
    assert v.matched is not None
    assert v.matched["input_tokens"].to_list() == [100, 50]
    assert v.measured["mean_ttft_ms"] == pytest.approx(250)
    out = call("s.yaml", "--measured", file, "--set", "engine.max_model_len=64", "--set", "engine.max_num_seqs=8",
               "--set", "workload.num_requests=3", "--json")  # fmt: skip
    assert out.exit_code == 0  # the second one fits


def test_command_line() -> None:
    out = call("s.yaml", "--measured", record({"host.kernels": 1.1}))
    assert out.exit_code == 0, out.output
    for said in ("s: forecast and measurement", "Off by ", "TTFT", "request by request", "With kernels 10 % slower the",
                 "--set host.kernels=1.1", "no proof", "Report: "):  # fmt: skip
        assert said in out.stdout
    assert sorted(path.name for path in Path("runs/s-validation").iterdir()) == ["report.html", "validation.json"]
    assert "http" not in Path("runs/s-validation/validation.json").read_text(encoding="utf-8")


def test_json_is_pure_and_whole() -> None:
    file = record({"host.kernels": 1.1})
    out = call("s.yaml", "--measured", file, "--json")
    assert not Path("runs").exists()
    tree = json.loads(out.stdout)
    assert tree["requests_compared"] == 150
    assert tree["figures"]["mean_ttft_ms"]["error"] == pytest.approx(
        tree["figures"]["mean_ttft_ms"]["predicted"] / tree["figures"]["mean_ttft_ms"]["measured"] - 1
    )
    assert tree["causes"]["tried"][0]["noticeable"]
    assert None not in list(leaves({key: tree[key] for key in tree if key not in ("scenario", "cost")}))
    out = call("s.yaml", "--measured", file, "--json", "--out", "a/b")
    assert json.loads(out.stdout) == json.loads(Path("a/b/validation.json").read_text(encoding="utf-8"))
    assert "Report: " in out.stderr


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(child)
    else:
        yield tree


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("s.yaml",), "--measured"),
        (("s.yaml", "--measured", "no.json"), "no.json: no such file"),
        (("s.yaml", "--measured", "."), "a folder"),
        (("no.yaml", "--measured", "m.json"), "no.yaml: no such file"),
        (("s.yaml", "--measured", "s.yaml"), "no known result format"),
        (("s.yaml", "--measured", "m.json", "--format", "vlm"), "did you mean 'vllm'?"),
        (("s.yaml", "--measured", "m.json", "--format", "guidellm"), "is missing"),
        (("s.yaml", "--measured", "m.json", "--run", "2"), "there is no run 2; say which, from 1 to 1"),
        (("s.yaml", "--measured", "two.json"), "several runs; say which, from 1 to 2"),
        (("s.yaml", "--measured", "failed.json"), "no request succeeded"),
        (("s.yaml", "--measured", "m.json", "--set", "host.kernls=1"), "host.kernls"),
        (("s.yaml", "--measured", "m.json", "--set", "cluster.tp=3"), "cluster.tp"),
        (("s.yaml", "--measured", "long.json"), "none of its requests can run in the scenario. Rejected at arrival"),
        (("s.yaml", "--measured", "m.json", "--out", "s.yaml"), "s.yaml"),
    ],
)
def test_mistakes_are_said(args: tuple[str, ...], said: str) -> None:
    write("m.json", vllm())
    write("two.json", vllm(), vllm())
    write("failed.json", vllm(errors=["x"] * 3, output_lens=[0] * 3, completed=0, ttfts=[0.0] * 3, failed=3))
    write("long.json", vllm(input_lens=[200_000] * 3, total_input_tokens=600_000, total_token_throughput=352_946.0))
    out = call(*args)
    assert (out.exit_code, out.stdout) == (2, "")
    assert said in out.stderr
    assert "Traceback" not in out.stderr
    assert not Path("runs").exists() or not list(Path("runs").rglob("*.*"))


RUNS = {
    "rtxpro6000_llama-3.1-8b_tp1": ("rtx-pro-6000", {"max_num_seqs": 128, "max_num_batched_tokens": 2048}),
    "rtx4090_llama-3.1-8b_tp1_mns256": (
        "rtx-4090",
        {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 32768, "num_gpu_blocks_override": 2588},
    ),
}


@pytest.mark.parametrize("folder", RUNS)
def test_recorded_runs_of_llmservingsim(folder: str) -> None:
    """LLMServingSim's records of vLLM 0.19.0: 300 requests, overloaded; nothing was fitted to them."""
    gpu, options = RUNS[folder]
    file = reference("reference", "llmservingsim", "serving_runs", folder, "requests.jsonl")
    v = found(file, engine={"preset": "vllm-0.19", **options}, cluster__gpu=gpu)
    theirs = json.loads((file.parent / "measured.json").read_text(encoding="utf-8"))
    assert v.measured["mean_ttft_ms"] == pytest.approx(theirs["from_client_arrival"]["ttft_ms"]["mean"], rel=1e-3)
    assert v.measured["p90_tpot_ms"] == pytest.approx(theirs["tpot_ms"]["p90"], rel=1e-3)
    assert v.matched is not None
    assert len(v.matched) == 300
    assert v.mean_error is not None
    assert v.mean_error < 0.15
    assert all(v.per_request[metric]["correlation"] > 0.7 for metric in ("ttft", "tpot", "e2e"))
    assert len(v.causes.tried) > 15
    work = reference("reference", "llmservingsim", "workloads", "sharegpt-llama-3.1-8b-300-sps10.blocks.jsonl")
    assert v.matched["input_tokens"].to_list() == pl.read_ndjson(work)["input_toks"].to_list()


def test_a_recorded_run_on_a_cpu() -> None:
    """It runs, or says why it cannot."""
    file = reference("reference", "vllm_cpu", "bench_serve", "bench_rate2_rep1.json")
    model = reference("reference", "vllm_cpu", "model_config.json")
    settings = {
        "model": str(model),
        "engine": {"preset": "vllm-0.32", "max_num_seqs": 32, "max_num_batched_tokens": 1024,
                   "num_gpu_blocks_override": 5461, "block_size": 32, "enforce_eager": True},
        "cluster": {"gpu": "cpu"},
    }  # fmt: skip
    Path("s.yaml").write_text(yaml.safe_dump(SCENARIO | settings), encoding="utf-8")
    out = call("s.yaml", "--measured", file)
    assert out.exit_code in (0, 2)
    assert "Traceback" not in out.output
    assert ("Off by" in out.stdout) if out.exit_code == 0 else out.stderr.startswith("Error: ")
