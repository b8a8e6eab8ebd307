"""Statistics against worked examples and the published figures of real traces; what transforms keep and count."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from tests.reference import reference
from workloads.chains import follow, hand_on, sessions
from workloads.prefix import Prefix
from workloads.readers import read_trace
from workloads.statistics import describe
from workloads.trace import Trace, Turns
from workloads.transform import jitter, limit_lengths, sample, scale_lengths


def example() -> Trace:
    """Two sessions of three and two turns and a lone request; blocks of 8 tokens."""
    prompts = [16, 9, 24, 30, 12, 8]
    rows = [[1, 2], [1, 3], [1, 2, 4], [1, 2, 4, 5], [1, 3], [9]]
    prefix = Prefix(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), 8)
    turns = Turns(np.array([-1, -1, 0, 2, 1, -1]), np.array([0.0, 0, 5, 7, 9, 0]))
    trace = Trace.from_columns([0, 30, 60, 90, 150, 240], prompts, [1, 2, 3, 4, 5, 6], [9] * 6, source="x")
    return replace(trace, prefix=prefix, turns=turns, classes=(np.array([0, 0, 1, 0, 1, 1]), ("a", "b")))


def test_example() -> None:
    facts = describe(example(), lru_blocks=(2, 100), max_model_len=30)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["requests"] == 6
    gaps = np.array([30, 30, 30, 60, 90])
    assert facts["arrivals"]["gap_cv"] == pytest.approx(gaps.std() / gaps.mean())
    assert facts["arrivals"]["requests_per_s"] == 6 / 240
    assert facts["arrivals"]["peak_over_mean_60s"] == 2 / (5 / 4)
    assert facts["prompt_tokens"]["sum"] == 99
    assert (facts["one_token_outputs"], facts["over_max_model_len"], facts["longest_request_tokens"]) == (1, 1, 34)
    assert facts["sessions"]["count"] == 3
    assert facts["sessions"]["of_one_turn"] == 1
    assert facts["sessions"]["turns"]["max"] == 3
    assert facts["sessions"]["think_s"]["p50"] == 7
    assert facts["classes"] == {"a": 3, "b": 3}
    prefix = facts["prefix"]
    assert prefix["block_hit_rate"] == pytest.approx((0 + 1 + 2 + 3 + 2 + 0) / 14)
    assert prefix["token_hit_rate"] == pytest.approx((0 + 8 + 16 + 24 + 12 + 0) / 99)  # the last block holds 4 tokens
    assert [row["blocks"] for row in prefix["lru"]] == [2]
    assert prefix["lru"][0]["block_hit_rate"] <= prefix["block_hit_rate"]


def test_one_request_has_no_rates() -> None:
    facts = describe(Trace.from_columns([0], [5], [1]))
    assert json.dumps(facts, allow_nan=False)
    assert facts["arrivals"]["requests_per_s"] is None
    assert facts["arrivals"]["gap_cv"] is None
    assert "prefix" not in facts
    assert "sessions" not in facts


def test_large_traces_are_not_simulated_for_every_cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.statistics.LRU_TOUCHES", 30)
    prefix = describe(example(), lru_blocks=(1, 2, 3, 4))["prefix"]
    assert [row["blocks"] for row in prefix["lru"]] == [1, 4]
    assert prefix["lru_left_out"] == [2, 3]
    monkeypatch.setattr("workloads.statistics.LRU_TOUCHES", 3)
    assert describe(example(), lru_blocks=(1, 2))["prefix"]["lru"] == []


AZURE, MOON = "azure/AzureLLMInferenceTrace_{}.csv.gz", "mooncake/{}_trace.jsonl.gz"
# Figures of the files, computed apart from this code: rows, span, CV, peak/mean, prompts, outputs.
PUBLISHED = [
    (AZURE.format("code"), 8_819, 57.3, 13.2, 4.18, (1469, 5188, 7436, 7437), (13, 55, 251, 1899)),
    (AZURE.format("conv"), 19_366, 58.4, 1.09, 1.52, (1020, 2735, 4142, 14050), (129, 424, 601, 1000)),
    (MOON.format("conversation"), 12_031, 58.9, 3.03, 1.21, (6909, 27367, 85400, 126195), (350, 597, 1119, 2000)),
    (MOON.format("synthetic"), 3_993, 17.0, 1.01, 1.17, (11587, 38611, 66456, 191378), (69, 389, 768, 893)),
    ("ragpulse/0_trace.jsonl.gz", 7_106, 10_076.7, 3.06, 14.2, (3140, 3959, 5438, 7712), (234, 563, 891, 2183)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "minutes", "cv", "peak", "prompts", "outputs"), PUBLISHED)
def test_published_figures(
    name: str, rows: int, minutes: float, cv: float, peak: float, prompts: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    facts = describe(read_trace(reference("traces", *name.split("/"))), lru_blocks=())
    assert facts["requests"] == rows
    assert facts["span_s"] / 60 == pytest.approx(minutes, abs=0.05)
    assert facts["arrivals"]["gap_cv"] == pytest.approx(cv, rel=0.005)
    assert facts["arrivals"]["peak_over_mean_60s"] == pytest.approx(peak, rel=0.005)
    for key, expected in (("prompt_tokens", prompts), ("output_tokens", outputs)):
        assert [facts[key][q] for q in ("p50", "p90", "p99", "max")] == pytest.approx(expected, abs=0.51)


@pytest.mark.parametrize(
    ("name", "blocks", "distinct", "hits", "tokens", "lru"),
    [
        ("conversation", 288_500, 182_790, 36.64, 37.36,
         {1_000: 4.45, 5_000: 11.04, 10_000: 21.12, 30_000: 32.57, 100_000: 36.37}),
        ("synthetic", 121_877, 43_924, 63.96, 65.12, {1_000: 8.25, 5_000: 27.91, 20_000: 57.15, 30_000: 62.42}),
    ],
)  # fmt: skip
def test_published_prefix_hits(
    name: str, blocks: int, distinct: int, hits: float, tokens: float, lru: dict[int, float]
) -> None:
    trace = read_trace(reference("traces", "mooncake", f"{name}_trace.jsonl.gz"))
    prefix = describe(trace, lru_blocks=tuple(lru))["prefix"]
    assert (prefix["blocks"], prefix["distinct_blocks"]) == (blocks, distinct)
    assert 100 * prefix["block_hit_rate"] == pytest.approx(hits, abs=0.005)
    assert 100 * prefix["token_hit_rate"] == pytest.approx(tokens, abs=0.005)
    assert {row["blocks"]: round(100 * row["block_hit_rate"], 2) for row in prefix["lru"]} == pytest.approx(
        lru, abs=0.011
    )


# -- chains


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_chains(keys: list[int]) -> None:
    previous = follow(np.array(keys))
    last: dict[int, int] = {}
    first, depth = sessions(previous)
    for i, key in enumerate(keys):
        assert previous[i] == (last.get(key, -1) if key >= 0 else -1)
        last[key] = i
        assert first[i] == (i if previous[i] < 0 else first[previous[i]])
        assert depth[i] == (0 if previous[i] < 0 else depth[previous[i]] + 1)


def test_dropped_turns_hand_their_think_time_on() -> None:
    think, keys = np.array([1.0, 2, 4, 8, 16, 32]), np.array([7, 7, -1, 7, 7, -1])
    kept = np.array([True, False, False, False, True, False])
    assert hand_on(think, keys, kept)[kept].tolist() == [1, 26]


# -- transforms


def test_sample_takes_whole_sessions_and_less_is_part_of_more() -> None:
    trace = example()
    taken = [set(sample(trace, share, seed=8).output_tokens.tolist()) for share in (0.3, 0.6, 0.9, 1.0)]
    for less, more in itertools.pairwise(taken):
        assert less <= more
    assert taken[-1] == {1, 2, 3, 4, 5, 6}
    for chosen in taken:
        for whole in ({1, 3, 4}, {2, 5}):
            assert whole <= chosen or not whole & chosen
    half = sample(trace, 0.6, seed=8)
    assert half.arrival_s[0] == 0
    assert f"a random share of 0.6 (seed 8, whole sessions together): {len(half)} of 6 requests" in half.notes
    with pytest.raises(ServecastError, match="leaves no request of 6"):
        sample(trace, 1e-9)
    with pytest.raises(ServecastError, match="above 0 and up to 1"):
        sample(trace, 1.5)


def test_scaled_lengths() -> None:
    trace = example()
    half = scale_lengths(trace, prompt=0.5, output=0.2)
    assert half.prompt_tokens.tolist() == [8, 4, 12, 15, 6, 4]
    assert half.output_tokens.tolist() == [1, 1, 1, 1, 1, 1]
    assert half.max_tokens.tolist() == [2] * 6
    assert half.prefix is not None
    assert half.prefix.block_tokens == 4
    assert half.prefix.known_blocks().tolist() == [0, 1, 2, 3, 1, 0]
    notes = " ".join(half.notes)
    assert "prompt lengths times 0.5" in notes
    assert "0 prompts and 2 outputs would have rounded to 0 tokens" in notes
    assert "prefix blocks have 4 tokens instead of 8" in notes
    odd = scale_lengths(trace, prompt=0.3)
    assert odd.prefix is not None
    assert odd.prefix.block_tokens == 8
    assert np.diff(odd.prefix.offsets).tolist() == [1, 1, 1, 2, 1, 1]
    assert scale_lengths(trace, output=2).output_tokens.tolist() == [2, 4, 6, 8, 10, 12]
    with pytest.raises(ServecastError, match="more than 2147483647 tokens"):
        scale_lengths(trace, prompt=1e9)
    with pytest.raises(ServecastError, match="not a finite number above 0"):
        scale_lengths(trace, output=0)


def test_limits() -> None:
    trace = example()
    kept = limit_lengths(trace, prompt=20, total=25)
    assert kept.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert "left as they are, for the engine to reject" in kept.notes[-1]
    cut = limit_lengths(trace, prompt=20, output=5, total=20, over_long="truncate")
    assert cut.prompt_tokens.tolist() == [16, 9, 17, 16, 12, 8]
    assert cut.output_tokens.tolist() == [1, 2, 3, 4, 5, 5]
    assert cut.max_tokens.tolist() == [9, 9, 9, 9, 9, 5]
    assert cut.prefix is not None
    assert np.diff(cut.prefix.offsets).tolist() == [2, 2, 3, 2, 2, 1]
    assert (
        "2 prompts and 1 outputs of 6 requests are over the limits (prompt 20, output 5, prompt + output 20)"
        in cut.notes[-1]
    )
    assert "truncated, which took 21 prompt and 1 output tokens and 2 prefix blocks" in cut.notes[-1]
    assert limit_lengths(trace, prompt=100) is trace
    with pytest.raises(ServecastError, match="a total limit of 1 tokens"):
        limit_lengths(trace, total=1)


@pytest.mark.parametrize("step_s", [3.0, 20.0])
def test_jitter_keeps_turns_behind_their_session(step_s: float) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    n = 300
    arrival = np.sort(rng.integers(0, 20, n) * 3.0)
    keys = rng.integers(0, 40, n)
    previous = follow(keys)
    plain = Trace.from_columns(arrival - arrival[0], np.arange(1, n + 1), [1] * n)
    trace = replace(plain, turns=Turns(previous, np.where(previous >= 0, keys * 1.0, 0.0)))
    moved = jitter(trace, step_s, seed=2)
    assert moved.arrival_s.tobytes() == jitter(trace, step_s, seed=2).arrival_s.tobytes()
    assert np.unique(moved.arrival_s).size > 200
    old = moved.prompt_tokens - 1  # positions before
    shift = moved.arrival_s - trace.arrival_s[old]
    assert shift.max() - shift.min() <= 2 * step_s
    assert moved.turns is not None
    for i in range(n):
        before = moved.turns.previous[i]
        assert (old[before] if before >= 0 else -1) == previous[old[i]]
        assert moved.turns.think_s[i] == trace.turns.think_s[old[i]]  # type: ignore[union-attr]
    with pytest.raises(ServecastError, match="not a number of seconds above 0"):
        jitter(trace, 0)
