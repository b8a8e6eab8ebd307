"""What bounds an engine: textbook numbers, physics that no claim can beat, and what users do wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import servecast
from reports.explaining import words
from reports.explaining.facts import Explained
from reports.explaining.page import explain_html
from servecast.cli import main
from servecast.errors import ServecastError
from tests.reports.browser import figures_drawn
from tests.servecast.helpers import QUICKSTART

SPLIT = QUICKSTART.with_name("split-serving.yaml")


def of(*overrides: str, **lengths: int) -> Explained:
    (found,) = servecast.explain(QUICKSTART, overrides, **lengths)
    return found


@pytest.fixture(scope="module")
def quickstart() -> Explained:
    return of()


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [
        ("llama-2-7b", 1, 2**19),  # 0.5 MiB a token in fp16
        ("llama-2-7b", 4 * 4096, 8_589_934_592),
        ("llama-3-8b", 512, 64 * 2**20),  # a quarter of what 32 KV heads would take
    ],
)
def test_kv_bytes_are_those_of_textbooks(model: str, tokens: int, size: int) -> None:
    found = of(f"model={model}", "cluster.gpu=a100-sxm", "engine.max_model_len=4096", prompt=512, output=8)
    assert found.kept.token_bytes * tokens == size


def test_no_a100_reads_512_tokens_of_an_8b_model_faster_than_26_ms_nor_answers_faster_than_10() -> None:
    found = of("cluster.gpu=a100-sxm-40gb", "engine.max_model_len=8192", prompt=512, output=128)
    assert found.alone.prefill.seconds > found.alone.prefill.compute_s
    assert 0.023 < found.alone.prefill.compute_s < 0.027, "26 with the embedding and an output for every token"
    assert found.alone.prefill.seconds > 0.026
    assert found.alone.tpot_s > found.by_batch[1].bandwidth_s
    assert 0.009 < found.by_batch[1].bandwidth_s < 0.0105
    assert found.kept.weight_bytes > 14.2e9


def test_a_request_alone_is_the_run_s(quickstart: Explained) -> None:
    """One after the other, in a simulation: the same TTFT, TPOT and E2E."""
    scenario = servecast.load_scenario(QUICKSTART, {
        "workload": {"num_requests": 3, "arrivals": {"kind": "constant", "rate": 0.1},
                     "lengths": {"prompt": {"kind": "fixed", "tokens": quickstart.prompt},
                                 "output": {"kind": "fixed", "tokens": quickstart.output}}},
    })  # fmt: skip
    summary = servecast.simulate(scenario).summary()
    alone = quickstart.alone
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * alone.ttft_s, rel=1e-3)
    assert summary["mean_tpot_ms"] == pytest.approx(1e3 * alone.tpot_s, rel=2e-3)
    assert summary["mean_e2el_ms"] == pytest.approx(1e3 * alone.e2e_s, rel=2e-3)


def test_decoding_turns_compute_bound_where_its_flops_take_as_long_as_its_bytes(quickstart: Explained) -> None:
    """16 bit: two FLOPs a weight and request for two bytes a weight, so about where batch = FLOP/s / (bytes/s)."""
    ridge = quickstart.peaks["bf16"] / quickstart.peaks["bandwidth"]
    assert quickstart.turns_empty is not None
    assert ridge < quickstart.turns_empty < 1.6 * ridge
    assert quickstart.turns is None, "with context every request brings bytes of its own"
    short = of(prompt=16, output=2)
    assert short.turns is not None
    assert short.turns > quickstart.turns_empty


def test_what_is_without_and_with(quickstart: Explained) -> None:
    a = quickstart.alone
    assert a.without_cache_s > 3 * (a.e2e_s - a.front_end_s)
    assert a.prefill.seconds / 2 < quickstart.half_cached_s - a.front_end_s < a.prefill.seconds
    assert quickstart.static is not None
    assert 0.5 < quickstart.static.prompt_waste < 1.0
    steps = list(quickstart.by_chunk.values())
    assert steps == sorted(steps)
    weights, cache = quickstart.changes
    assert weights.now is not None
    assert weights.kept is not None
    assert cache.kept is not None
    assert weights.now.tpot_s < 0.8 * a.tpot_s
    assert weights.kept.weight_bytes < 0.6 * quickstart.kept.weight_bytes
    assert cache.kept.token_bytes * 2 == quickstart.kept.token_bytes


def test_equal_lengths_waste_nothing_in_static_batches() -> None:
    lengths = [f"workload.lengths.{name}={{kind: fixed, tokens: 100}}" for name in ("prompt", "output")]
    static = of(*lengths).static
    assert static is not None
    assert static.prompt_waste == static.decode_waste == 0.0


def test_what_cannot_be_changed_says_why() -> None:
    found = of("engine={preset: transformers}", prompt=100, output=10)
    assert [change.now for change in found.changes] == [None, None]
    assert all(line.startswith(("fp8 weights: ", "an fp8 KV cache: ")) for line in words.not_changed(found))
    trt = of("engine={preset: tensorrt-llm-1}", prompt=100, output=10)
    assert trt.changes[1].kept is not None, "it has its own name for the dtype of its cache"


@pytest.mark.parametrize("preset", ["orca", "llama.cpp", "transformers", "sglang-0.5"])
def test_engines_of_every_kind(preset: str) -> None:
    found = of(f"engine={{preset: {preset}}}", prompt=500, output=100)
    assert found.alone.e2e_s > found.alone.ttft_s > found.alone.front_end_s
    assert [found.by_chunk == {}, found.kept.at_once == 1] == [preset == "transformers"] * 2


def test_several_pools_is_looked_at() -> None:
    found = servecast.explain(SPLIT)
    assert [each.pool for each in found] == ["prefill", "decode"]
    assert list(servecast.figures(found))[-1] == "roofline_2"


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (["cluster.tp=4", "cluster.pp=2", "model=llama-3.1-70b"], {}, "dp 1, pp 2, pcp 1; explain looks at one engine"),
        ([], {"prompt": 200_000}, "200,000 prompt and 256 output tokens are more than a request may have here"),
        (["cluster.gpu=h101"], {}, "h101"),
    ],
)
def test_what_it_does_not_look_at(overrides: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ServecastError, match=said):
        servecast.explain(QUICKSTART, overrides, **options)


def test_from_the_command_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["explain", str(QUICKSTART), "--out", str(tmp_path), "--prompt", "2000"])
    assert done.exit_code == 0, done.output
    assert "Its prompt is bound by compute" in done.output
    assert "Its answer is bound by memory bandwidth" in " ".join(done.output.split())
    saved = json.loads((tmp_path / "explain.json").read_text(encoding="utf-8"))[0]
    assert saved["prompt"] == 2000
    assert saved["alone"]["prefill"]["bound"] == "compute"
    plain = CliRunner().invoke(main, ["explain", str(QUICKSTART), "--json"])
    assert json.loads(plain.output)[0]["output"] == 256


def test_the_page_in_a_browser(quickstart: Explained, tmp_path: Path) -> None:
    assert figures_drawn(explain_html((quickstart,)), tmp_path) == 4


def test_what_it_says_of_batches_agrees_with_where_decoding_turns() -> None:
    for model, tp in (("gpt-oss-20b", 1), ("llama-3.1-70b-fp8", 4)):
        found = of(f"model={model}", f"cluster.tp={tp}")
        assert found.turns is None
        assert found.batch.bound != "compute"
    assert found.rate == "fp8"
    assert "TFLOP/s in 8 bit" in words.roofline(found)[0]
    assert found.changes[0].why == "its weights have no more bits than that"


def test_engines_that_do_not_mix_pause_for_prompts() -> None:
    mixed, paused = (of(f"engine={{preset: sglang-0.5, enable_mixed_chunk: {each}}}") for each in ("true", "false"))
    assert paused.by_chunk[512] > mixed.by_chunk[512]


@pytest.mark.parametrize("lengths", [{"prompt": 1, "output": 1}, {"prompt": 1, "output": 2}])
def test_the_shortest_requests(lengths: dict[str, int]) -> None:
    said = " ".join(words.answer(of(**lengths)))
    assert "1 token in" in said
    assert ("then a token every" in said) == (lengths["output"] > 1)
