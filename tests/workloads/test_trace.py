"""Trace: its rules, and what windows, heads and rate scaling keep."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from tests.reference import reference
from workloads.prefix import Prefix
from workloads.trace import Trace, Turns

TRACE = Trace.from_columns([0, 1, 1, 4.5], [10, 20, 30, 40], [1, 2, 3, 4], source="t")


def test_columns_are_typed_read_only_and_capped_by_output() -> None:
    assert len(TRACE) == 4
    assert TRACE.arrival_s.dtype == np.float64
    assert TRACE.prompt_tokens.dtype == TRACE.max_tokens.dtype == np.int64
    assert TRACE.max_tokens.tolist() == TRACE.output_tokens.tolist()
    with pytest.raises(ValueError, match="read-only"):
        TRACE.arrival_s[0] = 1


def test_callers_arrays_stay_theirs() -> None:
    arrival_s = np.array([0.0, 1.0])
    trace = Trace.from_columns(arrival_s, [1, 1], [1, 1])
    arrival_s[0] = 5
    assert trace.arrival_s[0] == 0


def test_pickles_for_parallel_runs() -> None:
    assert pickle.loads(pickle.dumps(TRACE)).arrival_s.tolist() == TRACE.arrival_s.tolist()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (([0, 1], [1], [1, 1]), "differ in length"),
        (([], [], []), "at least one request"),
        (([0, math.nan], [1, 1], [1, 1]), "arrival_s has 1 position(s), counting from 0: nan at 1"),
        (([0, math.inf], [1, 1], [1, 1]), "inf at 1"),
        (([-1, 0], [1, 1], [1, 1]), "-1 at 0"),
        (([0, 1.7e12], [1, 1], [1, 1]), "arrival_s has"),
        (([1, 0], [1, 1], [1, 1]), "goes back in time"),
        (([0, 1], [0, 1], [1, 1]), "prompt_tokens has 1 position(s), counting from 0: 0 at 0"),
        (([0, 1], [1, 1.5], [1, 1]), "allowed are whole numbers from 1 to 2147483647"),
        (([0, 1], [1, 1], [1, 2**40]), "output_tokens has"),
        (([0, 1], [1, 1], [1, 2**70]), "output_tokens is not a flat sequence of numbers"),
        (([0, 1], ["a", "b"], [1, 1]), "prompt_tokens is not a flat sequence of numbers"),
        (([0, 1], [[1], [1, 2]], [1, 1]), "prompt_tokens is not a flat sequence of numbers"),
        (
            ([0, 1], [1, 1], [5, 5], [5, 4]),
            "max_tokens is below output_tokens at 1 position(s), counting from 0: 4 at 1",
        ),
    ],
)
def test_broken_columns_are_refused_with_positions(columns: tuple[list[float], ...], said: str) -> None:
    with pytest.raises(ServecastError) as error:
        Trace.from_columns(*columns)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(ServecastError) as error:
        Trace.from_columns([-1], [0], [0.5])  # type: ignore[list-item]
    assert len(error.value.problems) == 4  # max_tokens is a copy of the bad output_tokens


def test_window_is_half_open_and_starts_at_zero_again() -> None:
    part = TRACE.window(1, 4.5)
    assert part.arrival_s.tolist() == [0, 0]
    assert part.prompt_tokens.tolist() == [20, 30]
    assert part.notes == ("window [1 s, 4.5 s) holds 2 of 4 requests",)
    assert len(TRACE.window(0, math.inf)) == 4


@pytest.mark.parametrize("window", [(2, 2), (3, 2), (-1, 2), (math.nan, 2), (0, math.nan), (2, 3)])
def test_windows_without_requests_are_refused(window: tuple[float, float]) -> None:
    with pytest.raises(ServecastError, match="window"):
        TRACE.window(*window)


def test_head() -> None:
    assert TRACE.head(2).prompt_tokens.tolist() == [10, 20]
    assert TRACE.head(9).notes == ("first 4 of 4 requests; 9 were asked for",)
    with pytest.raises(ServecastError, match="1 or more"):
        TRACE.head(0)


def test_scale_rate() -> None:
    assert TRACE.scale_rate(2).arrival_s.tolist() == [0, 0.5, 0.5, 2.25]
    for factor in (0, -1, math.nan, math.inf):
        with pytest.raises(ServecastError, match="rate factor"):
            TRACE.scale_rate(factor)
    with pytest.raises(ServecastError, match="arrival_s"):
        TRACE.scale_rate(1e-300)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).map(sorted), st.floats(0.01, 1e6))
def test_windows_partition_the_trace(arrival_s: list[float], cut: float) -> None:
    trace = Trace.from_columns(arrival_s, range(1, len(arrival_s) + 1), [1] * len(arrival_s))
    kept: list[int] = []
    for start, end in ((0.0, cut), (cut, math.inf)):
        if any(start <= t < end for t in arrival_s):
            part = trace.window(start, end)
            assert part.arrival_s[0] == 0
            kept += part.prompt_tokens.tolist()
    assert kept == trace.prompt_tokens.tolist()


def full_trace() -> Trace:
    """Five requests with everything a trace can say."""
    return Trace(
        np.array([0.0, 1.0, 2.0, 3.0, 9.0]),
        np.array([20, 30, 40, 50, 60]),
        np.array([1, 2, 3, 4, 5]),
        np.array([1, 2, 3, 4, 9]),
        "five",
        prefix=Prefix(np.array([0, 2, 2, 5, 6, 9]), np.array([1, 2, 1, 2, 3, 7, 1, 2, 4]), 16),
        turns=Turns(np.array([-1, -1, 0, 1, 2]), np.array([0, 0, 5.0, 6.0, 7.0])),
        classes=(np.array([0, 1, 0, 1, 0]), ("chat", "batch")),
        patience_s=np.array([np.inf, 1.0, 2.0, 3.0, 4.0]),
        samples=np.array([1, 1, 2, 1, 1]),
    )


def test_taking_requests_keeps_what_belongs_to_them() -> None:
    kept = full_trace().take(np.array([1, 2, 4]), "three")
    assert kept.turns is not None
    assert kept.prefix is not None
    assert kept.classes is not None
    assert kept.turns.previous.tolist() == [-1, -1, 1]
    assert kept.turns.think_s.tolist() == [0, 0, 7]
    assert [kept.prefix.ids[a:b].tolist() for a, b in itertools.pairwise(kept.prefix.offsets)] == [
        [],
        [1, 2, 3],
        [1, 2, 4],
    ]
    assert kept.classes[0].tolist() == [1, 0, 0]
    assert kept.notes == ("three",)


def test_known_blocks_stop_at_the_first_unknown_one() -> None:
    prefix = full_trace().prefix
    assert prefix is not None
    assert prefix.known_blocks().tolist() == [0, 0, 2, 0, 2]
    assert prefix.known_blocks_lru(100).tolist() == [0, 0, 2, 0, 2]
    assert prefix.known_blocks_lru(2).tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"turns": Turns(np.array([-1, 1, 0, 1, 2]), np.zeros(5))}, "previous is not an earlier request"),
        ({"turns": Turns(np.array([-1, -1, 0, 0, 2]), np.zeros(5))}, "two requests follow the same one"),
        ({"turns": Turns(np.array([-1, -1, 0, 1, 2]), np.full(5, -1.0))}, "think_s is negative"),
        ({"turns": Turns(np.array([-1]), np.zeros(1))}, "turns: 1 and 1 values for 5 requests"),
        ({"classes": (np.array([0, 1, 2, 0, 0]), ("a", "b"))}, "request classes do not index"),
        ({"patience_s": np.zeros(5)}, "patience_s must be above 0"),
        ({"samples": np.zeros(5, dtype=np.int64)}, "samples must be 1 or more"),
        ({"prefix": Prefix(np.array([0, 1]), np.array([1]), 16)}, "prefix blocks of 1 prompts for 5 requests"),
    ],
)
def test_contradictions_are_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ServecastError, match=said):
        replace(full_trace(), **change)


def test_the_mooncake_trace_shares_as_much_as_published() -> None:
    """36.64 % of blocks with a cache that never forgets; 4.45, 11.04 and 35.46 % with an LRU of 1k, 5k, 50k blocks."""
    path = reference("traces", "mooncake", "conversation_trace.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    offsets = np.cumsum([0, *(len(row["hash_ids"]) for row in rows)])
    prefix = Prefix(offsets, np.array([i for row in rows for i in row["hash_ids"]]), 512)
    total = offsets[-1]
    assert len(prefix) == 12_031
    assert prefix.known_blocks().sum() / total == pytest.approx(0.3664, abs=5e-5)
    for blocks, share in ((1000, 0.0445), (5000, 0.1104), (50_000, 0.3546)):
        assert prefix.known_blocks_lru(blocks).sum() / total == pytest.approx(share, abs=5e-5)
