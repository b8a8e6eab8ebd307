"""Lines that start engines, as people post them, and what a scenario makes of them."""

from __future__ import annotations

import json

import pytest
import yaml

from calibrate.model_ids import model_of_id
from calibrate.options import family
from servecast.errors import ServecastError
from servecast.scenario import load_scenario
from servecast.serve_args import problems_of, read_line
from servecast.setup import set_up
from tests.servecast.helpers import QUICKSTART
from tests.servecast.test_cli import call

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QWEN = "vllm serve Qwen/Qwen3-8B"


def options(text):
    line = read_line(text)
    assert line.problems == ()
    return line.options


def said(text, path=QUICKSTART):
    with pytest.raises(ServecastError) as caught:
        load_scenario(path, (), text)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "name", "keys", "expected"),
    [
        (  # vLLM's docs
            f"vllm serve {LLAMA} -tp 2 --max-num-seqs 256 --gpu-memory-utilization=0.95 --no-enable-prefix-caching",
            "vllm",
            {"model": "llama-3.1-8b", "cluster.tp": 2},
            {"max_num_seqs": 256, "gpu_memory_utilization": 0.95, "enable_prefix_caching": False},
        ),
        (  # with continued lines, a variable, an abbreviation that argparse takes, and underscores
            "CUDA_VISIBLE_DEVICES=0,1 python3 -m vllm.entrypoints.openai.api_server \\\n  --model Qwen/Qwen3-32B \\\n"
            "  --tensor_parallel_size 2 --max-num-batched-token=65536 --enable-chunked-prefill \\\n --seed 0",
            "vllm",
            {"model": "qwen3-32b", "cluster.tp": 2},
            {"max_num_batched_tokens": 65536, "enable_chunked_prefill": True},
        ),
        (  # a recipe for gpt-oss
            "vllm serve openai/gpt-oss-120b --tensor-parallel-size 1 --kv-cache-dtype fp8 --async-scheduling "
            "--max-cudagraph-capture-size 2048 --max-num-batched-tokens 8192 --stream-interval 1 "
            """--compilation-config '{"pass_config": {"enable_fi_allreduce_fusion": true}}' """
            "--compilation-config.cudagraph_mode=FULL_DECODE_ONLY -O3 > server.log 2>&1 &",
            "vllm",
            {"model": "gpt-oss-120b", "cluster.tp": 1},
            {
                "kv_cache_dtype": "fp8",
                "async_scheduling": True,
                "max_cudagraph_capture_size": 2048,
                "max_num_batched_tokens": 8192,
                "stream_interval": 1,
                "fuse_allreduce_rms": True,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "optimization_level": 3,
            },
        ),
        (  # the vLLM image is the server
            "docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:v0.19.0 --model google/gemma-2-9b-it "
            "--max-model-len 8k",
            "vllm",
            {"model": "gemma-2-9b"},
            {"max_model_len": 8000},
        ),
        (  # SGLang's docs
            "docker run --gpus all --shm-size 32g -p 30000:30000 --env HF_TOKEN=x lmsysorg/sglang:latest python3 -m "
            f"sglang.launch_server --model-path {LLAMA} --tp 2 --chunked-prefill-size -1 --mem-fraction-static 0.7 "
            "--host 0.0.0.0",
            "sglang",
            {"model": "llama-3.1-8b", "cluster.tp": 2},
            {"chunked_prefill_size": -1, "mem_fraction_static": 0.7},
        ),
        (
            "sglang serve --model-path Qwen/Qwen3-8B --disable-radix-cache --page-size 16 --trust-remote-code",
            "sglang",
            {"model": "qwen3-8b"},
            {"disable_radix_cache": True, "page_size": 16, "trust_remote_code": True},
        ),
        (
            "trtllm-serve serve meta-llama/Meta-Llama-3-8B --tp_size 4 \\   # four GPUs\n --max_batch_size 256 "
            "--kv_cache_free_gpu_memory_fraction 0.8 --backend pytorch",
            "tensorrt-llm",
            {"model": "llama-3-8b", "cluster.tp": 4},
            {"max_batch_size": 256, "kv_cache_config.free_gpu_memory_fraction": 0.8, "backend": "pytorch"},
        ),
    ],
)
def test_lines_as_people_post_them(text, name, keys, expected):
    line = read_line(text)
    assert line.problems == ()
    assert (line.family, line.keys, line.options) == (name, keys, expected)


