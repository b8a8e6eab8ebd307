"""The cheapest deployment: requirements as people write them, bounds that leave out only what cannot be, a search that
finds what trying everything finds, and what is said of the answer."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.planning.page import plan_html
from reports.planning.words import answer
from servecast.cli import main
from servecast.errors import ServecastError
from servecast.planning import contest
from servecast.planning.bounds import bound
from servecast.planning.candidates import Candidate, candidates
from servecast.planning.contest import FRESH_SEED, Contest
from servecast.planning.evidence import under, verify
from servecast.planning.examine import FAILS, MEETS, Case, Outcome, Trial, examine, look, setup_of, trial_of
from servecast.planning.facts import facts_of
from servecast.planning.limits import _knowing
from servecast.planning.load import scaled
from servecast.planning.plan import plan
from servecast.planning.rent import Rent
from servecast.planning.search import search, survey
from servecast.planning.slo import Requirement, parse_requirements
from servecast.sweeping.runs import Base
from servecast.yamlfile import dump_yaml
from tests.servecast.helpers import fixed

PRICES = {"h100-sxm": 3.5, "l40s": 1.1, "a100-sxm": 1.6}
SCENARIO: dict[str, Any] = {
    "name": "chat",
    "model": "llama-3.1-8b",
    "engine": {"preset": "vllm-0.19", "max_model_len": 4096},
    "cluster": {"gpu": "h100-sxm"},
    "workload": {"num_requests": 300, "arrivals": {"kind": "poisson", "rate": 30}, "lengths": fixed(800, 80)},
}
DAILY = "{kind: diurnal, rate: 5, peak_to_mean: 2}"
REQUIRED = ("p90 ttft < 500ms, p90 tpot < 60ms",)


class Here:
    """Runs what is submitted at once, in this process."""

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "chat.yaml"
    file.write_text(dump_yaml(SCENARIO), encoding="utf-8")
    return file


def case(path: Path, *required: str) -> Case:
    return Case(Base.of(path), parse_requirements(required or REQUIRED), Rent(PRICES, most=64))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("p99 ttft < 1s", "p99 ttft <= 1 s"),
        ("p99.9 ttft<=250ms", "p99.9 ttft <= 250 ms"),
        ("mean e2e < 20 s", "mean e2e <= 20 s"),
        ("median tpot < 50ms", "p50 tpot <= 50 ms"),
        ("goodput > 99 %", "goodput >= 99 %"),
        ("goodput >= 0.95", "goodput >= 95 %"),
        ("chat: p95 tpot < 50ms", "chat: p95 tpot <= 50 ms"),
    ],
)
def test_requirements_are_read_as_people_write_them(text: str, shown: str) -> None:
    assert [str(r) for r in parse_requirements([text], ["chat"])] == [shown]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a requirement"),
        ("ttft < 1s", "which figure is meant is missing"),
        ("p99 tttft < 1s", "did you mean 'ttft'"),
        ("p99 ttft > 1s", "latencies have an upper limit"),
        ("p99 ttft < 1", "not a duration"),
        ("p100 ttft < 1s", "not a figure"),
        ("p99 ttft < 0s", "nothing takes no time"),
        ("goodput > 101 %", "not a share"),
        ("goodput < 99 %", "lower limit"),
        ("code: p99 ttft < 1s", "has no class 'code'"),
        ("chat: p99 itl < 1s", "not known by class"),
    ],
)
def test_what_is_no_requirement_is_said(text: str, said: str) -> None:
    with pytest.raises(ServecastError, match="--slo") as error:
        parse_requirements([text], ["chat"])
    assert said in error.value.problems[0]


def test_all_wrong_requirements_are_said_at_once() -> None:
    with pytest.raises(ServecastError) as error:
        parse_requirements(["p99 ttft > 1s, tpot < 50ms"])
    assert len(error.value.problems) == 2


def test_the_search_finds_what_trying_everything_finds(path: Path) -> None:
    """The cheapest configuration, and the fewest replicas of it, over all of them one by one."""
    here, all_of = case(path), list(candidates(Base.of(path).scenario({}), PRICES, {}, tps=(1, 2)))
    found, todo = survey(here, all_of, Here(), lambda *_: None)  # type: ignore[arg-type]
    found.outcomes += search(here, todo, Here(), 1)  # type: ignore[arg-type]
    best = min((o for o in found.outcomes if o.status == MEETS), key=lambda o: PRICES[o.candidate.gpu] * o.gpus)
    price = PRICES[best.candidate.gpu] * best.gpus
    for candidate in all_of:
        each = PRICES[candidate.gpu] * candidate.gpus
        for replicas in range(1, int((price - 1e-9) // each) + 1):
            if each * replicas < price - 1e-9:
                trial = trial_of(setup_of(here.base, candidate, replicas), here.requirements, replicas)
                assert not trial.meets(here.requirements), (str(candidate), replicas)
    again = trial_of(setup_of(here.base, best.candidate, best.replicas), here.requirements, best.replicas)
    assert again.meets(here.requirements)
    assert any(outcome.status == "price" for outcome in found.outcomes)  # some were never simulated


def test_bounds_leave_out_only_what_cannot_be(path: Path) -> None:
    for gpu in PRICES:
        candidate = Candidate(gpu)
        setup = setup_of(Base.of(path), candidate)
        requirements = parse_requirements(REQUIRED)
        least = bound(setup, requirements)
        assert not least.why
        outcome = examine(case(path), candidate, 1, 1, None)
        assert outcome.status == MEETS
        assert least.replicas <= outcome.replicas


def test_what_no_number_of_replicas_can_do_is_not_simulated(path: Path) -> None:
    outcome = look(case(path, "p90 tpot < 1ms"), Candidate("l40s"))
    assert outcome.status == "bound"
    assert "a token alone takes" in outcome.why
    assert "a prompt alone takes" in look(case(path, "p90 ttft < 5ms"), Candidate("l40s")).why
    assert look(case(path), Candidate("h100-sxm", tp=3)).status == "invalid"


def test_a_candidate_that_fails_says_which_requirement_and_by_how_much(path: Path) -> None:
    """A limit below what a step with somebody's prompt takes: more replicas help only so far."""
    outcome = examine(case(path, "p90 tpot < 8ms"), Candidate("a100-sxm"), 1, 1, 3)
    assert outcome.status == FAILS
    assert outcome.why


