"""The scenario schema: what people may write, and what it means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servecast.scenario import load_scenario
from servecast.setup import set_up
from servecast.yamlfile import dump_yaml, load_yaml
from tests.servecast.helpers import QUICKSTART, SMALL, fixed, problems, setup_of, small

TRACE = "arrival_s,input_tokens,output_tokens\n0,10,5\n30,20,6\n60,30,7\n90,40,8\n"


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_every_key_of_the_schema(tmp_path: Path) -> None:
    write(tmp_path, TRACE, "t.csv")
    file = write(
        tmp_path,
        """
        name: all of it
        model: llama-3.1-8b
        engine: {preset: vllm-0.19, max_num_seqs: 128, max_num_batched_tokens: 4096, max_model_len: 8192,
                 block_size: 32, long_prefill_token_threshold: 1024, num_gpu_blocks_override: 5000,
                 gpu_memory_utilization: 0.8, enable_chunked_prefill: true,
                 scheduler_reserve_full_isl: false, async_scheduling: false}
        cluster: {pools: [{role: unified, gpu: h100-sxm, tp: 2, replicas: 3}], router: round-robin}
        workload: {trace: t.csv, format: table, rate_scale: 2, window: [0s, 1min], num_requests: 2, max_tokens: 100}
        slo: {ttft: 1s, tpot: 50ms, e2e: 1min}
        seed: 3
        """,
    )
    setup = setup_of(file)
    assert setup.scenario.name == "all of it"
    assert (setup.gpus, setup.pool.replicas) == (6, 3)
    engine = setup.pool.engine
    assert (engine.max_num_seqs, engine.block_size, engine.async_scheduling) == (128, 32, False)
    assert setup.pool.memory.num_gpu_blocks == 5000
    assert setup.scenario.slo.limits() == {"ttft": 1.0, "tpot": 0.05, "e2e": 60.0}
    assert setup.requests.trace.arrival_s.tolist() == [0, 15]
    assert setup.requests.trace.max_tokens.tolist() == [100, 100]


def test_name_defaults_to_the_file(tmp_path: Path) -> None:
    text = QUICKSTART.read_text().replace("name: chat on one H100", "")
    assert load_scenario(write(tmp_path, text, "my chat.yaml")).name == "my chat"


def test_flat_and_pools_form_are_the_same() -> None:
    pools = {"pools": [{"role": "unified", "gpu": "h100-sxm", "tp": 2, "replicas": 3}], "router": "round-robin"}
    flat = {"gpu": "h100-sxm", "tp": 2, "replicas": 3}
    assert small(cluster=pools).model_dump() == small(cluster=flat).model_dump()


def test_preset_alone_is_an_engine() -> None:
    assert small(engine="vllm-0.19").model_dump() == small(engine={"preset": "vllm-0.19"}).model_dump()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("1 s", 1),
        ("10min", 600),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("3us", 3e-6),
        ("1e3s", 1e3),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert small(slo={"ttft": text}).slo.ttft == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("engine.max_num_seqs=64", lambda s: s.engine["max_num_seqs"] == 64),
        ("workload.arrivals.rate=1e-3", lambda s: s.workload.arrivals["rate"] == 0.001),
        ("workload.lengths.prompt={kind: fixed, tokens: 7}", lambda s: s.workload.lengths.prompt["tokens"] == 7),
        ("cluster.pools=[{gpu: l40s}]", None),
        ("cluster={pools: [{gpu: l40s}]}", lambda s: s.cluster.pools[0].gpu == "l40s"),
        ("slo.e2e=20s", lambda s: s.slo.e2e == 20),
        ("slo=null", lambda s: s.slo.ttft is None),
        ("slo.ttft=null", lambda s: s.slo.ttft is None and s.slo.tpot == 0.05),
        ("engine.max_num_seqs=", lambda s: s.engine["max_num_seqs"] is None),
        ("name=a=b", lambda s: s.name == "a=b"),
        ("name='3'", lambda s: s.name == "3"),
        ("seed=0x10", lambda s: s.seed == 16),
        (" seed = 5", lambda s: s.seed == 5),
    ],
)
def test_set(override: str, read: Any) -> None:
    if read is None:
        assert "pools" in "".join(problems(QUICKSTART, [override]))
    else:
        assert read(load_scenario(QUICKSTART, [override]))


def test_set_reaches_into_lists(tmp_path: Path) -> None:
    file = write(tmp_path, QUICKSTART.read_text().replace("{gpu: h100-sxm}", "{pools: [{gpu: h100-sxm}]}"))
    assert load_scenario(file, ["cluster.pools.0.tp=2"]).cluster.pools[0].tp == 2
    assert "numbered from 0 to 0" in problems(file, ["cluster.pools.1.tp=2"])[0]
    assert "numbered from 0 to 0" in problems(file, ["cluster.pools.1={gpu: l4}"])[0]


def test_set_reaches_beside_what_one_word_says(tmp_path: Path) -> None:
    text = (
        QUICKSTART.read_text()
        .replace("engine: {preset: vllm-0.19}", "engine: vllm-0.19")
        .replace(
            "cluster: {gpu: h100-sxm}",
            "cluster: {router: prefix-affinity, pools: [{gpu: h100-sxm, engine: vllm-0.10}, {gpu: l40s}]}",
        )
    )
    changes = ["engine.max_num_seqs=64", "cluster.router.cache_threshold=0.5", "cluster.pools.0.engine.max_num_seqs=32"]
    found = load_scenario(write(tmp_path, text), changes)
    assert found.engine == {"preset": "vllm-0.19", "max_num_seqs": 64}
    assert found.cluster.router == {"kind": "prefix-affinity", "cache_threshold": 0.5}
    assert found.cluster.pools[0].engine == {"preset": "vllm-0.10", "max_num_seqs": 32}


def test_set_makes_new_sections(tmp_path: Path) -> None:
    file = write(tmp_path, QUICKSTART.read_text().replace("slo: {ttft: 1s, tpot: 50ms}", "slo:"))
    assert load_scenario(file, ["slo.ttft=2s"]).slo.ttft == 2


@pytest.mark.parametrize("bad", ["seed", "=3", "seed=[", "seed=*x", "seed=!!python/object:x {}", "a..b=3", ".=1"])
def test_bad_set_syntax(bad: str) -> None:
    (problem,) = problems(QUICKSTART, [bad])
    assert problem.startswith("--set ")


def test_all_bad_sets_are_said_at_once() -> None:
    assert len(problems(QUICKSTART, ["seed", "seed=[", "name.x=3"])) == 3


def test_later_sets_win() -> None:
    assert load_scenario(QUICKSTART, ["seed=5", "seed=6"]).seed == 6


def test_overrides_as_a_mapping_take_python_values(tmp_path: Path) -> None:
    changes = {"seed": np.int64(4), "workload.arrivals.rate": np.float64(2), "slo": {"ttft": "2s"}, "name": tmp_path}
    scenario = load_scenario(QUICKSTART, changes)
    assert (scenario.seed, scenario.name, scenario.slo.tpot) == (4, str(tmp_path), None)
    assert scenario.workload.arrivals == {"kind": "poisson", "rate": 2.0}


def test_overrides_leave_the_callers_mapping_alone() -> None:
    changes: dict[str, Any] = {"slo": {"ttft": "2s"}, "slo.tpot": "1s"}
    load_scenario(QUICKSTART, changes)
    assert changes == {"slo": {"ttft": "2s"}, "slo.tpot": "1s"}


def test_null_takes_an_option_back() -> None:
    assert set_up(small(engine__max_num_seqs=None)).pool.engine == set_up(small()).pool.engine
    assert (
        set_up(small(workload__lengths__prompt__max=None)).requests.trace.source
        == set_up(small()).requests.trace.source
    )


def test_paths_are_relative_to_the_file_and_for_set_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, output in ((here, 1), (there, 2)):
        folder.mkdir()
        write(folder, f"arrival_s,input_tokens,output_tokens\n0,10,{output}\n", "t.csv")
    text = QUICKSTART.read_text().split("workload:")[0]
    file = write(there, f"{text}workload: {{trace: t.csv}}\n")
    monkeypatch.chdir(here)
    path = Path(os.path.relpath(file, here))
    assert setup_of(path).requests.trace.output_tokens.tolist() == [2]
    assert setup_of(path, ["workload.trace=t.csv"]).requests.trace.output_tokens.tolist() == [1]
    lengths = {"num_requests": 1, "arrivals": {"kind": "all-at-once"}, "lengths": {"trace": "t.csv"}}
    assert setup_of(path, {"workload": lengths}).requests.trace.output_tokens.tolist() == [1]


def test_model_as_a_path(tmp_path: Path) -> None:
    sizes = (
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, '
        '"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, '
        '"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}'
    )
    write(tmp_path, sizes, "config.json")
    file = write(tmp_path, QUICKSTART.read_text().replace("model: llama-3.1-8b", "model: ./config.json"))
    assert setup_of(file).pool.model.hidden == 2048


def test_seed_decides_the_requests() -> None:
    one, same, other = (set_up(small(seed=seed)).requests.trace for seed in (1, 1, 2))
    assert np.array_equal(one.arrival_s, same.arrival_s)
    assert not np.array_equal(one.prompt_tokens, other.prompt_tokens)
    assert small(seed=None).seed == 0


def test_an_unlisted_version_is_resolved_and_said() -> None:
    engine = set_up(small(engine="vllm-0.20")).pool.engine
    assert engine.preset == "vllm-0.19"
    assert any("vllm-0.20" in note for note in engine.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workload": {"closed_loop": {"concurrency": 4}, "num_requests": 9, "lengths": fixed(10, 5)}},
        {"workload.max_tokens": "unlimited"},
        {"cluster": {"gpu": "l40s", "replicas": 2}, "engine.max_num_seqs": 7, "slo": None, "name": "1e9"},
        {"workload": {"trace": "t.csv", "window": ["500ms", "1h"], "rate_scale": 3}},
    ],
)
def test_resolved_loads_again_as_the_same(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TRACE, "t.csv")
    setup = setup_of(QUICKSTART, {**SMALL, **changes} if "workload" not in changes else changes)
    again = setup_of(write(tmp_path, dump_yaml(setup.resolved())))
    assert again.resolved() == setup.resolved()
    assert again.pool.memory == setup.pool.memory
    assert np.array_equal(again.requests.trace.prompt_tokens, setup.requests.trace.prompt_tokens)
    assert np.array_equal(again.requests.trace.max_tokens, setup.requests.trace.max_tokens)


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1e9", 1e9), ("+2E3", 2e3), ("1.5", 1.5), (".5", 0.5)])
def test_numbers_with_exponents_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert load_yaml(write(tmp_path, f"x: {text}\n")).data == {"x": value}


@pytest.mark.parametrize(
    "text", ["1e9", "1e-6", "yes", "null", "3", "0x1", "1.5", ".inf", "a: b", "# c", "", "é", "2024-01-01"]
)
def test_text_survives_writing_and_reading(tmp_path: Path, text: str) -> None:
    assert load_yaml(write(tmp_path, dump_yaml({"x": text}))).data == {"x": text}


@pytest.mark.parametrize("scenario", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_scenarios_are_valid(scenario: Path) -> None:
    assert problems(scenario) == []


def test_a_changed_preset_keeps_the_workload_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    text = QUICKSTART.read_text()
    file = write(tmp_path, text.replace("preset: vllm-0.19", "preset: vllm-0.19, scheduler_reserve_full_isl: true"))
    assert "scheduler_reserve_full_isl" in file.read_text()
    scenario = load_scenario(file, ["engine.preset=vllm-0.15"])
    assert scenario.workload == load_scenario(file).workload
    assert "scheduler_reserve_full_isl" not in scenario.engine
    (note,) = [note for note in set_up(scenario).pool.engine.notes if "left out" in note]
    assert note.startswith("left out with the change to vllm-0.15: scheduler_reserve_full_isl: vllm-0.15 does not have")
    (problem,) = problems(file, ["engine.preset=vllm-0.15", "engine.scheduler_reserve_full_isl=true"])
    assert "vllm-0.15 does not have this option" in problem
