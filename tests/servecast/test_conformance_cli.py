"""`servecast calibrate observe` and `check`, and what a comparison says in words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from calibrate.observe.read import read_steps
from servecast.conformance.check import check_conformance
from servecast.conformance.cli import COMMANDS
from servecast.errors import ServecastError
from sim.schedulers.vllm_v1 import VllmV1
from tests.calibrate.observe.helpers import HEAD, LINES, f, q, s, text
from tests.reference import reference
from tests.servecast.helpers import QUICKSTART

GROUP = click.Group(commands={str(command.name): command for command in COMMANDS})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*args: object) -> Result:
    return CliRunner().invoke(GROUP, [str(arg) for arg in args])


def mistakes(*args: object) -> tuple[str, ...]:
    error = call(*args).exception
    assert isinstance(error, ServecastError)
    return error.problems


def test_observe_writes_a_file_that_stands_alone() -> None:
    out = call("observe")
    assert out.exit_code == 0, out.output
    assert "vllm serve MODEL ... --scheduler-cls observer.Observer" in out.output
    assert "servecast calibrate check SCENARIO --steps steps.jsonl" in out.output
    written = Path("observer.py").read_text()
    assert "class Observer" in written
    assert "from servecast" not in written
    assert "import servecast" not in written
    assert call("observe").exit_code == 0  # again: it is the same file


def test_observe_never_takes_another_file_away() -> None:
    Path("observer.py").write_text("mine")
    assert mistakes("observe") == ("--out observer.py: exists and is another file; name another, or take it away",)
    assert Path("observer.py").read_text() == "mine"
    assert call("observe", "--out", "watch.py").output.count("watch.Observer") == 1


def test_observe_says_where_it_cannot_write() -> None:
    assert mistakes("observe", "--out", "no/such/observer.py")[0].startswith("--out no/such/observer.py: cannot be")
    assert mistakes("observe", "--out", "my-observer.py")[0].startswith("--out my-observer.py: vLLM imports it by its")


def checked(*lines: Any, head: dict[str, Any] = HEAD, overrides: Iterable[str] = ()) -> str:
    Path("steps.jsonl").write_text(text(*lines, head=head))
    out = call("check", QUICKSTART, "--steps", "steps.jsonl", *(word for o in overrides for word in ("--set", o)))
    assert out.exit_code == 0, out.output
    return out.output


def test_check_says_how_many_steps_agree() -> None:
    out = checked(*LINES, head=HEAD | {"max_num_seqs": 1024, "num_gpu_blocks": 101})
    assert (
        out.splitlines()[-1] == "Your engine and our model agree on all 4 steps (0 preemptions, 1 requests finished)."
    )
    assert "the engine has 101 KV blocks, the scenario " in out
    assert "the engine's are used here." in out
    assert out.count("Warning") == 1


def test_check_says_where_engine_and_scenario_contradict_each_other() -> None:
    said = HEAD | {
        "vllm": "0.16.0rc1", "gpu": "NVIDIA A100-SXM4-80GB", "model": "Qwen/Qwen3-8B", "dtype": "float32",
        "async_scheduling": False, "enable_prefix_caching": True, "tensor_parallel_size": 2, "data_parallel_size": 4,
    }  # fmt: skip
    out = checked(*LINES, head=said, overrides=["engine.dtype=half"])
    for warning in (
        "the engine ran with max_num_seqs 8, the scenario has 1024 (vLLM v0.19.1 default for 79 GiB).",
        "the engine ran with async_scheduling False, the scenario has True",
        "the engine ran with tensor_parallel_size 2, the scenario has cluster.tp 1.",
        "the engine is one of 4 data-parallel ones, which may hold back prefills.",
        "the engine ran with prefix caching, and nobody knows what its prompts shared: steps with a hit differ.",
        "the engine is vLLM 0.16.0rc1, for which vllm-0.15 is the preset; the scenario has vllm-0.19.",
        "the engine served Qwen/Qwen3-8B, the scenario llama-3.1-8b.",
        "the engine ran with dtype float32, the scenario has half.",
        "the engine ran on NVIDIA A100-SXM4-80GB, the scenario on NVIDIA H100-SXM5-80GB.",
    ):
        assert f"Warning: {warning.removesuffix('.')}" in out, warning


def test_check_finds_no_contradiction_where_there_is_none() -> None:
    said = {
        "servecast_steps": 1, "vllm": "0.19.1", "gpu": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16",
        "max_num_seqs": 1024, "model": "meta-llama/Llama-3.1-8B-Instruct", "async_scheduling": True,
        "kv_cache_dtype": "auto", "enable_prefix_caching": False, "tensor_parallel_size": 1,
        "scheduling_policy": "fcfs", "num_gpu_blocks": 101,
    }  # fmt: skip
    out = checked(*LINES, head=said, overrides=["engine.num_gpu_blocks_override=101", "engine.max_model_len=1600"])
    assert "Warning" not in out


def test_check_of_a_recorded_engine() -> None:
    folder = reference("reference", "vllm_cpu")
    Path("mine.yaml").write_text(
        f"name: a tiny model on a CPU\nmodel: {folder}/model_config.json\ncluster: {{gpu: cpu, profile: datasheet}}\n"
        "engine: {preset: vllm-0.32, max_num_seqs: 16, max_num_batched_tokens: 256, max_model_len: 1024,\n"
        "  block_size: 32, num_gpu_blocks_override: 120, async_scheduling: false}\n"
        "workload: {num_requests: 1, arrivals: {kind: poisson, rate: 1},\n"
        "  lengths: {prompt: {kind: fixed, tokens: 8}, output: {kind: fixed, tokens: 8}}}\n"
    )
    out = call("check", "mine.yaml", "--steps", folder / "kv_pressure" / "steps_heavy6_r1.csv")
    assert out.exit_code == 0, out.output
    assert "Warning" not in out.output
    assert "agree on all 828 steps (12 preemptions, 100 requests finished)." in out.output


POLICY = VllmV1(512, 8)


def compare(tmp_path: Path, *lines: Any, policy: VllmV1 = POLICY, head: dict[str, Any] = HEAD) -> Any:
    (tmp_path / "steps.jsonl").write_text(text(*lines, head=head))
    return check_conformance(read_steps(tmp_path / "steps.jsonl"), policy, 101, 16)


def test_a_prefix_hit_differs_once(tmp_path: Path) -> None:
    """The second request finds 32 of its 40 tokens; after it, engine and model go on alike."""
    found = compare(
        tmp_path, q(0, prompt=40), s(0, [[0, 40, 0]], free=97), s(1, decodes=1, kv=40, free=97), q(1, 2, prompt=40),
        s(2, [[1, 8, 32]], 1, 41, 2, free=96, hits=32), f(0, 3), s(3, decodes=1, kv=40, free=97),
        s(4, decodes=1, kv=41, free=97), f(1, 5), s(5, running=0, free=100),
    )  # fmt: skip
    assert (found.steps, found.compared, found.agreeing) == (6, 6, 5)
    assert found.share == pytest.approx(5 / 6)
    assert found.fields == {"chunks": 1}
    (difference,) = found.differences
    assert str(difference) == (
        "step 2 at 0.002 s: prefill chunks 8@32 (model: 40@0); "
        "32 tokens came from the prefix cache; the record does not say what prompts share"
    )
    said = found.text()
    assert said.startswith(
        "Your engine and our model agree on 83.3 % of 6 steps (0 preemptions, 2 requests finished).\n"
    )
    assert "They differ in 1: prefill chunks in 1. The first:\n  step 2" in said
    assert "Note: in 1 steps prompts were found in the prefix cache, and nobody knows what they share: they" in said
    assert "Note: free KV blocks are not compared" in said


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (VllmV1(16, 8), "it takes more into a step: a larger max_num_batched_tokens or max_num_seqs"),
        (VllmV1(512, 8, long_prefill_token_threshold=8), "it takes more into a step"),
    ],
)
def test_likely_reasons(tmp_path: Path, policy: VllmV1, why: str) -> None:
    found = compare(tmp_path, *LINES, policy=policy)
    assert found.agreeing == 3
    assert found.differences[0].why.startswith(why)


def test_other_blocks_are_recognised(tmp_path: Path) -> None:
    lines = [[*line[:12], line[12] + 5, *line[13:]] if line[0] == "s" else line for line in LINES]
    found = compare(tmp_path, *lines)
    assert found.fields == {"free_blocks": 1}  # from then on the model has the engine's blocks
    assert found.differences[0].why.startswith("blocks are counted otherwise")
    assert found.text().startswith("Your engine and our model agree on 75 % of 4 steps")


def test_a_record_that_contradicts_itself_is_left_until_the_engine_is_idle(tmp_path: Path) -> None:
    """Step 1 decodes two requests where there is one; so does nobody's state."""
    again = [
        q(1, 4),
        s(4, [[1, 20, 0]]),
        s(5, decodes=1, kv=20),
        s(6, decodes=1, kv=21),
        f(1, 7),
        s(7, running=0, free=100),
    ]
    found = compare(tmp_path, *LINES[:2], s(1, decodes=2, kv=40), *LINES[3:-1], *again)
    assert (found.steps, found.compared, found.agreeing) == (8, 6, 5)
    assert "Not compared: 2 steps that follow on a difference." in found.text()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([q(0), s(0, [[0, 20, 0]]), s(1, decodes=1, kv=20, drafts=3)], "speculative decoding in 1 steps, which is not"),
        (
            [q(0), s(0, [[0, 20, 0]]), s(1, updates=0), s(2, updates=0)],
            "up to 3 steps in flight at once, as with pipeline",
        ),
        ([q(0, kinds="pooling"), s(0, [[0, 20, 0]])], "1 requests of a pooling model"),
    ],
)
def test_what_has_no_counterpart_is_refused(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(ServecastError) as caught:
        compare(tmp_path, *lines)
    assert said in caught.value.problems[0]


def test_what_is_special_is_said(tmp_path: Path) -> None:
    found = compare(tmp_path, q(0, kinds="lora structured"), *LINES[1:])
    assert found.notes == (
        "1 requests with lora, which is not modelled",
        "1 requests with structured, which is not modelled",
    )


def test_the_text_is_for_people_and_its_numbers_for_programs(tmp_path: Path) -> None:
    found = compare(tmp_path, *LINES)
    assert json.dumps(dict(found.fields)) == "{}"
    assert found.text() == "Your engine and our model agree on all 4 steps (0 preemptions, 1 requests finished)."
