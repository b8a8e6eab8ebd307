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

from reports.planning import day as day_words
from reports.planning import growth as growth_words
from reports.planning.words import answer
from servecast.errors import ServecastError
from servecast.planning import ladder
from servecast.planning.candidates import Candidate
from servecast.planning.day import Day, Hour, day, events_of, hours_of, lived, profile_of, steady
from servecast.planning.examine import Case, changes_for
from servecast.planning.facts import facts_of
from servecast.planning.growth import Growth, growth_rate
from servecast.planning.ladder import NARROW, Ladder, carries
from servecast.planning.plan import plan
from servecast.planning.rent import Rent
from servecast.planning.slo import parse_requirements
from servecast.run import simulate
from servecast.setup import set_up
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
    ("text", "rate"), [("10%/month", 0.1), ("10 % a month", 0.1), ("25%", 0.25), ("100%/year", 2 ** (1 / 12) - 1)]
)
def test_growth_is_read_as_people_write_it(text: str, rate: float) -> None:
    assert growth_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "much", "0%", "-5%/month", "10%/day", "2000%/month", "1e3", "25", "0.1"])
def test_what_is_no_growth_is_said(text: str) -> None:
    with pytest.raises(ServecastError, match="--growth"):
        growth_rate(text)


@pytest.fixture(scope="module")
def found(path: Path) -> Any:
    return plan(
        path, REQUIRED, gpus=["a100-sxm"], rent=Rent(PRICES, whole_nodes=True, spare=1), settings={}, tps=(1,), draws=0,
        growth=0.4, months=4, budget=20.0, hours=hours_of(",".join(["1"] * 8 + ["10"] * 12 + ["5"] * 4)),
    )  # fmt: skip


def test_each_months_fleet_carries_its_traffic_and_one_less_does_not(found: Any, path: Path) -> None:
    here, growth = case(path), found.growth
    assert growth.replicas[0] == found.replicas
    for month, replicas in enumerate(growth.replicas):
        assert carries(here, found.winner.candidate, replicas, growth.factor(month))
        if month:
            assert not carries(here, found.winner.candidate, replicas - 1, growth.factor(month))
        assert growth.factor(month) <= growth.carried[replicas][0]


def test_idle_gpus_of_whole_nodes_are_said(found: Any) -> None:
    best = facts_of(found).answer
    assert best is not None
    assert best.charged == 8 > best.gpus
    assert best.dollars_per_hour == pytest.approx(8 * 1.6)
    idle = 8 - best.gpus
    said = " ".join(answer(facts_of(found)))
    assert "(8 paid for)" in said
    assert f"{idle} of the GPUs that are paid for stand idle; {idle} more replicas would cost nothing" in said


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


def test_replicas_that_come_and_go_before_they_are_needed_serve_the_day(path: Path) -> None:
    """The day with the fleet of each hour, simulated: everything is met, for the GPU-seconds that were said."""
    steps = "workload.arrivals={kind: steps, rates: [[20s, 15], [40s, 60], [30s, 40], [30s, 0]]}"
    base = Base.of(path, [steps, "workload.num_requests=3900", "cluster.cold_start=15s"])
    here = Case(base, parse_requirements(REQUIRED), Rent(PRICES))
    hours, peak = profile_of(base.scenario({})) or ((), 0.0)
    assert peak == 60
    assert [(hour.start_s, hour.length_s, hour.factor) for hour in hours] == [
        (0, 20, 0.25), (20, 40, 1), (60, 30, pytest.approx(2 / 3)), (90, 30, 0)
    ]  # fmt: skip
    candidate = Candidate("a100-sxm")
    calm = replace(here, base=steady(base, base.scenario({}), peak))
    known = Ladder(calm, candidate, 3, Here(), 1, lambda *_: None)  # type: ignore[arg-type]
    found = day(here, candidate, hours, known, Here(), peak)  # type: ignore[arg-type]
    low, high, middle, none = (n or 0 for n in found.replicas)
    assert none == 1 <= low < middle <= high
    assert found.check is not None
    assert found.check.meets(here.requirements)
    initial, events = events_of(found, 118.0)
    changes = changes_for(base, candidate, initial)
    changes["cluster"] |= {"events": events}
    result = simulate(set_up(base.scenario(changes)))
    paid_s = sum(n * hour.length_s for n, hour in zip((low, high, middle, none), hours, strict=True))
    paid_s += 15 * (high - low)
    assert result.summary()["gpu_seconds"] == pytest.approx(paid_s, rel=0.1)
    too_few = replace(found, replicas=(1, 1, 1, 1))
    assert not lived(here, candidate, too_few).meets(here.requirements)


def test_replicas_start_before_the_hour_that_needs_them() -> None:
    hours = tuple(Hour(100.0 * i, 100.0, 1.0) for i in range(4))
    found = Day(hours, (1, 3, 2, 2), None, 120.0, 0)
    initial, events = events_of(found, 790.0)
    assert initial == 3  # the second hour's must start before time 0
    assert events == [
        {"at": "200.000000s", "drain": 2},
        {"at": "380.000000s", "start": 2},  # for the second day's second hour, at 500 s
        {"at": "400.000000s", "drain": 3},
        {"at": "600.000000s", "drain": 2},
    ]


def test_a_curve_is_sized_by_the_highest_rate_of_each_part(path: Path) -> None:
    curve = "workload.arrivals={kind: diurnal, rate: 10, peak_to_mean: 2, start: 6h}"
    hours, peak = profile_of(Base.of(path, [curve]).scenario({})) or ((), 0.0)
    assert peak == pytest.approx(20, rel=1e-3)
    assert len(hours) == 24
    assert max(hours, key=lambda hour: hour.factor).start_s in (5 * 3600, 6 * 3600)  # half a day after the quietest
    assert sum(hour.factor for hour in hours) * peak / 24 > 10  # more than the mean
    assert profile_of(Base.of(path).scenario({})) is None


@pytest.mark.parametrize(
    "text", ["1,2,3", "", ",".join(["0"] * 24), ",".join(["1"] * 23 + ["-1"]), ",".join(["nan"] * 24)]
)
def test_what_is_no_day_is_said(text: str) -> None:
    with pytest.raises(ServecastError, match="--day"):
        hours_of(text)


def test_a_day_costs_what_its_hours_and_starts_do(found: Any) -> None:
    facts = facts_of(found).day
    assert facts is not None
    assert found.day.replicas[12] == found.replicas  # the busiest hour has the scenario's traffic
    fleets = [n + 1 for n in found.day.replicas]
    eights = [8 * -(-n // 8) for n in fleets]
    ups = [max(n - before, 0) for before, n in zip([eights[-1], *eights], eights, strict=False)]
    hours = sum(eights) + sum(ups) * found.day.start_s / 3600
    assert facts.gpu_hours == pytest.approx(hours)
    assert facts.dollars == pytest.approx(1.6 * hours)
    assert facts.static_dollars == pytest.approx(1.6 * 24 * max(eights))
    assert facts.starts == sum(max(n - before, 0) for before, n in zip([fleets[-1], *fleets], fleets, strict=False))
    said = " ".join(day_words.sentences(facts))
    assert "That day itself was not simulated" in said
    assert next(day_words.rows(facts))[:2] == ("00:00", "08:00")
