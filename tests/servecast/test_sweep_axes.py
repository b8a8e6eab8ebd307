"""What is varied: from texts to axes to points, and every mistake in them said."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.errors import ServecastError
from servecast.sweeping.axes import Span, axes_of, grid, label, sample


def values(text: str, **how: bool) -> list[object]:
    (axis,) = axes_of([text], **how)
    return [setting[0] for setting in axis.settings]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k=1,2", [1, 2]),
        ("k = h100-sxm, l40s", ["h100-sxm", "l40s"]),
        ("k=null,true,1e-6,'8'", [None, True, 1e-6, "8"]),
        ("k={kind: poisson, rate: 8},{kind: x}", [{"kind": "poisson", "rate": 8}, {"kind": "x"}]),
        ("k=[1,2],[3]", [[1, 2], [3]]),
        ("k=7", [7]),
        ("k=1:16:4", [1, 6, 11, 16]),
        ("k=2:20:10", [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ("k=0.5:2:4", [0.5, 1.0, 1.5, 2.0]),
        ("k=1.0:10:3", [1.0, 5.5, 10.0]),
        ("k=log:16:256:5", [16, 32, 64, 128, 256]),
        ("k=log:0.01:1:3", [0.01, 0.1, 1.0]),
        ("k=-2:2:5", [-2, -1, 0, 1, 2]),
    ],
)
def test_values(text: str, expected: list[object]) -> None:
    found = values(text)
    assert found == expected
    assert list(map(type, found)) == list(map(type, expected))


def test_keys_that_are_set_together() -> None:
    (axis,) = axes_of(["cluster.pools.0.replicas+cluster.pools.1.replicas=[1,3],[2,2]"])
    assert list(grid([axis])) == [
        {"cluster.pools.0.replicas": 1, "cluster.pools.1.replicas": 3},
        {"cluster.pools.0.replicas": 2, "cluster.pools.1.replicas": 2},
    ]


def test_python_values_are_as_those_of_yaml() -> None:
    axes = axes_of({"a": [np.int64(3), 4], "b": (1.5,), "c": "1:3:3", "d+e": [(1, "x")]})
    assert [axis.settings for axis in axes] == [((3,), (4,)), ((1.5,),), ((1,), (2,), (3,)), ((1, "x"),)]
    assert type(axes[0].settings[0][0]) is int


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_grid_is_the_product(sizes: list[int]) -> None:
    axes = axes_of({f"k{i}": list(range(size)) for i, size in enumerate(sizes)})
    points = [tuple(point.values()) for point in grid(axes)]
    assert points == list(product(*map(range, sizes)))


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        (["k"], "--vary k: write key=value,value"),
        (["=1"], "--vary =1: write key=value"),
        (["k="], "--vary k: no values"),
        ([], "nothing is varied"),
        (["k=1,,2"], "not valid YAML"),
        (["k=[1"], "not valid YAML"),
        (["k=1,1"], "--vary k: 1 stands there twice; keep one"),
        (["k=a..b", "k..x=1"], "an empty word in the key"),
        (["k=1,2:3:4"], "a range stands alone"),
        (["k=3:1:2"], "3 is not below 1"),
        (["k=2:2:2"], "2 is not below 2"),
        (["k=log:0:3:3"], "0 has no logarithm"),
        (["k=1:5"], "how many steps? Write 1:5:5, or draw values with --sample"),
        (["k=1:4:1"], "1 is not a number of steps, 2 or more"),
        (["k=1:4:2.5"], "2.5 is not a number of steps"),
        (["k=1:3:10"], "fewer than 10 whole numbers"),
        (["k=1e400:1e401:3"], "not numbers that a computer can hold"),
        (["a+b=1,2"], "1 is not a list of 2"),
        (["a+b=[1,2,3]"], "[1, 2, 3] is not a list of 2"),
        (["k=1,2", "k=3"], "--vary k: varied twice"),
        (["engine.x=1,2", "engine=a,b"], "--vary engine: replaces engine.x"),
    ],
)
def test_mistakes(vary: list[str], said: str) -> None:
    with pytest.raises(ServecastError) as error:
        axes_of(vary)
    assert said in str(error.value)


def test_all_mistakes_are_said() -> None:
    with pytest.raises(ServecastError) as error:
        axes_of(["a=", "b=1,1", "c=2:1:3"])
    assert len(error.value.problems) == 3


def test_far_too_many_points() -> None:
    axes = axes_of(["a=1:1001:1001", "b=1:1001:1001"])
    with pytest.raises(ServecastError, match="1,002,001 combinations, more than 1,000,000; take fewer values"):
        grid(axes)


SPACE = ["a=1:4", "b=log:1.0:100", "c=x,y", "d+e=[1,2],[3,4]"]


@pytest.mark.parametrize("sampler", ["latin-hypercube", "sobol"])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_samples_lie_within_and_are_the_same_every_time(sampler: str, count: int) -> None:
    axes = axes_of(SPACE, sampled=True)
    points = list(sample(axes, count, sampler))  # type: ignore[arg-type]
    assert points == list(sample(axes, count, sampler))  # type: ignore[arg-type]
    assert len(points) == count
    for point in points:
        assert point["a"] in (1, 2, 3, 4)
        assert 1 <= point["b"] <= 100
        assert point["c"] in ("x", "y")
        assert (point["d"], point["e"]) in ((1, 2), (3, 4))


@pytest.mark.parametrize("sampler", ["latin-hypercube", "sobol"])
def test_samples_fill_the_space(sampler: str) -> None:
    points = list(sample(axes_of(SPACE, sampled=True), 64, sampler))  # type: ignore[arg-type]
    assert [sum(p["a"] == a for p in points) for a in (1, 2, 3, 4)] == [16] * 4
    assert sum(p["c"] == "x" for p in points) == 32
    below = sum(math.log10(p["b"]) < 0.5 for p in points)
    assert below == 16  # a quarter of the two decades


@given(st.floats(0, 1, exclude_max=True), st.integers(-5, 5), st.integers(1, 9), st.booleans(), st.booleans())
def test_what_is_drawn_from_a_span_lies_in_it(share: float, low: int, size: int, log: bool, whole: bool) -> None:
    low = max(low, 1) if log else low
    found = Span(low, low + size, log, whole).at(share)
    assert low <= found <= low + size
    assert isinstance(found, int) or not whole


@pytest.mark.parametrize(("count", "sampler"), [(0, "sobol"), (10**7, "sobol"), (4, "halton")])
def test_samples_that_cannot_be(count: int, sampler: str) -> None:
    with pytest.raises(ServecastError, match="--sample"):
        sample(axes_of(["a=1:4"], sampled=True), count, sampler)  # type: ignore[arg-type]


def test_labels_are_one_line() -> None:
    assert label({"kind": "poisson", "rates": [1, 2.5, None, True]}) == "{kind: poisson, rates: [1, 2.5, null, true]}"
