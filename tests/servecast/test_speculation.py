"""Speculative decoding from a scenario to its results: what is said, what is refused, and what comes out."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from servecast.cli import main
from servecast.errors import ServecastError
from servecast.planning.bounds import bound
from servecast.planning.slo import parse_requirements
from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up

SCENARIO = """
model: llama-3.1-8b
engine: {preset: vllm-0.24, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
speculation: {acceptance: [0.75, 0.55, 0.4]}
cluster: {gpu: h100-sxm}
workload:
  num_requests: 300
  arrivals: {kind: poisson, rate: 10}
  lengths: {prompt: {kind: fixed, tokens: 500}, output: {kind: uniform, low: 1, high: 300}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "drafts.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def run(file, *changes):
    return simulate(load_scenario(file, changes))


def refused(file, *changes):
    with pytest.raises(ServecastError) as caught:
        set_up(load_scenario(file, changes))
    return "\n".join(caught.value.problems)


def test_tokens_come_as_fast_as_they_are_accepted(file):
    drafts, plain = run(file), run(file, "engine.speculative_config=null")
    with_s, without = drafts.summary(), plain.summary()
    assert with_s["mean_acceptance_length"] == pytest.approx(2.7, abs=0.03)
    assert with_s["draft_acceptance_rate"] == pytest.approx(1.7 / 3, abs=0.01)
    assert with_s["accepted_draft_tokens"] < with_s["draft_tokens"]
    computed = drafts.steps["draft_tokens"].sum()  # with the last steps, which asynchronous engines run in vain
    assert with_s["draft_tokens"] <= computed <= with_s["draft_tokens"] + 3 * 300
    assert with_s["total_output_tokens"] == without["total_output_tokens"] == drafts.steps["output_tokens"].sum()
    assert 1.8 < without["mean_tpot_ms"] / with_s["mean_tpot_ms"] < 2.7
    # Several tokens come in one message: fewer gaps than tokens, and longer ones
    assert with_s["mean_itl_ms"] == pytest.approx(2.7 * with_s["mean_tpot_ms"], rel=0.1)
    assert "draft_tokens" not in without
    assert any("speculation is not used" in note for note in plain.manifest["notes"])


def test_draws_are_a_requests_own(file):
    """The same seed and request: the same draws, whatever else changes; another seed, others."""
    one, again, other = run(file), run(file), run(file, "seed=3", "workload.lengths.output={kind: fixed, tokens: 50}")
    assert one.requests.equals(again.requests)
    assert other.summary()["mean_acceptance_length"] != one.summary()["mean_acceptance_length"]
    drafting = set_up(load_scenario(file)).pool.drafting
    small = set_up(load_scenario(file, ["cluster.gpu=l40s"])).pool.drafting
    assert drafting.draws(17, 40)[1].tolist() == small.draws(17, 40)[1].tolist() != drafting.draws(18, 40)[1].tolist()
    shares = np.mean([[np.mean(drafting.draws(i, 100)[1] > k) for k in (1, 2, 3)] for i in range(400)], axis=0)
    assert shares == pytest.approx([0.75, 0.55, 0.4], abs=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("speculation.acceptance=1.4", "speculation.acceptance: 1.4 is not 1 or less"),
        ("speculation.acceptance=true", "speculation.acceptance: true is not a number"),
        (
            "speculation.acceptance=[0.5, 0.6, 0.2]",
            "speculation.acceptance.1: 0.6 at position 2 is above 0.5 before it",
        ),
        ("speculation.acceptance=[0.5, 0.4, -1]", "speculation.acceptance.2: -1 is not 0 or more"),
        ("speculation.acceptance=[]", "speculation.acceptance: no positions; give"),
        ("speculation.acceptance=[0.5, 0.4]", "said for 2 positions, and the engine drafts 3 tokens"),
        ("speculation.acceptance=deepseek", "'deepseek' is no measured table"),
        ("speculation.acceptance={length: 5}", "5 tokens a step, and with 3 drafted there are at most 4"),
        ("speculation.acceptance={lengths: [1.5, 3.5, 3.6]}", "lengths.1: 3.5 tokens a step, and with 2 drafted there"),
        ("speculation.acceptance={length: 2, lengths: [1.5]}", "give either length or lengths"),
        ("speculation.proposes=0.5", "speculation.proposes: 0.5, and eagle3 drafts in every step"),
        ("speculation=null", "speculation.acceptance: missing, and engine.speculative_config drafts 3 tokens"),
        ("engine.speculative_config.num_speculative_tokens=9", "said for 3 positions, and the engine drafts 9 tokens"),
        ("model=gpt-oss-20b", "has layers with windows, with which drafts are not modelled"),
        (
            "engine.speculative_config={method: draft_model, model: llama-3.1-70b, num_speculative_tokens: 3}",
            "131.45 GiB of them of llama-3.1-70b, which drafts",
        ),
        ("cluster.pp=2", "drafts with pp 2 are not modelled"),
    ],
)
def test_wrong_speculation(file, change, said):
    assert said in refused(file, change)


def test_what_acceptance_can_be(file):
    def length(*changes):
        drafting = set_up(load_scenario(file, changes)).pool.drafting
        return 1 + sum(drafting.rates)

    assert length("speculation.acceptance=0.5") == pytest.approx(1.875)
    assert length("speculation.acceptance={length: 2.2}") == pytest.approx(2.2)
    assert length("speculation.acceptance={lengths: [1.8, 2.3, 2.5, 2.6]}") == pytest.approx(2.5)
    assert length("speculation.acceptance=qwen3.5-397b-mtp") == pytest.approx(3.33)
    ngram = ["engine.speculative_config.method=ngram", "speculation.proposes=0.25"]
    assert set_up(load_scenario(file, ngram)).pool.drafting.proposes == 0.25
    assert run(file, *ngram).summary()["mean_acceptance_length"] == pytest.approx(1 + 0.25 * 1.7, abs=0.03)


def test_a_command_line_that_speculates(file):
    line = (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config "
        '\'{"method": "eagle", "num_speculative_tokens": 2, "model": "llama-3.1-8b"}\''
    )
    setup = set_up(load_scenario(file, ["speculation.acceptance=0.6"], line))
    assert (setup.pool.engine.speculation.method, setup.pool.drafting.tokens) == ("eagle", 2)


def test_first_answers_of_streams_with_drafts(file):
    """Where token n of a request is one of several of a step, it came when that step ended."""
    result = run(file, "workload.reasoning=0.5", "workload.lengths.output={kind: fixed, tokens: 100}")
    first = result.column("first_answer_s", finished=True)
    ttft, e2e = (result.column(name, finished=True) for name in ("ttft_s", "e2e_s"))
    assert (first > ttft).all()
    assert (first < e2e).all()
    halfway = (first - ttft) / (e2e - ttft)
    assert halfway.mean() == pytest.approx(0.5, abs=0.02)
    drafting = set_up(load_scenario(file)).pool.drafting
    gains = np.cumsum(drafting.draws(0, 102)[1])
    steps = [1 + int(np.searchsorted(gains, n)) for n in (50, 99)]  # token 51 is the first of the answer
    ends = result.steps.filter(result.steps["step"] > result.column("first_step", finished=True)[0])["end_s"].to_numpy()
    arrival = result.column("arrival_s", finished=True)[0]
    assert first[0] + arrival == pytest.approx(ends[steps[0] - 1])
    assert e2e[0] + arrival == pytest.approx(ends[steps[1] - 1])


def test_it_is_explained_and_reported(file, tmp_path):
    answered = CliRunner().invoke(main, ["explain", str(file), "--json"])
    assert answered.exit_code == 0, answered.output
    worth = json.loads(answered.output)
    worth = (worth[0] if isinstance(worth, list) else worth)["drafts"]
    plain_s, drafted_s, length = worth["by_batch"]["1"]
    assert worth["length"] == length == pytest.approx(2.7)
    assert drafted_s / 2.7 < plain_s < drafted_s
    shown = CliRunner().invoke(
        main, ["explain", str(file), "--out", str(tmp_path / "explained")], env={"COLUMNS": "80"}
    )
    assert "TPOT without" in shown.output
    assert f"With its drafts a token comes every {1e3 * drafted_s / length:.2f} ms" in " ".join(shown.output.split())
    said = CliRunner().invoke(main, ["run", str(file), "--out", str(tmp_path / "ran")], env={"COLUMNS": "80"})
    assert "tokens a sequence and step; at the mean batch" in " ".join(said.output.split())
    page = (tmp_path / "ran" / "report.html").read_text(encoding="utf-8")
    assert "times as fast" in page
    assert "drafts" in json.loads((tmp_path / "ran" / "manifest.json").read_text(encoding="utf-8"))["pools"][0]


def test_intervals_and_acceptance_are_listed(file):
    listed = CliRunner().invoke(main, ["list", "acceptance"])
    assert "qwen3.5-397b-mtp" in listed.output
    many = CliRunner().invoke(main, ["run", str(file), "--intervals", "--set", "workload.num_requests=30"])
    assert many.exit_code == 0, many.output


def test_bounds_of_plans_know_that_a_step_yields_several_tokens(file):
    required = parse_requirements(["p50 tpot < 4ms"])
    drafts, plain = (set_up(load_scenario(file, c)) for c in ((), ("engine.speculative_config=null",)))
    assert "a token alone takes" in bound(plain, required).why
    assert not bound(drafts, required).why
    assert simulate(drafts).summary()["p50_tpot_ms"] < 4


def test_a_budget_below_all_drafts_is_priced_as_what_it_lets_in(file):
    """695 sequences with 3 drafts are 2,780 tokens."""
    small = "engine.max_num_batched_tokens=2048"
    setup = set_up(load_scenario(file, (small,)))
    worth = setup.pools[0].draft_worth(550, 695)
    assert worth.by_batch[695][2] == pytest.approx(2.7 * 512 / 695)
    assert not bound(setup, parse_requirements(["p99 ttft < 1s"])).why
    for command in (["run", "--set", "workload.num_requests=5"], ["diagnose", "--set", "workload.num_requests=50"]):
        done = CliRunner().invoke(main, [command[0], str(file), *command[1:], "--set", small, "--json"])
        assert done.exit_code == 0, done.output
