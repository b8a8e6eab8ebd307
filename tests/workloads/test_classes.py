"""Correlated lengths, request classes, and traces merged into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from servecast.errors import ServecastError
from workloads.generate import RequestClass, generate, generate_class_lengths, generate_classes, generate_lengths
from workloads.merge import merge
from workloads.prefix import Prefix
from workloads.trace import Trace, Turns

POISSON = {"kind": "poisson", "rate": 8}
PROMPT = {"kind": "lognormal", "mean": 1024, "cv": 1.0}
OUTPUT = {"kind": "lognormal", "mean": 200, "cv": 2.0}
FIXED = {"kind": "fixed", "tokens": 7}


@pytest.mark.parametrize("correlation", [-1.0, -0.5, 0.0, 0.3, 0.8, 1.0])
def test_rank_correlation_is_met_and_the_draws_stay(correlation: float) -> None:
    free = generate_lengths(20_000, 3, (PROMPT, OUTPUT))
    tied = generate_lengths(20_000, 3, (PROMPT, OUTPUT), correlation=correlation)
    assert tied[0].tobytes() == free[0].tobytes()
    assert np.sort(tied[1]).tobytes() == np.sort(free[1]).tobytes()
    assert spearmanr(*tied)[0] == pytest.approx(correlation, abs=0.02)
    assert tied[1].tobytes() == generate_lengths(20_000, 3, (PROMPT, OUTPUT), correlation=correlation)[1].tobytes()


def test_equal_prompts_make_no_trend() -> None:
    _, output = generate_lengths(20_000, 3, (FIXED, OUTPUT), correlation=1.0)
    assert abs(spearmanr(np.arange(output.size), output)[0]) < 0.03


def test_correlation_is_said_and_leaves_arrivals_alone() -> None:
    free = generate(50, 3, POISSON, (PROMPT, OUTPUT))
    tied = generate(50, 3, POISSON, (PROMPT, OUTPUT), correlation=0.5)
    assert tied.arrival_s.tobytes() == free.arrival_s.tobytes()
    assert "rank correlation 0.5" in tied.source
    assert "correlation" not in free.source


@pytest.mark.parametrize("correlation", [1.1, -2, "0.5", True, float("nan")])
def test_impossible_correlations(correlation: Any) -> None:
    with pytest.raises(ServecastError, match=r"lengths\.correlation: .* is not a number from -1 to 1"):
        generate(5, 1, POISSON, (PROMPT, OUTPUT), correlation=correlation)


def test_pairs_of_a_trace_have_their_own_correlation() -> None:
    with pytest.raises(ServecastError, match=r"lengths\.correlation: the pairs of a trace"):
        generate(5, 1, POISSON, Trace.from_columns([0], [1], [1]), correlation=0.5)


CHAT = RequestClass("chat", 3, (PROMPT, OUTPUT))
BATCH = RequestClass("batch", 1, (FIXED, {"kind": "fixed", "tokens": 99}))


def test_classes_come_by_weight_with_their_own_lengths() -> None:
    trace = generate_classes(20_000, 1, POISSON, [CHAT, BATCH])
    assert trace.classes is not None
    index, names = trace.classes
    assert names == ("chat", "batch")
    assert np.mean(index == 1) == pytest.approx(0.25, abs=0.01)
    assert set(trace.output_tokens[index == 1].tolist()) == {99}
    assert trace.prompt_tokens[index == 0].mean() == pytest.approx(1024, rel=0.03)
    assert trace.arrival_s.tobytes() == generate(20_000, 1, POISSON, (PROMPT, OUTPUT)).arrival_s.tobytes()
    assert generate_class_lengths(20_000, 1, [CHAT, BATCH])[1].tobytes() == trace.prompt_tokens.tobytes()


def test_one_class_more_leaves_the_others_lengths() -> None:
    two = generate_classes(500, 1, POISSON, [CHAT, BATCH])
    three = generate_classes(500, 1, POISSON, [CHAT, BATCH, RequestClass("more", 2, (FIXED, FIXED))])
    assert two.classes is not None
    assert three.classes is not None
    mine = three.prompt_tokens[three.classes[0] == 0]
    assert mine.tolist() == two.prompt_tokens[two.classes[0] == 0][: mine.size].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 40), st.integers(0, 40))
def test_a_longer_run_begins_the_same(seed: int, n: int, more: int) -> None:
    short, long = (generate_classes(size, seed, POISSON, [CHAT, BATCH]) for size in (n, n + more))
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(short, name).tobytes() == getattr(long, name)[:n].tobytes()


def test_classes_of_traces_and_with_correlation() -> None:
    pairs = Trace.from_columns([0, 1], [10, 20], [1, 2])
    one = RequestClass("a", 1, (PROMPT, OUTPUT), correlation=0.9)
    trace = generate_classes(4000, 1, POISSON, [one, RequestClass("b", 1, pairs)])
    assert trace.classes is not None
    first = trace.classes[0] == 0
    assert spearmanr(trace.prompt_tokens[first], trace.output_tokens[first])[0] > 0.85
    assert set(trace.prompt_tokens[~first].tolist()) == {10, 20}


def test_every_problem_of_classes_at_once() -> None:
    bad = [
        RequestClass("a", 0, (FIXED, {"kind": "fixd"})),
        RequestClass("a", "1", (FIXED, FIXED), correlation=3),  # type: ignore[arg-type]
        RequestClass("", 1, (FIXED, FIXED)),
    ]
    with pytest.raises(ServecastError) as error:
        generate_classes(0, 1, {"kind": "poisson"}, bad)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "arrivals.rate",
        "num_requests",
        "classes",
        "classes.0.weight",
        "classes.0.lengths.output.kind",
        "classes.1.weight",
        "classes.1.lengths.correlation",
        "classes.2.name",
    ]
    with pytest.raises(ServecastError, match="classes: none given"):
        generate_classes(1, 1, POISSON, [])


def plain(times: list[float], first: int = 1, **extra: Any) -> Trace:
    n = len(times)
    trace = Trace.from_columns(times, list(range(first, first + n)), [1] * n, source=f"t{first}")
    return replace(trace, **extra)


def test_merge_is_stable_and_names_the_parts() -> None:
    trace = merge([("a", plain([0, 2, 2])), ("b", plain([0, 2, 3], 10))])
    assert trace.prompt_tokens.tolist() == [1, 10, 2, 3, 11, 12]
    assert trace.classes is not None
    assert trace.classes[0].tolist() == [0, 1, 0, 0, 1, 1]
    assert trace.classes[1] == ("a", "b")
    assert trace.source == "merged: a (3 requests, t1); b (3 requests, t10)"
    assert (trace.prefix, trace.turns, trace.patience_s, trace.samples) == (None, None, None, None)


def test_merge_keeps_what_parts_know() -> None:
    a = plain(
        [0, 5],
        prefix=Prefix(np.array([0, 2, 3]), np.array([7, 8, 7]), 16),
        turns=Turns(np.array([-1, 0]), np.array([0.0, 3.0])),
        dropped={"blank": 2},
        notes=("old",),
        classes=(np.array([1, 0]), ("x", "y")),
        samples=np.array([2, 1]),
    )
    b = plain([1, 6], 10, prefix=Prefix(np.array([0, 1, 2]), np.array([7, 7]), 16), patience_s=np.array([4.0, 9.0]))
    trace = merge([("a", a), ("b", b), ("c", plain([2], 20))])
    assert trace.prompt_tokens.tolist() == [1, 10, 20, 2, 11]
    assert trace.turns is not None
    assert trace.turns.previous.tolist() == [-1, -1, -1, 0, -1]
    assert trace.turns.think_s.tolist() == [0, 0, 0, 3, 0]
    assert trace.prefix is not None
    assert trace.prefix.offsets.tolist() == [0, 2, 3, 3, 4, 5]
    assert trace.prefix.known_blocks().tolist() == [0, 0, 0, 1, 1]
    assert len(set(trace.prefix.ids.tolist())) == 3
    assert trace.classes is not None
    assert [trace.classes[1][i] for i in trace.classes[0]] == ["a/y", "b", "c", "a/x", "b"]
    assert trace.patience_s is not None
    assert trace.patience_s.tolist() == [np.inf, 4, np.inf, np.inf, 9]
    assert trace.samples is not None
    assert trace.samples.tolist() == [2, 1, 1, 1, 1]
    assert trace.dropped == {"a: blank": 2}
    assert trace.notes == ("a: old",)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=4), st.randoms())
def test_merge_loses_nothing(parts: list[list[int]], random: Any) -> None:
    traces = []
    for p, times in enumerate(parts):
        n = len(times)
        previous = np.array([i - 1 if i and random.random() < 0.5 else -1 for i in range(n)])
        offsets = np.concatenate([[0], np.cumsum([random.randrange(3) for _ in range(n)])])
        ids = np.array([random.randrange(4) for _ in range(offsets[-1])], dtype=np.int64)
        prefix = Prefix(offsets, ids, 16, chained=False)
        turns = Turns(previous, np.where(previous >= 0, 1.0, 0.0))
        traces.append((f"p{p}", plain(sorted(map(float, times)), 100 * p + 1, prefix=prefix, turns=turns)))
    trace = merge(traces)
    assert trace.classes is not None
    assert trace.turns is not None
    assert trace.prefix is not None
    index = trace.classes[0]
    for p, (_, part) in enumerate(traces):
        mine = np.flatnonzero(index == p)
        assert trace.arrival_s[mine].tolist() == part.arrival_s.tolist()
        assert trace.prompt_tokens[mine].tolist() == part.prompt_tokens.tolist()
        followed = trace.turns.previous[mine]
        assert part.turns is not None
        assert part.prefix is not None
        back = [mine.tolist().index(i) if i >= 0 else -1 for i in followed.tolist()]
        assert back == part.turns.previous.tolist()
        own = trace.prefix.rows(mine)
        assert own.known_blocks().tolist() == part.prefix.known_blocks().tolist()
    seen = [set(trace.prefix.rows(np.flatnonzero(index == p)).ids.tolist()) for p in range(len(traces))]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_what_cannot_be_merged() -> None:
    a = plain([0], prefix=Prefix(np.array([0, 1]), np.array([7]), 16))
    b = plain([0], prefix=Prefix(np.array([0, 1]), np.array([7]), 512))
    with pytest.raises(ServecastError) as error:
        merge([("a", a), ("a", b), ("", plain([1]))])
    assert "two parts are named 'a'" in str(error.value)
    assert "part 2 has no name" in str(error.value)
    with pytest.raises(ServecastError, match=r"prefix blocks differ in size \(a 16, b 512 tokens\)"):
        merge([("a", a), ("b", b)])
    with pytest.raises(ServecastError, match="no traces given"):
        merge([])
