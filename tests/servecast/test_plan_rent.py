"""How GPUs are rented: whole nodes, what can be afforded, and that no more are taken than there may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from servecast.planning.candidates import Candidate
from servecast.planning.examine import FAILS, MEETS, Case, examine
from servecast.planning.rent import Rent
from servecast.planning.slo import parse_requirements
from servecast.sweeping.runs import Base
from servecast.yamlfile import dump_yaml
from tests.servecast.test_plan import PRICES, REQUIRED, SCENARIO


def test_whole_nodes_are_paid_for_where_gpus_are_rented_so() -> None:
    """Six GPUs take an eight; two replicas of three take one too, and three take two: none lies across nodes."""
    single, whole = Rent(PRICES), Rent(PRICES, whole_nodes=True)
    pair, three = Candidate("h100-sxm", tp=2), Candidate("h100-sxm", tp=3)
    assert (single.charged(pair, 3), whole.charged(pair, 3)) == (6, 8)
    assert [whole.charged(three, n) for n in (1, 2, 3)] == [8, 8, 16]
    assert whole.price(pair, 5) == 16 * 3.5
    assert Rent({}, whole_nodes=True).charged(Candidate("gb200", tp=4), 1) == 72
    assert single.charged(Candidate("h100-sxm", tp=4, pp=3), 2) == 32  # larger than a node: whole ones anyhow
    assert whole.charged(Candidate("h100-sxm", split=(1, 2)), 3) == 16


@pytest.mark.parametrize("rent", [Rent(PRICES), Rent(PRICES, whole_nodes=True), Rent(PRICES, spare=2, most=30)])
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("h100-sxm"),
        Candidate("h100-sxm", tp=3),
        Candidate("h100-sxm", tp=8, pp=2),
        Candidate("l40s", tp=2, split=(1, 2)),
    ],
)
def test_what_can_be_afforded_is_what_costs_less(rent: Rent, candidate: Candidate) -> None:
    for dollars in (0.5, 7.0, 28.0, 28.1, 100.0):
        fits = [
            n
            for n in range(1 - rent.spare, 200)
            if rent.price(candidate, n + rent.spare) < dollars - 1e-6
            and rent.charged(candidate, n + rent.spare) <= rent.most
        ]
        assert rent.affords(candidate, dollars) == max(fits, default=-rent.spare)


def test_no_more_gpus_than_there_may_be(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(dump_yaml(SCENARIO), encoding="utf-8")
    here = Case(Base.of(path), parse_requirements(REQUIRED), Rent(PRICES, spare=1, most=2))
    assert examine(here, Candidate("h100-sxm"), 1, 1, None).status in (MEETS, FAILS)
    outcome = examine(here, Candidate("h100-sxm", tp=2), 1, 1, None)
    assert (outcome.status, outcome.why) == ("bound", "it takes 4 GPUs, of 2 that there may be")
