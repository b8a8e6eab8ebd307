"""Length distributions beside the first four: statistics, buckets that meet a mean, and every way to misspell them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.generate import stream
from workloads.kinds import call_kind, check_kind
from workloads.lengths import LENGTHS
from workloads.trace import Ints

HISTOGRAM = {"kind": "histogram", "edges": [10, 100, 1000], "counts": [1, 6, 3]}


def draw(spec: dict[str, Any], n: int = 200_000, seed: int = 1) -> Ints:
    assert check_kind(LENGTHS, spec, "x") == []
    return call_kind(LENGTHS, spec, n, stream(seed, "test"))


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_gamma_has_its_mean_and_cv(cv: float) -> None:
    lengths = draw({"kind": "gamma", "mean": 500, "cv": cv})
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.03)


def test_exponential_is_gamma_of_cv_1() -> None:
    lengths = draw({"kind": "exponential", "mean": 500})
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert np.median(lengths) == pytest.approx(500 * np.log(2), rel=0.02)


@pytest.mark.parametrize("spec", [{"kind": "gamma", "mean": 500, "cv": 1}, {"kind": "exponential", "mean": 500}])
def test_caps_redraw_and_refuse_to_decide_everything(spec: dict[str, Any]) -> None:
    capped = draw({**spec, "max": 600})
    assert capped.max() <= 600
    assert np.mean(capped > 595) < 0.02
    assert "max 100 is so low that 8" in check_kind(LENGTHS, {**spec, "max": 100}, "x")[0]


def test_empirical_draws_the_values_by_weight() -> None:
    assert set(draw({"kind": "empirical", "values": [3, 7, 7]}).tolist()) == {3, 7}
    lengths = draw({"kind": "empirical", "values": [5, 1, 9], "weights": [1, 0, 3]})
    assert set(lengths.tolist()) == {5, 9}
    assert np.mean(lengths == 9) == pytest.approx(0.75, abs=0.01)


def test_histogram_is_even_in_its_buckets() -> None:
    lengths = draw(HISTOGRAM)
    shares = [np.mean((lengths > low) & (lengths <= high)) for low, high in ((0, 10), (10, 100), (100, 1000))]
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.01)
    assert set(lengths[lengths <= 10].tolist()) == set(range(1, 11))
    assert lengths[(lengths > 10) & (lengths <= 100)].mean() == pytest.approx(55.5, rel=0.01)
    assert lengths[lengths > 100].mean() == pytest.approx(550.5, rel=0.01)


@pytest.mark.parametrize("mean", [95.0, 120.0, 199.0, 250.0, 350.0])
def test_histogram_meets_the_mean_within_the_same_buckets(mean: float) -> None:
    lengths = draw({**HISTOGRAM, "mean": mean}, 400_000)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert np.mean((lengths > 10) & (lengths <= 100)) == pytest.approx(0.6, abs=0.01)
    assert (lengths.min(), lengths.max()) >= (1, 100)
    assert lengths.max() <= 1000


@pytest.mark.parametrize(("mean", "only"), [(1000, 1000), (501, 501)])
def test_everyone_at_one_end_of_a_bucket(mean: int, only: int) -> None:
    spec = {"kind": "histogram", "edges": [500, 1000], "counts": [0, 5], "mean": mean}
    assert np.mean(draw(spec) == only) > 0.99


def test_open_bucket_ends_at_max_or_must_be_empty() -> None:
    lengths = draw({**HISTOGRAM, "counts": [1, 1, 1, 1], "max": 4000})
    assert 3900 < lengths.max() <= 4000
    assert np.mean(lengths > 1000) == pytest.approx(0.25, abs=0.01)
    assert draw({**HISTOGRAM, "counts": [1, 1, 1, 0]}).max() <= 1000


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_histogram_keeps_to_its_buckets_and_its_mean(data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(1, 40_000), min_size=1, max_size=8)))
    counts = data.draw(st.lists(st.integers(0, 50), min_size=len(edges), max_size=len(edges)).filter(any))
    low, high = np.array([0, *edges[:-1]]) + 1, np.array(edges)
    share = np.array(counts) / sum(counts)
    place = data.draw(st.floats(0, 1))
    mean = float(share @ low) * (1 - place) + float(share @ high) * place
    lengths = draw({"kind": "histogram", "edges": edges, "counts": counts, "mean": mean}, 4000)
    bucket = np.searchsorted(high, lengths)
    assert set(bucket.tolist()) <= set(np.flatnonzero(counts).tolist())
    spread = 5 * lengths.std() / np.sqrt(lengths.size)
    assert lengths.mean() == pytest.approx(mean, abs=spread + 0.5 + 0.001 * mean)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [
            HISTOGRAM,
            {**HISTOGRAM, "mean": 150},
            {"kind": "gamma", "mean": 100, "cv": 1, "max": 120},
            {"kind": "exponential", "mean": 100, "max": 120},
            {"kind": "empirical", "values": [1, 2, 3]},
            {"kind": "empirical", "values": [1, 2, 3], "weights": [1, 2, 3]},
        ]
    ),
    st.integers(0, 2**40),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_a_longer_run_begins_the_same(spec: dict[str, Any], seed: int, n: int, more: int) -> None:
    assert draw(spec, n, seed).tobytes() == draw(spec, n + more, seed)[:n].tobytes()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "empirical", "values": [1.5]}, "x.values.0: 1.5 is not a whole number of tokens"),
        ({"kind": "empirical", "values": 3}, "x.values: 3 is not a list of whole numbers of tokens"),
        ({"kind": "empirical", "values": [1], "weights": [1, 2]}, "x: 2 weights for 1 values; give one each"),
        ({"kind": "empirical", "values": [1], "weights": [0]}, "x: weights are all 0"),
        ({"kind": "empirical", "values": [1], "weights": [-1]}, "x.weights.0: -1 is not a number from 0"),
        ({**HISTOGRAM, "edges": [10, 10, 20]}, "x: edges do not ascend"),
        ({**HISTOGRAM, "counts": [1, 2]}, "x: 2 counts for 3 edges"),
        ({**HISTOGRAM, "counts": [1, 2, 3, 4, 5]}, "x: 5 counts for 3 edges"),
        ({**HISTOGRAM, "counts": [0, 0, 0]}, "x: counts are all 0"),
        ({**HISTOGRAM, "counts": [1, 2, 3, 4]}, "x: 40.00% of the counts lie above the last edge 1000"),
        ({**HISTOGRAM, "counts": [1, 2, 3, 4], "max": 1000}, "x: max 1000 is not above the last edge 1000"),
        ({**HISTOGRAM, "mean": 2000}, "x: mean 2000 contradicts the counts, whose lengths average between 37 and 361"),
        ({**HISTOGRAM, "mean": 5}, "x: mean 5 contradicts"),
        ({"kind": "gamma", "mean": 10, "cv": 0.001}, "x.cv: 0.001 is not a number from 0.01"),
    ],
)
def test_misspelt(spec: dict[str, Any], said: str) -> None:
    assert said in "\n".join(check_kind(LENGTHS, spec, "x"))


def test_contradictions_come_all_at_once() -> None:
    with pytest.raises(ServecastError) as error:
        LENGTHS["histogram"](0, stream(0, "x"), edges=[5, 5], counts=[0.0], max=3)
    assert len(error.value.problems) == 4
