"""`servecast memory` for engines other than vLLM: their own options, rules and units."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from calibrate.engine import preset_names
from servecast.errors import ServecastError
from tests.calibrate.helpers import plan
from tests.servecast.test_memory_cli import run

POOLS = {
    "sglang-0.5": "--max-total-tokens",
    "tensorrt-llm-1": "--kv-cache-config.max-tokens",
    "tgi-3": "--max-batch-total-tokens",
    "mlc-llm": "--max-total-sequence-length",
    "llama.cpp": "--ctx-size",
    "vllm-0.19": "--num-gpu-blocks-override",
    "vllm-0.32": "--num-gpu-blocks-override",
}


def planned(*words: str) -> Any:
    result = run("llama-3.1-8b", "--gpu", "l4", "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def shown(*words: str) -> str:
    return " ".join(run("llama-3.1-8b", "--gpu", "l4", *words).output.split())


def follow(clause: str) -> list[str]:
    """What a clause such as "lower a to 256 and b to at most 9" asks for, as options."""
    found = re.findall(r"([\w.]+) to (?:at most |at least )?([\w.]+)", clause)
    return [word for option, value in found for word in ("--" + option.replace("_", "-"), value)]


@pytest.mark.parametrize("preset", preset_names())
def test_every_change_that_it_suggests_does(preset: str) -> None:
    for words in (["--preset", preset], *([["--preset", preset, POOLS[preset], "99999"]] if preset in POOLS else [])):
        found = planned(*words)
        assert found["fits"] == (not found["to_fit"])
        for clause in found["to_fit"]:
            if clause == "use a GPU with more memory":
                assert len(found["to_fit"]) == 1
                continue
            assert planned(*words, *follow(clause))["fits"], clause


@pytest.mark.parametrize(
    ("preset", "option"), [("orca", "max_model_len"), ("transformers", "max_length"), ("tgi-3", "max_total_tokens")]
)
def test_the_longest_that_starts(preset: str, option: str) -> None:
    """Orca's and Transformers' step grows with it: length times batch."""
    words = ("--preset", preset)
    longest = planned(*words)["longest_max_model_len"]
    assert f"- lower {option} to at most {longest} " in shown(*words)
    assert f"Longest {option} {longest:,} starts" in shown(*words)
    typed = "--" + option.replace("_", "-")
    assert planned(*words, typed, str(longest))["fits"]
    assert not planned(*words, typed, str(longest + 1))["fits"]


def test_orca_is_not_told_to_set_what_it_lacks() -> None:
    with pytest.raises(ServecastError, match=r"To fit: lower max_model_len to at most \d+, or raise tp to 4$"):
        plan(gpu="l4", preset="orca")


def test_tensorrt_llm_starts_with_any_length() -> None:
    """Its pool is a share of what is free: no sequence has to fit, nor a prompt the step (chunked prefill is off)."""
    text = shown("--preset", "tensorrt-llm-1")
    assert "Fits: " in text
    assert "Longest max_seq_len 131,072 (all that the model allows) starts" in text
    found = planned("--preset", "tensorrt-llm-1")
    ((used, share, free),) = re.findall(r"([\d.]+) and ([\d.]+) of the other ([\d.]+)", text)
    assert float(used) + float(share) * float(free) == pytest.approx(found["budget_bytes"] / 2**30, abs=0.01)


def test_a_share_of_what_is_free_where_nothing_is() -> None:
    result = run("qwen2.5-32b", "--gpu", "l40s", "--preset", "tensorrt-llm-1")
    text = " ".join(result.output.split())
    (missing,) = re.findall(r"KV cache -([\d.]+) \1 GiB too little", text)
    terms = re.findall(r"(?:Weights|Activations|CUDA, cuBLAS) ([\d.]+)", text)
    assert sum(map(float, terms)) - 44.40 == pytest.approx(float(missing), abs=0.02)
    assert re.search("The engine's 44.40 ─+ all of 44.40", text)


def test_sglangs_share_leaves_the_overhead_out() -> None:
    assert "0.833 of 22.03, for weights and KV cache" in shown("--preset", "sglang-0.5")


def test_llama_cpps_slots_share_the_context() -> None:
    words = ("--preset", "llama.cpp")
    assert "- lower ctx_size to at most 54353 - raise tp" in shown(*words)
    assert "Longest ctx_size / parallel 13,588 starts" in shown(*words)
    assert "set by ctx_size" in shown(*words)
    assert planned(*words, "--ctx-size", "54353")["fits"]
    assert not planned(*words, "--ctx-size", "54360")["fits"]


def test_pools_are_counted_as_the_engine_counts_them() -> None:
    text = shown("--preset", "tgi-3", "--max-batch-total-tokens", "99999")
    assert "max_batch_total_tokens 99999 needs" in text
    (room,) = re.findall(r"lower max_batch_total_tokens to at most (\d+) ", text)
    assert int(room) > 40_000
    assert not planned("--preset", "tgi-3", "--max-batch-total-tokens", str(int(room) + 16))["fits"]


@pytest.mark.parametrize("preset", [name for name in preset_names() if not name.startswith("vllm")])
def test_words_of_vllm_are_vllms(preset: str) -> None:
    text = shown("--preset", preset)
    assert "null block" not in text
    if preset not in ("orca", "sarathi"):
        assert not re.search("max_model_len|max_num_seqs|num_gpu_blocks_override|gpu_memory_utilization [0-9]", text)
    assert "null block" in shown("--preset", "vllm-0.32")