@pytest.mark.parametrize(
    ("word", "value"), [("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1M", 2**20), ("4096", 4096)]
)
def test_numbers_that_vllm_takes(word, value):
    assert options(f"{QWEN} --max-model-len {word}") == {"max_model_len": value}


def test_only_vllm_takes_them():
    assert options("sglang serve --model Qwen/Qwen3-8B --context-length 32k") == {"context_length": "32k"}
    assert "engine.context_length is '32k'" in said("sglang serve --model Qwen/Qwen3-8B --context-length 32k")


def test_flags_take_no_word_but_true_and_false():
    assert options("vllm serve --enforce-eager Qwen/Qwen3-8B") == {"enforce_eager": True}
    assert options(f"{QWEN} --enable-chunked-prefill False --no-async-scheduling") == {
        "enable_chunked_prefill": False,
        "async_scheduling": False,
    }


def test_a_line_replaces_model_engine_and_tp(tmp_path):
    file = tmp_path / "x.yaml"
    data = yaml.safe_load(QUICKSTART.read_text())
    data["engine"] = {"preset": "vllm-0.15", "max_num_seqs": 7, "block_size": 32}
    data["cluster"] |= {"tp": 4}
    data["memory"] = {"weights": "15GiB"}
    file.write_text(yaml.safe_dump(data))
    scenario = load_scenario(file, ["workload.num_requests=10", "engine.max_num_seqs=9"], f"{QWEN} --port 80 -q fp8")
    assert (scenario.model, scenario.cluster.pools[0].tp, scenario.cluster.pools[0].gpu) == ("qwen3-8b", 1, "h100-sxm")
    assert scenario.engine == {"preset": "vllm-0.15", "quantization": "fp8", "max_num_seqs": 9}
    assert scenario.memory.weights is None
    assert scenario.notes == [
        "--serve-args: qwen3-8b, tp 1, vllm-0.15 (the scenario's); workload and GPU are the scenario's",
        "--serve-args: replaced, with what the line says or the engine's default: block_size, max_num_seqs, memory",
        "--serve-args: of the line, without influence here: --port",
    ]
    assert set_up(scenario).pool.engine.max_num_seqs == 9


def test_another_engine_comes_in_its_newest_version():
    scenario = load_scenario(QUICKSTART, (), "sglang serve --model Qwen/Qwen3-8B")
    assert scenario.engine == {"preset": list(family("sglang")["presets"])[-1]}
    assert "(the newest of SGLang)" in scenario.notes[0]


