"""The commands that are written: read back they give the engine they were written for, and the engines know them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import servecast
from calibrate.catalog import read
from calibrate.model_ids import id_of_model, model_of_id
from calibrate.options import family, family_of, flat, nested, preset_names, refusals
from servecast.errors import ServecastError
from servecast.scenario import load_scenario
from servecast.serve_args import read_line
from servecast.serve_lines import commands, differing
from servecast.setup import Setup, set_up
from tests.servecast.helpers import QUICKSTART, small
from tests.servecast.test_cli import call

LINES = [name for name in preset_names() if "command_line" in family(family_of(name))]
NUMBERS = {
    "gpu_memory_utilization": [0.8, 0.95], "swap_space": [0, 8.5], "watermark": [0.05], "block_size": [16, 32],
    "fi_allreduce_fusion_max_size_mb": [1, 0.5], "mem_fraction_static": [0.8], "schedule_conservativeness": [0.3, 1],
    "page_size": [1, 16], "batch_wait_max_tokens_ratio": [0.5], "kv_cache_config.free_gpu_memory_fraction": [0.5, 0.85],
    "kv_cache_config.tokens_per_block": [64], "long_prefill_token_threshold": [0, 512],
}  # fmt: skip
DRAFTS = QUICKSTART.with_name("speculative.yaml")
SIZES = [256, 1024, 2048, 8192]
VLLM = os.environ.get("SERVECAST_VLLM_SOURCES")
SGLANG = os.environ.get("SERVECAST_SGLANG_SOURCES")


def values(preset: str, name: str) -> list[object]:
    """What an option of the preset may be."""
    allowed = family(family_of(preset))["options"][name]
    if family(family_of(preset))["presets"][preset].get("spelled", {}).get(name, name) is None:
        return []
    some = [True, False] if allowed == "flag" else allowed if isinstance(allowed, list) else NUMBERS.get(name, SIZES)
    return [value for value in some if not refusals({"preset": preset, name: value})]


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[dict[str, object], dict[str, object]]:
    """Engine options (flat) and layout keys."""
    preset = draw(st.sampled_from(LINES))
    names = [name for name in family(family_of(preset))["options"] if values(preset, name)]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=5))
    engine = {"preset": preset} | {name: draw(st.sampled_from(values(preset, name))) for name in chosen}
    keys = {"model": draw(st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b"])), "cluster.gpu": "h200-sxm"}
    keys |= {"cluster.tp": draw(st.sampled_from([1, 2, 4]))}
    if family_of(preset) == "vllm":
        if draw(st.booleans()):
            keys["cluster.pp"] = 2
        elif keys["model"] != "llama-3.1-8b":
            keys |= {"cluster.dp": draw(st.sampled_from([1, 2])), "cluster.ep": draw(st.booleans())}
    return engine, keys


def resolved(engine: dict[str, object], keys: dict[str, object]) -> Setup:
    return set_up(load_scenario(QUICKSTART, keys | {"engine": nested(engine), "workload.num_requests": 2}))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(scenarios())
def test_a_line_read_back_is_the_same_engine(drawn):
    engine, keys = drawn
    try:
        setup = resolved(engine, keys)
    except ServecastError:
        assume(False)
    (command,) = commands(setup)
    assert command.notes == ()
    line = read_line(command.text)
    assert line.problems == ()
    options = dict(line.options)
    if command.file:
        assert options.pop("config") == command.file[0]
        options |= flat(yaml.safe_load(command.file[1]), family(family_of(str(engine["preset"])))["options"])
    layout = {"cluster.gpu": "h200-sxm"} | line.keys
    again = resolved({"preset": engine["preset"]} | options, layout)
    a, b = (replace(each.pool.engine, notes=(), sources={}) for each in (setup, again))
    assert a == b
    assert setup.pool.layout == again.pool.layout
    assert setup.pool.memory == again.pool.memory
    assert differing(setup, again) == []


def test_all_presets_with_a_command_line_are_tried():
    assert {family_of(name) for name in LINES} == {"vllm", "sglang", "tensorrt-llm"}


def test_only_what_was_set_is_in_the_line():
    assert servecast.serve_line(set_up(small())) == "# on a h100-sxm; vLLM 0.19.1\nvllm serve meta-llama/Llama-3.1-8B"
    out = call("run", QUICKSTART, "--serve-line", "--set", "engine.max_num_seqs=64", "--set", "cluster.replicas=3")
    assert out.stdout == (
        "# 3 replicas, each on a h100-sxm; vLLM 0.19.1\nvllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64\n"
    )


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({"preset": "vllm-0.19", "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"preset": "vllm-0.19", "cudagraph_mode": "NONE"}, """--compilation-config '{"cudagraph_mode": "NONE"}'"""),
        (
            {"preset": "vllm-0.10", "fuse_allreduce_rms": True},
            """--compilation-config '{"pass_config": {"enable_fi_allreduce_fusion": true}}'""",
        ),
        (
            {"preset": "vllm-0.6", "enable_chunked_prefill": False, "enforce_eager": False},
            "--enable-chunked-prefill false",
        ),
        ({"preset": "sglang-0.5", "disable_radix_cache": True, "enable_mixed_chunk": False}, "--disable-radix-cache"),
        ({"preset": "tensorrt-llm-1", "max_batch_size": 8, "enable_chunked_prefill": False}, "--max_batch_size 8"),
    ],
)
def test_spellings(engine, line):
    (command,) = commands(set_up(small(engine=engine)))
    assert command.line.partition("Llama-3.1-8B ")[2] == line


def test_what_no_line_says():
    many = {"model": "qwen3-30b-a3b", "cluster": {"gpu": "h100-sxm", "dp": 2, "ep": True}}
    experts = {"experts": {"redundant": 2, "all2all": "deepep_low_latency"}}
    (command,) = commands(set_up(small(**many | {"cluster": many["cluster"] | experts})))
    assert "--data-parallel-size 2 --enable-expert-parallel --all2all-backend deepep_low_latency" in command.line
    assert command.notes == ("not in the line: experts.redundant 2, by the engine's options for EPLB",)
    (command,) = commands(set_up(small(**many, cluster__experts={"all2all": "deepep_auto"})))
    assert "all2all" not in command.line
    assert command.notes == ("not in the line: experts.all2all deepep_auto; how vLLM is told so is not known here",)
    (command,) = commands(set_up(small(**many | {"cluster": {"gpu": "h100-sxm", "tp": 8, "dcp": 2}})))
    assert command.line.endswith("--tensor-parallel-size 8 --decode-context-parallel-size 2")
    (command,) = commands(set_up(small(**many, engine="sglang-0.5")))
    assert "not in the line: dp 2; how SGLang is told so is not known here" in command.notes
    (command,) = commands(set_up(small(engine={"preset": "vllm-0.10", "fi_allreduce_fusion_max_size_mb": 2})))
    assert command.notes == (
        "not in the line: fi_allreduce_fusion_max_size_mb 2, which this version says in another way",
    )
    (command,) = commands(set_up(small(engine="tgi-3")))
    assert (command.line, command.notes) == ("", ("how TGI is started is not known here",))
    split = commands(set_up(load_scenario(QUICKSTART.with_name("split-serving.yaml"), {"workload.num_requests": 5})))
    assert all("hands over by nixl" in command.notes[-1] for command in split)


def test_a_model_of_ones_own_is_its_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    config = tmp_path / "mine" / "config.json"
    config.write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, '
        '"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 32000, '
        '"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}'
    )
    (command,) = commands(set_up(small(model=str(config), workload__lengths__prompt={"kind": "fixed", "tokens": 9})))
    assert command.line == f"vllm serve {tmp_path / 'mine'}"


def test_every_catalogued_model_has_an_id():
    for name in read("models")["models"]:
        assert model_of_id(id_of_model(name)) == (name, "")


def test_differences_are_the_flags_to_change():
    before = set_up(small(engine__max_num_seqs=1024, engine__block_size=32))
    after = set_up(
        small(engine__max_num_seqs=64, engine__cudagraph_mode="NONE", cluster__tp=2, engine__block_size=None)
    )
    found = {each.flag: (each.before, each.after) for each in differing(before, after)}
    assert found == {
        "--tensor-parallel-size": (1, 2),
        "--max-num-seqs": (1024, 64),
        "--compilation-config.cudagraph_mode": ("FULL_AND_PIECEWISE", "NONE"),
        "--block-size": (32, 16),
    }
    assert differing(set_up(small()), set_up(small(engine__gpu_memory_utilization=0.9))) == [], "0.9 is the default"
    (other,) = differing(before, set_up(small(engine="sglang-0.5")))
    assert (other.flag, other.after.split()[0]) == ("", "python")
    fleet = set_up(load_scenario(QUICKSTART.with_name("mixed-fleet.yaml"), {"workload.num_requests": 5}))
    assert {each.pool for each in differing(before, fleet)} == {"h100-sxm", *fleet.scenario.cluster.names}


@pytest.mark.skipif(not VLLM, reason="SERVECAST_VLLM_SOURCES is not set")
@pytest.mark.parametrize("preset", [name for name in LINES if name.startswith("vllm-")])
def test_vllm_has_these_options(preset):
    data = family("vllm")
    version = data["presets"][preset]["source"].removeprefix("vLLM v")
    if not (Path(VLLM) / version).exists():
        pytest.skip(f"no sources of {version}")
    root = Path(VLLM) / version / "vllm"
    known = set(re.findall(r'"--([a-z0-9-]+)"', (root / "engine/arg_utils.py").read_text()))
    config = "".join(file.read_text() for file in (root / "config").glob("*.py"))
    for name in data["elsewhere"]:
        spelled = data["presets"][preset].get("spelled", {}).get(name, name)
        assert name.endswith("model_name") or name == "model" or not spelled or name.replace("_", "-") in known, name
    for name in data["options"]:
        for value in values(preset, name)[:1]:
            try:
                (command,) = commands(resolved({"preset": preset, name: value}, {"cluster.tp": 2}))
            except ServecastError:
                continue
            for flag in re.findall(r" --([a-z0-9_-]+)", command.line):
                assert flag.removeprefix("no-") in known | {"compilation-config"}, (name, flag)
            for key in re.findall(r'"(\w+)":', command.line):
                assert re.search(rf"^    {key}:", config, flags=re.M), (name, key)


@pytest.mark.skipif(not SGLANG, reason="SERVECAST_SGLANG_SOURCES is not set")
def test_sglang_has_these_options():
    text = (Path(SGLANG) / "0.5.9/sglang/srt/server_args.py").read_text()
    known = set(re.findall(r'"--([a-z0-9-]+)"', text))
    names = family("sglang")["options"]
    assert {name.replace("_", "-") for name in names} | {"tp-size", "model-path"} <= known


def test_a_model_that_drafts_is_written_by_its_id():
    setup = set_up(load_scenario(DRAFTS))
    (command,) = commands(setup)
    assert '"model": "meta-llama/Llama-3.2-1B"' in command.line
    again = set_up(load_scenario(DRAFTS, (), command.line))
    assert again.pools[0].engine.options == setup.pools[0].engine.options
    how = {"method": "eagle3", "num_speculative_tokens": 3}
    (head,) = commands(set_up(load_scenario(DRAFTS, {"engine.speculative_config": how})))
    assert any("the checkpoint of the eagle3 head" in note for note in head.notes)
