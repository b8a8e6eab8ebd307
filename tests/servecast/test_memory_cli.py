"""`servecast memory` from the command line: the answer, its page, scripts, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from servecast.memory_cli import engine_options, request_shape
from servecast.scenario import load_scenario
from servecast.setup import set_up


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["memory", *words], env={"COLUMNS": "100"})


def test_it_fits() -> None:
    result = run("llama-3.1-8b", "--gpu", "h100-sxm", "--preset", "vllm-0.10", "--max-model-len", "8192")
    assert result.exit_code == 0
    assert "llama-3.1-8b on 1 x h100-sxm, vllm-0.10" in result.output
    assert "\nFits: " in result.output
    assert "peak: sampling 1,024 sequences" in result.output
    assert "  GPU KV cache size: 420,800 tokens\n" in result.output
    assert "  Maximum concurrency for 8,192 tokens per request: 51.37x\n" in result.output
    assert all(len(line) <= 100 for line in result.output.splitlines() if not line.startswith("  GPU KV"))


def test_it_does_not_fit_and_what_would_do() -> None:
    result = run("gpt-oss-120b", "--gpu", "h100-sxm", "--preset", "vllm-0.10")
    assert result.exit_code == 0
    assert "Does not fit: nothing is left for KV cache." in result.output
    assert "- lower max_num_seqs to 256 and max_model_len to at most " in result.output
    assert "- raise tp to 2" in result.output
    assert "would log" not in result.output


@pytest.mark.parametrize("columns", [80, 120])
def test_weights_far_larger_than_the_gpu_leave_room_for_figures_and_names(columns: int) -> None:
    result = CliRunner().invoke(main, ["memory", "llama-3.1-405b", "--gpu", "l4"], env={"COLUMNS": str(columns)})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= columns
    (weights,) = (line for line in lines if line.startswith("Weights"))
    assert re.fullmatch(r"Weights +755\.99 +█{24} +405\.9 B parameters, bf16 *", weights)
    assert any(line.startswith("  output weights      3.91") for line in lines)


def test_models_that_can_only_be_planned() -> None:
    text = " ".join(run("qwen3.5-27b", "--gpu", "rtx-5090", "--tp", "2", "--quantization", "fp8").output.split())
    assert "3 x 16 layers that keep 2 states a sequence" in text
    assert "Not simulated yet, only planned: recurrent layers" in text
    assert "Not simulated yet, only planned: a vision tower" in text


def test_every_change_that_it_suggests_does() -> None:
    base = ["llama-3.1-8b", "--gpu", "l4", "--preset", "vllm-0.19", "--max-model-len", "40000", "--json"]
    planned = json.loads(run(*base).output)
    assert not planned["fits"]
    changes = [fix.split() for fix in planned["to_fit"]]
    assert {fix[1] for fix in changes} >= {"max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "tp"}
    for fix in changes:
        option = "--" + fix[1].replace("_", "-")
        assert json.loads(run(*base, option, fix[-1]).output)["fits"], fix
    assert planned["longest_max_model_len"] == int(changes[0][-1])
    longer = ("--max-model-len", str(planned["longest_max_model_len"] + 1))
    assert not json.loads(run(*base, *longer).output)["fits"]


def test_a_pasted_serve_line() -> None:
    short = run("qwen3-30b-a3b", "--gpu", "h100-sxm", "--tp", "2", "--ep", "--json").output
    assert run("qwen3-30b-a3b", "--gpu", "h100-sxm", "--tensor-parallel-size", "2", "--enable-expert-parallel",
               "--json").output == short  # fmt: skip
    assert engine_options(["--max-model-len=8k", "--no-enable-prefix-caching", "--enforce-eager", "--x", "0.5"]) == {
        "max_model_len": "8k", "enable_prefix_caching": False, "enforce_eager": True, "x": 0.5,
    }  # fmt: skip


def test_data_and_pipeline_parallel_ranks() -> None:
    def plan(*words: str) -> dict[str, int]:
        return json.loads(run("qwen3-30b-a3b", "--gpu", "h100-sxm", "--json", *words).output)

    one, spread = plan(), plan("--dp", "2")
    assert spread["weights"]["experts"] * 2 == one["weights"]["experts"]
    assert spread["weights"]["attention"] == one["weights"]["attention"]
    assert spread["block_bytes"] == one["block_bytes"]  # each group has its own KV cache
    staged = plan("--pp", "2")
    assert staged["weights"]["experts"] * 2 == one["weights"]["experts"]
    assert staged["block_bytes"] * 2 == one["block_bytes"]


def test_what_was_logged_counts() -> None:
    words = ("llama-3.1-8b", "--gpu", "l4", "--max-model-len", "8192", "--json")
    planned = json.loads(run(*words, "--logged", "weights=15GiB", "--logged", "activations=512MiB").output)
    assert (planned["weight_bytes"], planned["activation_bytes"]) == (15 * 2**30, 2**29)


def test_a_scenario_takes_what_was_logged(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "model: llama-3.1-8b\nengine: {preset: vllm-0.19, max_model_len: 8192}\ncluster: {gpu: l4}\n"
        "workload: {num_requests: 2, arrivals: {kind: poisson, rate: 1}, lengths: {prompt: {kind: fixed, tokens: 9}, "
        "output: {kind: fixed, tokens: 9}}}\nmemory: {weights: 15GiB, other: 0MiB}\n"
    )
    setup = set_up(load_scenario(file))
    assert setup.pool.memory.weight_bytes == 15 * 2**30
    assert setup.pool.memory.non_torch_bytes == 0
    assert setup.resolved()["memory"] == {"weights": "15GiB", "other": "0B"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["llama-3.1-9b", "--gpu", "l5"],
            ["MODEL: ", "did you mean 'llama-3.1-8b'", "--gpu: 'l5' is not in the catalogue (did you mean 'l4'?)"],
        ),
        (["llama-3.1-8b", "--gpu", "l4", "--tp", "3"], ["tp 3 does not divide the attention heads 32"]),
        (["llama-3.1-8b", "--gpu", "l4", "--max-model-length", "9"], ["did you mean 'max_model_len'"]),
        (["llama-3.1-8b", "--gpu", "l4", "--max-num-sequ", "9"], ["--max-num-sequ: unknown option"]),
        (["llama-3.1-8b", "--gpu", "l4", "--max-num-seqs"], ["--max-num-seqs needs a value; expected a number"]),
        (["llama-3.1-8b", "--gpu", "l4", "--preset", "tgi-3", "--num-shard", "2"], ["--num-shard: set it as --tp\n"]),
        (["llama-3.1-8b", "--gpu", "l4", "--kv-budget", "9"], ["--kv-budget 9: ", "--trace compares"]),
        (["llama-3.1-8b", "--gpu", "l4", "--out", "x.html"], ["--out x.html: only --request writes a page"]),
        (["llama-3.1-8b", "--gpu", "l4", "--json", "--request", "1/2"], ["--request: ", "take out one of them"]),
        (["llama-3.1-8b", "--gpu", "l4", "8192"], ["'8192': expected an option of the engine"]),
        (["llama-3.1-8b", "--gpu", "l4", "--ep"], ["has no experts to deal out"]),
        (["llama-3.1-8b", "--gpu", "l4", "--dcp", "2"], ["dcp 2 does not divide tp 1"]),
        (["llama-3.1-8b", "--gpu", "l4", "--tp", "2", "--dcp", "2"], ["only 1 of 2 GPUs hold the same KV heads"]),
        (["qwen3-30b-a3b", "--gpu", "l4", "--dp", "7"], ["do not divide the experts' intermediate size 768"]),
        (["llama-3.1-8b", "--gpu", "l4", "--logged", "weight=1GiB"], ["did you mean 'weights'"]),
        (["llama-3.1-8b", "--gpu", "l4", "--logged", "weights=1"], ["is not a size such as 14.99GiB"]),
        (["llama-3.1-8b", "--gpu", "l4", "--request", "12"], ["write prompt and output tokens, such as 1024/512"]),
    ],
)
def test_mistakes(words: list[str], said: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert all(text in result.output for text in said), result.output
    assert "Traceback" not in result.output


def test_a_request_that_has_no_life(tmp_path: Path) -> None:
    result = run("llama-3.1-405b", "--gpu", "l4", "--request", "10/10", "--out", str(tmp_path / "x.html"))
    assert result.exit_code == 2
    assert "the engine would not start, so no request runs" in result.output
    assert request_shape("10/20") == (10, 20)


def test_layouts_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,200\n1,300,10\n")
    words = ("llama-3.1-8b", "--gpu", "h100-sxm", "--trace", str(trace), "--kv-budget", "64")
    text = run(*words).output
    assert "Layouts of the KV cache on t.csv" in text
    assert "paged, 16 tokens a block" in text
    layouts = json.loads(run(*words, "--json").output)["layouts"]
    assert [row["name"] for row in layouts][-1] == "paged, at most 64 tokens kept"
    refused = run("gpt-oss-20b", "--gpu", "h100-sxm", "--trace", str(trace))
    assert refused.exit_code == 2
    assert "layers that do not keep every token" in refused.output