def test_requests_that_no_deployment_serves_are_left_out(path: Path) -> None:
    """Longer than max_model_len: that is the scenario's business, whatever it runs on."""
    long = Base.of(path, ["workload.lengths.prompt={kind: uniform, low: 800, high: 4200}"])
    here = Case(long, parse_requirements(REQUIRED), Rent(PRICES, most=64))
    setup = setup_of(long, Candidate("h100-sxm"), 4)
    trial = trial_of(setup, here.requirements, 4)
    assert trial.too_long > 0
    assert not trial.hopeless
    few = ["engine.num_gpu_blocks_override=40", "engine.max_model_len=700"]
    small = Case(Base.of(path, few), here.requirements, here.rent)
    assert trial_of(setup_of(small.base, Candidate("l40s")), small.requirements, 1).too_long == 300


def test_other_traffic_is_the_same_requests_faster_or_longer(path: Path) -> None:
    setup = setup_of(Base.of(path), Candidate("h100-sxm"))
    trace = setup.requests.trace
    faster = scaled(setup, rate=2.0).requests.trace
    assert (faster.arrival_s * 2 == trace.arrival_s).all()
    longer = scaled(setup, prompt=1.5, output=0.5).requests.trace
    assert set(longer.prompt_tokens) == {1200}
    assert set(longer.output_tokens) == {40}


def test_requirements_count_requests_beyond_them() -> None:
    assert Requirement("ttft", 99.0, 1.0).tail == pytest.approx(0.01)
    assert Requirement("goodput", "share", 0.98).tail == pytest.approx(0.02)
    assert Requirement("ttft", "mean", 1.0).excess(1.5) == pytest.approx(0.5)


