"""What a plan's answer takes in the course of time: few runs that find what trying everything finds, and sums that are
those of their parts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.planning import growth as growth_words
from servecast.errors import ServecastError
from servecast.planning import ladder
from servecast.planning.candidates import Candidate
from servecast.planning.examine import Case
from servecast.planning.facts import facts_of
from servecast.planning.growth import Growth, growth_rate
from servecast.planning.ladder import NARROW, Ladder, carries
from servecast.planning.plan import plan
from servecast.planning.rent import Rent
from servecast.planning.slo import parse_requirements
from servecast.sweeping.runs import Base
from servecast.yamlfile import dump_yaml
from tests.servecast.test_plan import PRICES, REQUIRED, SCENARIO, Here

ONE = Candidate("h100-sxm")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("course") / "chat.yaml"
    file.write_text(dump_yaml(SCENARIO), encoding="utf-8")
    return file


def case(path: Path, most: int = 64) -> Case:
    return Case(Base.of(path), parse_requirements(REQUIRED), Rent(PRICES, most=most))


@given(
    st.lists(st.floats(0.05, 0.6), min_size=40, max_size=40),
    st.floats(1.02, 1.6),
    st.integers(1, 12),
    st.integers(1, 2),
    st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_few_runs_find_what_trying_everything_finds(
    more: list[float], rate: float, months: int, jobs: int, guess: int
) -> None:
    """Whatever each further replica adds to the traffic that is carried."""
    carried = [sum(more[: n + 1]) for n in range(40)]
    factors = [rate**month for month in range(months)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "carries", lambda case, who, n, factor: factor <= carried[n - 1])
        here = Ladder(Case(None, (), Rent(PRICES, most=40)), ONE, guess, Here(), jobs, lambda *_: None)  # type: ignore[arg-type]
        found = here.fewest(factors)
        assert found == {f: (n if (n := bisect_left(carried, f) + 1) <= 40 else None) for f in factors}
        assert here.runs <= jobs * (14 + 3 * months)
        counts = {n for n in found.values() if n is not None}
        for n, (least, proven) in here.largest(counts).items():
            assert least <= carried[n - 1]
            assert not proven or carried[n - 1] < least * (1 + NARROW)


@pytest.mark.parametrize(
    ("text", "rate"), [("10%/month", 0.1), ("10 % a month", 0.1), ("25", 0.25), ("100%/year", 2 ** (1 / 12) - 1)]
)
def test_growth_is_read_as_people_write_it(text: str, rate: float) -> None:
    assert growth_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "much", "0%", "-5%/month", "10%/day", "2000%/month", "1e3"])
def test_what_is_no_growth_is_said(text: str) -> None:
    with pytest.raises(ServecastError, match="--growth"):
        growth_rate(text)


@pytest.fixture(scope="module")
def found(path: Path) -> Any:
    return plan(
        path, REQUIRED, gpus=["a100-sxm"], rent=Rent(PRICES, whole_nodes=True, spare=1), settings={}, tps=(1,), draws=0,
        growth=0.4, months=4, budget=20.0,
    )  # fmt: skip


def test_each_months_fleet_carries_its_traffic_and_one_less_does_not(found: Any, path: Path) -> None:
    here, growth = case(path), found.growth
    assert growth.replicas[0] == found.replicas
    for month, replicas in enumerate(growth.replicas):
        assert carries(here, found.winner.candidate, replicas, growth.factor(month))
        if month:
            assert not carries(here, found.winner.candidate, replicas - 1, growth.factor(month))
        assert growth.factor(month) <= growth.carried[replicas][0]


def test_months_add_up(found: Any) -> None:
    growth = facts_of(found).growth
    assert growth is not None
    assert growth.dollars == pytest.approx(sum(month.dollars or 0 for month in growth.months))
    for month, needed in zip(growth.months, found.growth.replicas, strict=True):
        assert month.replicas == needed + 1
        assert month.dollars == pytest.approx(730 * 1.6 * 8 * -(-(needed + 1) // 8))  # whole nodes
    said = " ".join(growth_words.sentences(growth))
    assert f"{growth.months[-1].gpus} in month 4 for 2.74 times the traffic" in said


def test_more_gpus_than_there_may_be_end_it(found: Any) -> None:
    ended = replace(found, growth=Growth(1.0, (3, 7, None), {3: (1.2, True), 7: (2.4, True)}, 9))
    growth = facts_of(ended).growth
    assert growth is not None
    assert growth.dollars is None
    said = " ".join(growth_words.sentences(growth))
    assert "month 3 takes more GPUs than there may be" in said
    assert "The fleet grows in month 2." in said
    assert growth.over_budget is None
    assert facts_of(replace(ended, budget=1.6 * 7)).growth.over_budget == 1  # type: ignore[union-attr]
    assert "first month" in " ".join(
        growth_words.sentences(facts_of(replace(found, growth=Growth(1.0, (None,), {}, 1))).growth)
    )  # type: ignore[arg-type]
