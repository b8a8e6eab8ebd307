"""Arrivals, lengths, kinds and generate: statistics, determinism, and every way to misspell a spec."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.generate import generate, generate_lengths, stream
from workloads.kinds import call_kind, check_kind
from workloads.lengths import LENGTHS, pairs_from_trace
from workloads.trace import Trace

POISSON = {"kind": "poisson", "rate": 8}
PROMPT = {"kind": "lognormal", "mean": 1024, "cv": 1.0}
OUTPUT = {"kind": "uniform", "low": 10, "high": 20}

GOLDEN_STREAM = [398, 227, 391, 360]
GOLDEN_PROMPTS = [421, 1923, 1768]
GOLDEN_OUTPUTS = [19, 18, 19]
GOLDEN_ARRIVALS = [0.07078335523423437, 0.08388462804333581, 0.5156779588548591]


def draw(spec: dict[str, Any], n: int = 100_000) -> Any:
    registry = ARRIVALS if spec["kind"] in ARRIVALS else LENGTHS
    assert check_kind(registry, spec, "x") == []
    return call_kind(registry, spec, n, stream(1, "test"))


def test_poisson_gaps_are_exponential_and_the_first_is_drawn() -> None:
    times = draw(POISSON)
    gaps = np.diff(times, prepend=0)
    assert times[0] > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)


def test_constant_and_all_at_once() -> None:
    assert draw({"kind": "constant", "rate": 4}, 3).tolist() == [0, 0.25, 0.5]
    assert draw({"kind": "all-at-once"}, 3).tolist() == [0, 0, 0]


def test_fixed_uniform_and_range_ratio() -> None:
    assert set(draw({"kind": "fixed", "tokens": 7}, 5)) == {7}
    assert set(draw(OUTPUT)) == set(range(10, 21))
    assert set(draw({"kind": "range-ratio", "nominal": 10, "ratio": 0.85})) == {8, 9, 10}
    assert set(draw({"kind": "range-ratio", "nominal": 3, "ratio": 0})) == {1, 2, 3}


@pytest.mark.parametrize(("mean", "cv"), [(1024, 1.0), (256, 0.3), (100, 2.0)])
def test_lognormal_has_the_stated_mean_and_cv(mean: float, cv: float) -> None:
    lengths = draw({"kind": "lognormal", "mean": mean, "cv": cv}, 400_000)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.1)  # heavy tails converge slowly


def test_lognormal_cap_redraws_and_makes_no_heap() -> None:
    free = draw({"kind": "lognormal", "mean": 1000, "cv": 1.0})
    capped = draw({"kind": "lognormal", "mean": 1000, "cv": 1.0, "max": 1500})
    assert capped.max() <= 1500
    assert np.mean(capped > 1490) < 0.01
    assert np.median(capped) == pytest.approx(np.median(free[free <= 1500]), rel=0.02)


def test_streams_are_named_and_pinned() -> None:
    assert stream(1, "arrivals").integers(0, 1000, 4).tolist() == stream(1, "arrivals").integers(0, 1000, 4).tolist()
    assert stream(1, "arrivals").random() != stream(1, "prompt").random()
    assert stream(1, "arrivals").random() != stream(2, "arrivals").random()
    assert stream(1, "arrivals").integers(0, 1000, 4).tolist() == GOLDEN_STREAM
    trace = generate(3, 1, POISSON, (PROMPT, OUTPUT))
    assert trace.prompt_tokens.tolist() == GOLDEN_PROMPTS
    assert trace.output_tokens.tolist() == GOLDEN_OUTPUTS
    assert trace.arrival_s.tolist() == pytest.approx(GOLDEN_ARRIVALS)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**70),
    st.integers(1, 50),
    st.integers(0, 50),
    st.sampled_from([PROMPT, OUTPUT, {"kind": "lognormal", "mean": 100, "cv": 1, "max": 90}]),
)
def test_same_seed_same_bytes_and_a_longer_run_begins_the_same(
    seed: int, n: int, more: int, prompt: dict[str, Any]
) -> None:
    short, long = (generate(size, seed, POISSON, (prompt, OUTPUT)) for size in (n, n + more))
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(short, name).tobytes() == getattr(long, name)[:n].tobytes()


def test_changing_one_part_leaves_the_others() -> None:
    a = generate(50, 3, POISSON, (PROMPT, OUTPUT))
    b = generate(50, 3, {"kind": "constant", "rate": 1}, (PROMPT, {"kind": "fixed", "tokens": 5}))
    assert a.prompt_tokens.tolist() == b.prompt_tokens.tolist()
    assert a.arrival_s.tolist() == generate(50, 3, POISSON, (OUTPUT, PROMPT)).arrival_s.tolist()
    prompts, outputs = generate_lengths(50, 3, (PROMPT, OUTPUT))
    assert prompts.tolist() == a.prompt_tokens.tolist()
    assert outputs.tolist() == a.output_tokens.tolist()


def test_lengths_of_a_trace_stay_in_pairs() -> None:
    trace = Trace.from_columns([0, 1, 2], [10, 20, 30], [1, 2, 3], source="mine")
    drawn = generate(200, 1, POISSON, trace)
    assert set(zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)) == {
        (10, 1),
        (20, 2),
        (30, 3),
    }
    assert "lengths of mine" in drawn.source
    prompts, _ = pairs_from_trace(200, stream(1, "lengths"), trace)
    assert prompts.tolist() == drawn.prompt_tokens.tolist()


def test_a_generated_trace_says_what_it_is() -> None:
    trace = generate(2, 7, POISSON, (PROMPT, OUTPUT))
    assert trace.source == "generated: poisson arrivals, lognormal prompts, uniform outputs, seed 7"
    assert trace.max_tokens.tolist() == trace.output_tokens.tolist()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lognormal", "x: 'lognormal' is not a mapping with a kind; write for example {kind: fixed, ...}"),
        (None, "is not a mapping"),
        ({}, "'kind' is missing"),
        ({"knd": "fixed"}, "is 'knd' meant?"),
        ({"kind": "lognorml"}, "unknown kind 'lognorml' (did you mean 'lognormal'?); kinds: fixed, uniform"),
        ({"kind": 3}, "unknown kind 3"),
        ({"kind": ["fixed"]}, "unknown kind ['fixed']"),
        ({"kind": "fixed"}, "x.tokens: missing; fixed takes tokens"),
        ({"kind": "fixed", "token": 3}, "x.token: unknown parameter (did you mean 'tokens'?)"),
        ({"kind": "fixed", "tokens": 3, 5: 1}, "x.5: unknown parameter"),
        ({"kind": "fixed", "tokens": True}, "x.tokens: True is not a whole number of tokens from 1 to 2147483647"),
        ({"kind": "fixed", "tokens": "12"}, "x.tokens: '12' is not"),
        ({"kind": "fixed", "tokens": None}, "x.tokens: None is not"),
        ({"kind": "fixed", "tokens": 1.5}, "x.tokens: 1.5 is not"),
        ({"kind": "fixed", "tokens": 0}, "x.tokens: 0 is not"),
        ({"kind": "fixed", "tokens": 2**40}, "x.tokens: 1099511627776 is not"),
        ({"kind": "fixed", "tokens": 10**400}, "x.tokens: 1000"),
        ({"kind": "lognormal", "mean": math.nan, "cv": 1}, "x.mean: nan is not"),
        ({"kind": "lognormal", "mean": math.inf, "cv": 1}, "x.mean: inf is not"),
        ({"kind": "lognormal", "mean": 10, "cv": 0}, "x.cv: 0 is not a number from 0.01 to 100"),
        ({"kind": "lognormal", "mean": 10, "cv": 1e-200}, "x.cv: 1e-200 is not a number from 0.01 to 100"),
        ({"kind": "lognormal", "mean": 1000, "cv": 1, "max": 100}, "x: max 100 is so low that 9"),
        ({"kind": "lognormal", "mean": 1000, "cv": 1, "max": 0}, "x.max: 0 is not"),
        ({"kind": "uniform", "low": 5, "high": 4}, "x: low 5 is above high 4"),
        ({"kind": "range-ratio", "nominal": 5, "ratio": 1.1}, "x.ratio: 1.1 is not a number from 0 to 1"),
    ],
)
def test_misspelt_lengths(spec: object, said: str) -> None:
    problems = check_kind(LENGTHS, spec, "x")
    assert said in "\n".join(problems)


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, 1e-300, 1e300, "8", True])
def test_impossible_rates(rate: object) -> None:
    assert "x.rate: " in check_kind(ARRIVALS, {"kind": "poisson", "rate": rate}, "x")[0]


def test_parameters_of_other_kinds_are_refused() -> None:
    assert check_kind(ARRIVALS, {"kind": "all-at-once", "rate": 3}, "x") == [
        "x.rate: unknown parameter; all-at-once takes no parameters"
    ]


def test_every_problem_at_once() -> None:
    bad = ({"kind": "lognormal", "men": 3, "cv": 0}, {"kind": "fixd"})
    with pytest.raises(ServecastError) as error:
        generate(0, 1, {"kind": "poisson"}, bad)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "arrivals.rate",
        "num_requests",
        "lengths.prompt.men",
        "lengths.prompt.mean",
        "lengths.prompt.cv",
        "lengths.output.kind",
    ]


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1", None])
def test_bad_seeds(seed: Any) -> None:
    with pytest.raises(ServecastError, match="seed"):
        stream(seed, "arrivals")


def test_arrivals_beyond_the_time_limit_are_an_error_not_infinity() -> None:
    with pytest.raises(ServecastError, match="arrival_s"):
        generate(200_000, 1, {"kind": "constant", "rate": 1e-6}, ({"kind": "fixed", "tokens": 1},) * 2)


def test_an_optional_parameter_set_to_none_is_not_given() -> None:
    spec = {"kind": "lognormal", "mean": 100, "cv": 1.0}
    assert check_kind(LENGTHS, {**spec, "max": None}, "prompt") == []
    without, none = (call_kind(LENGTHS, s, 9, stream(1, "x")) for s in (spec, {**spec, "max": None}))
    assert without.tolist() == none.tolist()
    assert check_kind(LENGTHS, {**spec, "mean": None}, "prompt")[0].startswith("prompt.mean: None is not")
