"""Trace: its rules, and what windows, heads and rate scaling keep."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.trace import Trace

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