def test_a_pool_that_is_written_out_gets_its_tp(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(QUICKSTART.read_text().replace("{gpu: h100-sxm}", "{pools: [{gpu: h100-sxm, tp: 4}]}"))
    pool = load_scenario(file, (), f"{QWEN} -tp 2 -pp 2").cluster.pools[0]
    assert (pool.tp, pool.pp) == (2, 2)


def test_experts_over_several_engines():
    line = "vllm serve Qwen/Qwen3-30B-A3B -tp 2 --data-parallel-size 2 --enable-expert-parallel"
    setup = set_up(load_scenario(QUICKSTART, (), line))
    assert (setup.pool.layout.tp, setup.pool.layout.dp, setup.pool.layout.ep) == (2, 2, True)
    assert "qwen3-30b-a3b, tp 2, dp 2, ep, vllm-0.19" in setup.scenario.notes[0]
    again = load_scenario(QUICKSTART, ["cluster.dp=2"], QWEN)
    assert again.cluster.pools[0].dp == 2, "--set comes after the line"


def test_ranks_that_share_tokens_and_halves_that_overlap():
    line = "vllm serve deepseek-ai/DeepSeek-V3 -tp 8 -dcp 8 --prefill-context-parallel-size 1 --enable-expert-parallel"
    quick = ["cluster.gpu=h200-sxm", "engine.max_model_len=32768"]
    setup = set_up(load_scenario(QUICKSTART, quick, line))
    assert (setup.pool.layout.tp, setup.pool.layout.dcp, setup.pool.layout.pcp) == (8, 8, 1)
    assert "deepseek-v3, tp 8, ep, dcp 8, pcp 1, vllm-0.19" in setup.scenario.notes[0]
    line = "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 -ep --all2all-backend deepep_low_latency --enable-dbo"
    setup = set_up(load_scenario(QUICKSTART, quick, f"{line} --dbo-decode-token-threshold 64"))
    assert setup.pool.layout.all2all_backend == "deepep_low_latency"
    assert (setup.pool.engine.overlap.decode_tokens, setup.pool.engine.overlap.prefill_tokens) == (64, 512)
    near = ["cluster.experts.all2all=deepep_high_throughput"]
    again = load_scenario(QUICKSTART, [*quick, *near], line)
    assert again.cluster.pools[0].experts.all2all == "deepep_high_throughput", "--set comes after the line"
    with pytest.raises(ServecastError, match=r"experts\.all2all.*'naive'"):
        load_scenario(QUICKSTART, quick, line.replace("deepep_low_latency", "naive"))


def test_everything_wrong_at_once():
    found = said(
        'VLLM_USE_V1=0 vllm serve nobody/llama-3.1-9b --max-nm-seqs 64 --speculative-config \'{"method": "medusa"}\' '
        "--max-num-batched-tokens x -dp two --kv-cache-dtype fp9 --max-model-len auto --block-size 16 --block_size 32 "
        "--gpu-memory-utilization 1.5 -cc.custom_ops+=none stray \u2014port 80 --enforce-eager=2 --watermark"
    )
    for words in (
        "VLLM_USE_V1=0: not modelled (the older engine is the preset vllm-0.6)",
        "'nobody/llama-3.1-9b' is not in the catalogue",
        "near are llama-3.1-8b",
        "--max-nm-seqs: vLLM has no such option that is known here (did you mean '--max-num-seqs'?)",
        "engine.speculative_config.method is 'medusa'; expected ngram or eagle",
        "engine.max_num_batched_tokens is 'x'; expected a whole number",
        "-dp: 'two' is not a whole number",
        "engine.kv_cache_dtype is 'fp9'",
        "--max-model-len auto: the longest that fits is not looked for",
        "--block_size: given twice (also as --block-size)",
        "engine.gpu_memory_utilization is 1.5",
        "-cc.custom_ops+: 'custom_ops+' is not modelled; of it are cudagraph_mode",
        "'stray': belongs to no option",
        "begins with a long dash",
        "--enforce-eager: '2' is neither true nor false",
        "--watermark: a value is missing",
    ):
        assert words in found
    assert all(problem.startswith("--serve-args: ") for problem in found.split("\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the line is empty: no engine is started"),
        ("ollama run llama3", "'ollama run llama3': no engine is started; expected a line with vllm serve"),
        ("vllm serve 'Qwen/Qwen3-8B", "a quotation mark is not closed"),
        ("vllm serve", "the model is missing; for example meta-llama"),
        ("vllm serve $MODEL --port 80", "$MODEL: a variable of your shell"),
        (
            "vllm serve RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
            "names of quantised checkpoints must be the catalogue's",
        ),
        ("vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507", "near are qwen3-30b-a3b"),
        ("vllm serve deepseek-ai/DeepSeek-V3.2", "is not priced yet"),
        (f"{QWEN} --config serve.yaml", "write what the file holds into the line"),
        (f"{QWEN} -tp 16 --nnodes 2", "the network between nodes is not modelled"),
        (f"{QWEN} -tp two", "-tp: 'two' is not a whole number"),
        (f"{QWEN} -tp 0", "cluster.tp"),
        (f"{QWEN} --attention-backend FLASHINFER", "the GPU's profile says which kernels"),
    ],
)
def test_lines_that_cannot_be_run(text, words):
    assert words in said(text)