def test_who_needs_more_replicas_on_fresh_seeds_may_no_longer_be_the_cheapest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 x 1.1 dollars beat 3 x 1.6 in the search; if it takes 6, they do not."""
    here = case(path)
    cheap, dear = Candidate("l40s"), Candidate("a100-sxm")
    met = Trial(0, (0.1, 0.01), True)
    outcomes = [Outcome(cheap, MEETS, 4, trials=(replace(met, replicas=4),)), Outcome(dear, MEETS, 3, trials=(met,))]
    those = Contest(here, outcomes)
    missed = Trial(0, (9.9, 9.9), True)
    monkeypatch.setattr(those, "_check", lambda who, n, pool: [met if who == dear or n >= 6 else missed])
    assert those.winner(Here(), lambda *_: None) == dear  # type: ignore[arg-type]
    assert those.replicas[cheap] == 5  # from which on it is dearer
    assert those.raised(cheap)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.floats(0.5, 4)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_who_was_left_out_for_a_price_that_fresh_seeds_raised_is_looked_at_again(
    kinds: list[tuple[int, int, float]],
) -> None:
    """Each kind meets everything with so many replicas in the search, and takes so many more on fresh seeds."""
    names = [Candidate(f"gpu-{i}") for i in range(len(kinds))]
    rent = Rent({who.gpu: price for who, (_, _, price) in zip(names, kinds, strict=True)})
    in_search = {who: n for who, (n, _, _) in zip(names, kinds, strict=True)}
    needed = {who: n + more for who, (n, more, _) in zip(names, kinds, strict=True)}
    here = Case(None, (), rent)  # type: ignore[arg-type]

    def found(case: Case, todo: Any, pool: Any, jobs: int, budget: float | None = None, told: Any = None) -> Any:
        best = float("inf") if budget is None else budget
        for outcome in todo:
            price = outcome.replicas * rent.prices[outcome.candidate.gpu]
            yield replace(outcome, status=MEETS if price < best else "price")
            best = min(best, price)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "search", lambda *args, **more: list(found(*args, **more)))
        patch.setattr(contest.Contest, "_check", lambda self, who, n, pool: [Trial(n, (), n >= needed[who])])
        patch.setattr(Rent, "charged", lambda self, who, n: n)
        patch.setattr(Rent, "affords", lambda self, who, below=None: 99)
        todo = [Outcome(who, "", n) for who, n in in_search.items()]
        seen, winner = contest.hunt(here, todo, None, None, 1, lambda *_: None)  # type: ignore[arg-type]
    assert winner is not None
    cheapest = min(rent.prices[who.gpu] * n for who, n in needed.items())
    assert rent.prices[winner.gpu] * seen.replicas[winner] == pytest.approx(cheapest, rel=1e-5)


def test_a_recorded_trace_is_its_only_check(path: Path, tmp_path: Path) -> None:
    """No fresh seeds are claimed where there are none, nor requests that there are not."""
    rows = "\n".join(f"{i / 30:.4f},800,80" for i in range(200))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n", encoding="utf-8")
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(dump_yaml(SCENARIO | {"workload": {"trace": "trace.csv"}}), encoding="utf-8")
    found = plan(recorded, REQUIRED, gpus=["h100-sxm"], rent=Rent(PRICES), settings={}, tps=(1,), draws=0)
    facts = facts_of(found)
    assert facts.one_course
    assert facts.verified_requests == 200
    said = " ".join(answer(facts))
    assert "the 200 recorded requests" in said
    assert "ask for 2,000" in said
    assert "fresh seed" not in said


@pytest.mark.parametrize("key", ["cluster.autoscale={min: 1, max: 4, target: 32}", "cluster.failures={mtbf: 6h}"])
def test_a_plan_is_for_a_fixed_number_of_replicas(path: Path, key: str) -> None:
    with pytest.raises(ServecastError, match="a plan is for a fixed number of replicas"):
        list(candidates(Base.of(path, [key]).scenario({}), PRICES, {}))


def test_splits_are_set_up_anew_for_every_number_of_units(path: Path) -> None:
    """Which link joins the sides depends on whether all GPUs fit into one node."""
    base = Base.of(path)
    apart = Candidate("h100-sxm", split=(1, 2))
    assert [pool.replicas for pool in setup_of(base, apart, 2).pools] == [2, 4]
    with pytest.raises(ServecastError, match="link"):
        setup_of(base, apart, 4)
    outcome = examine(case(path, "p90 ttft < 60s, p90 tpot < 60ms"), apart, 1, 1, 100)
    assert outcome.status == MEETS
    assert max(trial.replicas for trial in outcome.trials) == 2


@pytest.fixture(scope="module")
def found(path: Path) -> Any:
    return plan(
        path, REQUIRED, gpus=["h100-sxm", "l40s"], rent=Rent(PRICES, "a test", spare=1), settings={}, tps=(1,), draws=2,
    )  # fmt: skip


def test_a_plan_is_verified_on_fresh_seeds_and_weighed(found: Any) -> None:
    facts = facts_of(found)
    assert facts.answer is not None
    assert facts.answer.dollars_per_hour == pytest.approx(found.price_per_hour)
    assert facts.answer.gpus == found.replicas + 1  # the spare one is paid for
    assert len(facts.verified) == 2
    assert all(figure.met for row in facts.verified for figure in row)
    assert facts.headroom is None or facts.headroom >= 1
    assert {change.what for change in facts.changes} == {"rate", "prompt", "output"}
    assert facts.draws == 2
    assert facts.runner_up is not None
    assert facts.runner_up.gpu != facts.answer.gpu
    assert json.loads(json.dumps(facts.plain(), allow_nan=False))["counts"]


def test_a_stricter_limit_costs_no_less_and_a_laxer_one_no_more(found: Any, path: Path) -> None:
    half, twice = found.limits
    assert [limit.requirement.limit for limit in found.limits] == [0.25, 1.0]
    assert twice.candidate is not None
    here = case(path)
    for limit, sign in ((half, -1), (twice, 1)):
        if limit.candidate is not None:
            price = found.rent.price(limit.candidate, limit.replicas + 1)
            assert sign * price <= sign * found.price_per_hour + 1e-6
            there = replace(here, requirements=(limit.requirement, *here.requirements[1:]))
            assert verify(there, limit.candidate, limit.replicas, FRESH_SEED).meets(there.requirements)


def test_what_misses_a_limit_misses_a_stricter_one_too() -> None:
    """One that was ended early says nothing of a laxer limit; one that misses another requirement does."""
    strict, lax = parse_requirements(["p90 ttft < 250ms, p90 tpot < 60ms"]), parse_requirements(["p90 ttft < 1s"])
    trials = (
        Trial(2, (None, None), False),  # ended early
        Trial(3, (0.8, 0.01), True, requests=300),
        Trial(4, (0.2, 0.01), True, requests=300),
    )
    outcome = Outcome(Candidate("h100-sxm"), MEETS, 4, least=1, trials=trials)
    assert _knowing(outcome, strict, 0.5).least == 4
    assert _knowing(replace(outcome, trials=trials[:1]), lax, 2.0).least == 1
    slow = Trial(5, (0.2, 0.09), True, requests=300)
    assert _knowing(replace(outcome, trials=(slow,)), (*lax, strict[1]), 2.0).least == 6


def test_more_traffic_than_the_headroom_breaks_it(found: Any, path: Path) -> None:
    if found.evidence.headroom is None:
        pytest.skip("it carries several times the traffic")
    here = case(path)
    best = found.winner.candidate
    assert under(here, best, found.replicas, "rate", found.evidence.headroom).meets(here.requirements)
    assert not under(here, best, found.replicas, "rate", 1.5 * found.evidence.headroom).meets(here.requirements)


def test_the_page_has_the_answer_first_and_escapes_what_users_write(found: Any) -> None:
    page = plan_html(facts_of(found))
    assert page.index("an hour") < page.index("All configurations")
    assert len(page) < 6e6
    assert "<script>alert" not in page


def run(*args: str) -> Any:
    return CliRunner().invoke(main, ["plan", *args])


def test_requirements_that_nothing_meets_end_in_the_closest(path: Path, tmp_path: Path) -> None:
    done = run(
        str(path), "--slo", "p90 tpot < 9ms", "--gpus", "a100-sxm", "--tp", "1", "--max-gpus", "2", "--draws", "0",
        "--vary", "engine.max_num_seqs=64", "--workers", "1", "--out", str(tmp_path / "plan"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "Nothing that was tried meets the requirements" in done.output
    assert (tmp_path / "plan" / "report.html").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "h100-sxmm"), "did you mean 'h100-sxm'"),
        (("--gpus", "gb200"), "has no price"),
        (("--budget", "much"), "expected dollars an hour or a month"),
        (("--tp", "0"), "whole numbers of 1 or more"),
        (("--split", "1-1"), "prefill:decode"),
        (("--prices", "runpodd"), "did you mean 'runpod'"),
        (("--price", "h100-sxm=free"), "GPU=DOLLARS"),
        (("--vary", "cluster.tp=1,2"), "a plan finds the cluster"),
        (("--slo", "p99 ttft"), "not a requirement"),
        (("--months", "3"), "Give --growth too"),
        (("--growth", "10%/day"), "expected a percentage a month or a year"),
        (("--day", "1,2"), "the relative rates of 24 hours"),
        (("--day", ",".join(["1"] * 24), "--set", f"workload.arrivals={DAILY}"), "have a day of their own"),
    ],
)
def test_mistakes_are_said(path: Path, args: tuple[str, ...], said: str) -> None:
    done = run(str(path), *(("--slo", "p90 ttft < 1s") if "--slo" not in args else ()), *args)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_limits_are_tried_of_an_engine_that_is_only_named(path: Path) -> None:
    named = Base.of(path, ["engine=vllm-0.19"])
    candidate = Candidate("h100-sxm", settings=(("engine.max_num_seqs", 64),))
    assert setup_of(named, candidate).pools[0].engine.max_num_seqs == 64
