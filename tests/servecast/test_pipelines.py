"""Pipeline stages, from the scenario to the result: how each version of the engine fills them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from servecast.yamlfile import dump_yaml
from tests.servecast.helpers import fixed, problems, setup_of

BASE = {
    "name": "stages",
    "model": "llama-3.1-70b",
    "engine": {"preset": "vllm-0.32", "enable_prefix_caching": False},
    "cluster": {"gpu": "h100-sxm", "pp": 4},
    "workload": {
        "num_requests": 200,
        "arrivals": {"kind": "poisson", "rate": 20},
        "lengths": fixed(1000, 200),
    },
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "stages.yaml"
    path.write_text(dump_yaml(BASE), encoding="utf-8")
    return path


def summary(path: Path, *overrides: str) -> dict[str, object]:
    return simulate(load_scenario(path, overrides)).summary()


def test_how_a_version_fills_its_stages_decides_what_a_pipeline_is_worth(base: Path) -> None:
    """What is in series leaves three of four stages idle, whatever the load."""
    stage = {preset: summary(base, f"engine.preset={preset}") for preset in ("vllm-0.10", "vllm-0.24", "vllm-0.32")}
    serial = summary(base, "engine.preset=vllm-0.19")
    for found in stage.values():
        assert sum(found["stages"]["h100-sxm"]) / 4 > 0.8
        assert found["output_throughput"] > 2 * serial["output_throughput"]
    assert stage["vllm-0.10"]["output_throughput"] == pytest.approx(stage["vllm-0.32"]["output_throughput"], rel=0.05)
    assert "stages" not in serial
    notes = simulate(load_scenario(base, ["engine.preset=vllm-0.19", "workload.num_requests=1"])).manifest["notes"]
    assert any("one batch at a time" in note for note in notes)
    synchronous = summary(base, "engine.preset=vllm-0.19", "engine.async_scheduling=false")
    assert sum(synchronous["stages"]["h100-sxm"]) / 4 > 0.8


def test_one_request_waits_for_every_stage(base: Path) -> None:
    """Alone, its tokens take as long as if one GPU had all layers, while a tensor parallel group divides them."""
    alone = ("workload.num_requests=1", "engine.preset=vllm-0.10")
    stages = summary(base, *alone)
    assert stages["mean_tpot_ms"] > 2.5 * summary(base, *alone, "cluster.pp=1", "cluster.tp=4")["mean_tpot_ms"]
    assert sum(stages["stages"]["h100-sxm"]) < 1.01


def test_a_pipeline_needs_as_much_memory_a_gpu_as_its_largest_stage(base: Path) -> None:
    (pool,) = setup_of(base).pools
    assert pool.gpus == 4
    (halves,) = setup_of(base, ["cluster.pp=2", "cluster.tp=2"]).pools
    assert pool.memory.weight_bytes == pytest.approx(halves.memory.weight_bytes, rel=0.05)


def test_what_is_refused(base: Path) -> None:
    for overrides, said in (
        (["engine=vllm-0.6"], "cluster.pp: how batches of vllm-0.6 follow each other"),
        (["engine=sglang-0.5"], "cluster.pp: how batches of sglang-0.5 follow each other"),
        (["cluster.pp=81"], "cluster.pp: pp 81 exceeds the 80 layers"),
        (["model=gpt-oss-120b"], "layers with windows"),
        (["model=qwen3-30b-a3b", "cluster.dp=2", "cluster.pp=2"], "cluster.pp: stages of engines that share experts"),
        (["cluster.pp=0"], "cluster.pp: 0 is not 1 or more"),
        (["cluster.pp=16"], "no network between nodes is given"),
    ):
        assert any(said in problem for problem in problems(base, overrides)), (overrides, problems(base, overrides))


def test_the_line_that_starts_vllm_may_say_it(base: Path) -> None:
    line = "vllm serve meta-llama/Llama-3.1-70B-Instruct -pp 2 -tp 2"
    (pool,) = set_up(load_scenario(base, (), line)).pools
    assert (pool.layout.pp, pool.layout.tp) == (2, 2)


def test_intervals_hold_for_stages(base: Path) -> None:
    from servecast.intervals import predict_intervals

    setup = setup_of(base, ["workload.num_requests=30"])
    found = predict_intervals(setup, 5)
    low, high = found.of("mean_tpot_ms") or (0.0, 0.0)
    assert 0 < low < high