def test_an_option_that_the_version_does_not_have(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(QUICKSTART.read_text().replace("vllm-0.19", "vllm-0.10"))
    assert "vllm-0.10 does not have this option" in said(f"{QWEN} --max-cudagraph-capture-size 64", file)


def test_parts_of_an_option_are_shown_together():
    found = said(f"{QWEN} --kv-transfer-config.kv_connector X --kv-transfer-config.kv_role Y")
    assert "{'kv_connector': 'X', 'kv_role': 'Y'} is not modelled" in found


DRAFTS = QUICKSTART.with_name("speculative.yaml")
LLAMA_70B = "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4 --speculative-config"


def drafting(**config):
    return f"{LLAMA_70B} '{json.dumps(config)}'"


def test_a_draft_model_goes_by_its_id():
    text = drafting(method="draft_model", model="meta-llama/Llama-3.2-1B-Instruct", num_speculative_tokens=4)
    scenario = load_scenario(DRAFTS, (), text)
    assert scenario.pool_engine(0)["speculative_config.model"] == "llama-3.2-1b"
    words = said(drafting(method="draft_model", model="nobody/small", num_speculative_tokens=4), DRAFTS)
    assert "speculative_config.model: 'nobody/small' is not in the catalogue" in words


def test_a_head_that_no_catalogue_has_is_taken_to_be_a_layer():
    head = "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"
    line = read_line(drafting(method="eagle3", model=head, num_speculative_tokens=3))
    assert line.problems == ()
    assert "speculative_config.model" not in line.options
    assert any(head in note and "a layer of the model" in note for note in line.notes)
    with pytest.raises(ServecastError, match=r"engine\.speculative_config\.method: missing"):
        set_up(load_scenario(DRAFTS, (), drafting(model=head, num_speculative_tokens=3)))


def test_unknown_variables_are_said():
    notes = read_line("VLLM_SOMETHING=1 VLLM_LOGGING_LEVEL=INFO vllm serve Qwen/Qwen3-8B").notes
    assert any("VLLM_SOMETHING" in note and "as if it were not set" in note for note in notes)
    assert any("without influence here: VLLM_LOGGING_LEVEL" in note for note in notes)


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("unsloth/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b-fp8"),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b-fp8"),
        ("/models/Qwen3-8B", "qwen3-8b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
    ],
)
def test_ids_of_models(model_id, name):
    assert model_of_id(model_id)[0] == name


def test_every_model_is_found_by_its_own_source():
    from calibrate.catalog import read

    for name, entry in read("models")["models"].items():
        assert model_of_id(str(entry["source"]).split()[0])[0] == name


def test_a_path_to_a_config_is_relative_to_here(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario(QUICKSTART, (), "vllm serve mine")
    assert scenario.model == "./mine"
    assert scenario.path_of("model", scenario.model).resolve() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm"])
def test_the_lists_of_an_engine_hold_every_option_once(name):
    data = family(name)
    line = data["command_line"]
    ignored = [*line["ignored"]["flags"], *line["ignored"]["values"]]
    known = {*data["options"], *data["unmodelled"], *data["elsewhere"], *ignored}
    assert len(ignored) == len(set(ignored))
    assert not set(ignored) & {*data["options"], *data["unmodelled"]}
    assert set(line["aliases"].values()) | set(line["inside"].values()) | set(line["lists"]) <= known | {"lora_paths"}


def test_run_shows_what_the_line_was_taken_for(tmp_path):
    out = call("run", QUICKSTART, "--serve-args", f"vllm serve {LLAMA} -tp 2 --max-num-seqs 64", "--show-resolved")
    assert out.exit_code == 0, out.output
    assert "max_num_seqs: 64  # user" in out.stdout
    assert "# --serve-args: llama-3.1-8b, tp 2, vllm-0.19 (the scenario's)" in out.stdout
    (tmp_path / "again.yaml").write_text(out.stdout)
    assert call("run", tmp_path / "again.yaml", "--show-resolved").exit_code == 0


def test_run_says_what_is_still_needed():
    out = call("run", "--serve-args", f"{QWEN} --max-num-sqs 64")
    assert out.exit_code == 2
    assert "did you mean '--max-num-seqs'?" in out.stderr
    assert "give a SCENARIO too, whose cluster.gpu and workload stay" in out.stderr
    assert call("run").exit_code == 2
    assert "Missing argument 'SCENARIO'" in call("run").stderr
    assert problems_of(QWEN) == []
