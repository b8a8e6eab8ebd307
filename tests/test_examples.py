"""The worked examples: every command of their pages runs here, with fewer requests, and its answer points to where the
page says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from servecast.cli import main

REPO = Path(__file__).parents[1]
FOLDER = REPO / "docs" / "examples"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
PLAN = "--vary engine.max_num_seqs=256 --draws 0 --workers 1"


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the scenarios, and with traces of the form and names that the pages give, which are made up."""
    (tmp_path / "scenarios").symlink_to(REPO / "scenarios")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    write_azure(tmp_path / "AzureLLMInferenceTrace_conv.csv", rng)
    write_mooncake(tmp_path / "conversation_trace.jsonl", rng)


def write_azure(path: Path, rng: np.random.Generator) -> None:
    """A minute with the lengths of the trace, and more than twice the traffic in its middle."""
    gaps = np.concatenate([rng.exponential(1 / rate, int(20 * rate)) for rate in (4.0, 10.0, 4.0)])
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second in np.cumsum(gaps):
        minute, seconds = divmod(second, 60)
        prompt, output = rng.gamma(1.1, 1050) + 1, rng.gamma(1.7, 124) + 1
        rows.append(f"2023-11-16 18:{minute:02.0f}:{seconds:010.7f},{min(prompt, 14000):.0f},{min(output, 1000):.0f}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_mooncake(path: Path, rng: np.random.Generator) -> None:
    """Conversations of six turns half a minute apart, each 2,048 tokens longer than the one before; a grid of 3 s."""
    rows = []
    for session in range(30):
        start = 3000 * int(rng.integers(0, 40))
        for turn in range(6):
            blocks = 4 * (turn + 1)
            rows.append(
                {
                    "timestamp": start + 30_000 * turn,
                    "input_length": 512 * blocks,
                    "output_length": int(rng.integers(100, 400)),
                    "hash_ids": [1000 * session + block for block in range(blocks)],
                }
            )
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def commands(page: Path) -> list[list[str]]:
    """The words behind `servecast` of every command in the shell blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert all(line.startswith("servecast ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


def answers(page: str, *smaller: str, percentile: str = "p99") -> list[Any]:
    """What the page's commands print as JSON, each made smaller by the options in its place, and by a `percentile` in
    place of p99 that takes fewer requests to be known."""
    found = []
    for words, more in zip(commands(FOLDER / f"{page}.md"), smaller, strict=True):
        words = [word.replace("p99", percentile) for word in words]
        result = CliRunner().invoke(main, [*words, *shlex.split(more), "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    return found


def values(compared: Any, metric: str) -> list[float]:
    """A metric of a comparison, in the order of its scenarios."""
    (line,) = [each for each in compared["metrics"] if each["metric"] == metric]
    return [each["mean"] for each in line["values"].values()]


def h100s_for_azure() -> None:
    """A peak that four GPUs do not carry and eight do; in fp8 four do."""
    steps = (f"{PLAN} --tp 2,4", "", f"{PLAN} --tp 2", "--set workload.num_requests=600")
    _, plan, four, fp8, steady = answers("h100s-for-azure", "", *steps)
    assert plan["answer"]["gpus"] == 8
    assert {option["what"]: option["status"] for option in plan["options"]} == {
        "h100-sxm, tp 2, max_num_seqs 256": "invalid", "h100-sxm, tp 4, max_num_seqs 256": "meets",
    }  # fmt: skip
    assert four["p99_ttft_ms"] > 1000 > steady["p99_ttft_ms"]
    assert fp8["answer"]["gpus"] == 4


def token_budget() -> None:
    """The smaller the budget, the shorter the gaps; the smallest makes first tokens late."""
    (found,) = answers("token-budget", "--set workload.num_requests=300 --seeds 2 --workers 1")
    assert [each["label"].split()[1] for each in found["scenarios"]] == ["8192", "1024", "2048", "4096", "16384"]
    default, b1024, b2048, b4096, _ = values(found, "p99_itl_ms")
    assert b1024 < b2048 < b4096 < default
    default, b1024, b2048, *_ = values(found, "p50_ttft_ms")
    assert b1024 > 1.05 * default
    assert b2048 < b1024 / 1.05


def gpu_for_8b() -> None:
    """Three L40S are the cheapest at 8 a second and slow; at 30 the H100 is the cheapest."""
    plans = [f"{PLAN} --set workload.num_requests={count}" for count in (300, 600)]
    compared = "--set workload.num_requests=200 --seeds 2 --workers 1"
    few, many, found = answers("gpu-for-8b", *plans, compared, percentile="p80")
    assert (few["answer"]["gpu"], few["answer"]["gpus"], few["runner_up"]["gpu"]) == ("l40s", 3, "h100-sxm")
    dollars = {each["gpu"]: each["dollars_per_hour"] for each in many["options"] if each["status"] == "meets"}
    assert min(dollars, key=dollars.__getitem__) == "h100-sxm"
    h100, l40s, h200 = values(found, "p50_tpot_ms")
    assert h200 < h100 < l40s / 3
    h100, l40s, h200 = values(found, "cost_per_million_output_tokens")
    assert h100 < h200


def split_70b() -> None:
    """Apart, most replicas read; that takes fewer GPUs than together, whose answers are stretched."""
    small = "--set workload.num_requests=100 --workers 1"
    ratios, together, plan = answers("split-70b", small, small, f"{small} --draws 0", percentile="p80")
    met = {
        (point["cluster.pools.0.replicas"], point["workload.arrivals.rate"]): point["slo_attainment"]
        for point in ratios["points"]
    }
    alike = {point["workload.arrivals.rate"]: point["slo_attainment"] for point in together["points"]}
    assert met[3, 3] > 0.95
    assert met[3, 3] > met[2, 3] > met[1, 3]
    assert met[3, 3] > alike[3] + 0.3
    gpus = {option["what"]: option["gpus"] for option in plan["options"] if option["status"] == "meets"}
    assert plan["answer"]["what"].startswith("h100-sxm, tp 2, 3 prefill : 1 decode")
    assert gpus.pop(plan["answer"]["what"]) < min(gpus.values())
    assert len(plan["options"]) == 4


def prefix_routing() -> None:
    """More is found with affinity, most of all where the caches are large; and first tokens come sooner."""
    small = "--seeds 2 --workers 1 --set cluster.replicas="
    tight = f"{small}2 --set engine.gpu_memory_utilization=0.3 --set engine.max_model_len=32768"
    h100, h200, chat = answers("prefix-routing", tight, tight, f"{small}4 --set workload.num_sessions=60")
    for found in (h100, h200, chat):
        blind, _, affinity = values(found, "prefix_cache_hit_rate")
        assert affinity > 1.2 * blind
    assert values(h200, "prefix_cache_hit_rate")[2] > 1.2 * values(h100, "prefix_cache_hit_rate")[2]
    blind, _, affinity = values(chat, "p50_ttft_ms")
    assert affinity < 0.8 * blind


def fp8_or_second_gpu() -> None:
    """On one GPU bf16 has no room for its KV; fp8 has, at half the cost of two GPUs, which are faster."""
    small = "--set workload.num_requests=120 --seeds 2 --workers 1"
    light, heavy = answers("fp8-or-second-gpu", small, small)
    two, one, weights, both = values(light, "p99_ttft_ms")
    assert one > 5 * both
    assert two < both
    two, one, weights, both = values(light, "kv_peak_fraction")
    assert one > weights > both
    two, _, _, both = values(light, "cost_per_million_output_tokens")
    assert both < 0.6 * two
    two, _, _, both = values(heavy, "p50_tpot_ms")
    assert both > 1.3 * two


CHECKS: dict[str, Callable[[], None]] = {
    "h100s-for-azure": h100s_for_azure,
    "token-budget": token_budget,
    "gpu-for-8b": gpu_for_8b,
    "split-70b": split_70b,
    "prefix-routing": prefix_routing,
    "fp8-or-second-gpu": fp8_or_second_gpu,
}
"""Page -> what its commands, run small, must answer."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_answers_what_its_commands_do(page: str) -> None:
    CHECKS[page]()


def test_the_index_has_every_page() -> None:
    assert sorted(re.findall(r"\]\((.*)\.md\)", (FOLDER / "README.md").read_text(encoding="utf-8"))) == PAGES
