"""Scalars fitted to data of known truth: what is recovered, what is left alone, and what an outlier may do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.anchor import Anchor, Floats, Scalar, Values, fit_anchor
from calibrate.anchor_steps import Steps, recorded_steps
from calibrate.cost import CompiledCost, compile_cost
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec
from calibrate.observe.steps import ObservedRun, observed
from calibrate.scaled import PRICED, Scaled
from servecast.errors import ServecastError
from tests.calibrate.helpers import parts

TRUTH = {"step": 1.6e-3, "per_sequence": 20e-6, "bubble": 0.9e-3, "kernels": 1.1}
SCALARS = [
    Scalar("step", 0.8e-3, log(2.5), 1e-6, 1.0),
    Scalar("per_sequence", 8e-6, log(2.5), 1e-6, 1.0),
    Scalar("kernels", 1.0, 0.15, 0.1, 10.0),
]
DEFAULTS = {"step": 0.8e-3, "per_sequence": 8e-6, "bubble": 0.4e-3, "kernels": 1.0}


def two(near: float = 1.0, **other: Any) -> list[Scalar]:
    return [Scalar("a", near, 0.5, 0.01, 100.0), Scalar("b", 1.0, 0.5, 0.01, 100.0, **other)]


def sums(weights: list[tuple[float, float]], truth: tuple[float, float]) -> Any:
    """log errors of weighted sums of a and b."""
    w = np.array(weights)
    measured = w @ truth
    return lambda v: np.log(w @ [v["a"], v["b"]] / measured)


def fitted(anchor: Anchor) -> dict[str, Any]:
    return {each.scalar.name: each for each in anchor.estimates}


def test_what_the_data_tell_is_recovered() -> None:
    apart = [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0)]
    anchor = fit_anchor(sums(apart, (2.0, 0.7)), np.full(3, 0.01), two())
    assert anchor.values == pytest.approx({"a": 2.0, "b": 0.7}, rel=0.01)
    for each, true in zip(anchor.estimates, (2.0, 0.7), strict=True):
        assert each.told
        assert each.low < true < each.high
        assert each.sd == pytest.approx(0.01, rel=0.5)
    assert anchor.correlation["a", "b"] < 0
    assert anchor.scatter == 1


def test_what_hardly_matters_stays_exactly_where_it_was() -> None:
    anchor = fit_anchor(sums([(1.0, 0.005), (2.0, 0.005)], (2.0, 1.5)), np.full(2, 0.03), two())
    b = fitted(anchor)["b"]
    assert (b.told, b.like, b.value, b.sd) == (False, "", 1.0, 0.5)
    assert anchor.values["a"] == pytest.approx(2.0, rel=0.02)


def test_of_two_that_look_alike_one_stays_and_the_other_says_so_with_its_interval() -> None:
    alike = [(1.0, 0.6), (1.0, 0.61)]
    anchor = fit_anchor(sums(alike, (1.0, 2.0)), np.full(2, 0.02), two())
    a, b = anchor.estimates
    assert (a.told, b.told, b.like, b.value) == (True, False, "a", 1.0)
    alone = fit_anchor(sums(alike, (1.0, 2.0)), np.full(2, 0.02), two()[:1] + two(stays=True)[1:]).estimates
    assert [each.told for each in alone] == [True, False]
    assert alone[1].like == ""
    assert a.sd > 5 * 0.02  # of a sum that is known to 2 %


def test_nothing_is_told_by_noise() -> None:
    anchor = fit_anchor(sums([(1.0, 1.0)], (2.0, 2.0)), np.array([5.0]), two())
    assert [(each.told, each.value) for each in anchor.estimates] == [(False, 1.0), (False, 1.0)]


def test_an_outlier_moves_little_and_widens_the_interval() -> None:
    def errors(v: Values) -> Floats:
        return np.array([log(v["a"] / true) for true in [2.0] * 9 + [20.0]])

    anchor = fit_anchor(errors, np.full(10, 0.02), two()[:1])
    assert anchor.values["a"] == pytest.approx(2.0, rel=0.03)
    assert anchor.scatter > 1.5


def test_limits_hold() -> None:
    at = [replace(two()[0], high=1.5)]
    assert fit_anchor(lambda v: np.array([log(v["a"] / 9)]), np.array([0.01]), at).values["a"] == pytest.approx(1.5)


def engine(**options: Any) -> tuple[Any, Any, Any, EngineSpec]:
    return parts("llama-3.1-8b", "h100-sxm", max_num_batched_tokens=2048, max_num_seqs=256, **options)


def truly(spec: EngineSpec, values: Values) -> EngineSpec:
    """The engine with these host times, whether it is synchronous or not."""
    times = {f"{kind}_base_s": values["step"] for kind in ("sync", "async")}
    times |= {f"{kind}_per_sequence_s": values["per_sequence"] for kind in ("sync", "async")}
    return replace(spec, host=replace(spec.host, bubble_s=values["bubble"], **times))


def made(cost: CompiledCost, spread: float = 0.03, count: int = 400, seed: int = 1) -> ObservedRun:
    """Random steps that take what `cost` says, more or less."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[list[tuple[int, int]], int, int]] = [([], 0, 0)]
    for _ in range(count):
        decodes = int(rng.choice([0, 1, 4, 16, 64, 200], p=[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]))
        some = rng.random() < 0.3 or decodes == 0
        chunks = [(int(rng.integers(1, 900)), int(rng.integers(0, 2000))) for _ in range(int(some) * 2)]
        rows.append((chunks, decodes, decodes * int(rng.integers(50, 3000))))
    took = [cost.step_s(*row) * float(np.exp(spread * rng.standard_normal())) for row in rows]
    return record(rows, took)


def record(rows: list[tuple[list[tuple[int, int]], int, int]], took: list[float]) -> ObservedRun:
    ends = np.cumsum(np.array(took) + 1e-4)
    n, begins = len(rows), ends - took
    columns: dict[str, Any] = {
        "step": range(n), "updates": range(n), "begin_s": begins, "planned_s": begins, "update_s": ends, "end_s": ends,
        "chunk_request": [[0] * len(c) for c, _, _ in rows], "chunk_tokens": [[q for q, _ in c] for c, _, _ in rows],
        "chunk_cached": [[k for _, k in c] for c, _, _ in rows], "decodes": [d for _, d, _ in rows],
        "kv_tokens": [kv for _, _, kv in rows], "preempted": [[]] * n,
    }  # fmt: skip
    columns |= {name: [0] * n for name in ("running", "waiting", "free_blocks", "prefix_hits", "draft_tokens")}
    nobody: dict[str, list[Any]] = {
        name: []
        for name in (
            "request", "plan", "reached_s", "noted_s", "prompt_tokens", "max_tokens", "priority", "kinds", "end_plan",
            "finished_s", "output_tokens", "status",
        )
    }  # fmt: skip
    return observed(Path("steps.jsonl"), {}, columns, nobody, ())


def steps_of(truth: Values, spread: float = 0.03, **options: Any) -> Steps:
    model, layout, gpu, spec = engine(**options)
    prices = Datasheet(gpu)
    cost = compile_cost(model, layout, truly(spec, truth), Scaled(prices, dict.fromkeys(PRICED, truth["kernels"])))
    return recorded_steps(made(cost, spread), model, layout, spec, prices)


@pytest.mark.parametrize(("asynchronous", "eager"), list(product((False, True), repeat=2)))
def test_steps_are_composed_as_the_simulation_prices_them(asynchronous: bool, eager: bool) -> None:
    steps = steps_of(TRUTH, 0.0, async_scheduling=asynchronous, enforce_eager=eager)
    assert len(steps.seconds) == 400  # the step without work is left out
    assert steps.predicted(TRUTH) == pytest.approx(steps.seconds, rel=1e-9)


def test_a_synchronous_engines_steps_tell_its_host_and_its_kernels() -> None:
    anchor = steps_of(TRUTH, async_scheduling=False).fit(DEFAULTS, SCALARS)
    assert all(each.told for each in anchor.estimates)
    for each in anchor.estimates:
        assert each.value == pytest.approx(TRUTH[each.scalar.name], rel=0.12)
        assert each.low < TRUTH[each.scalar.name] < each.high


def test_an_asynchronous_engines_steps_tell_bubble_and_kernels_but_not_the_hidden_host() -> None:
    scalars = [*SCALARS, Scalar("bubble", 0.4e-3, log(2.5), 1e-6, 1.0)]
    found = fitted(steps_of(TRUTH, async_scheduling=True).fit(DEFAULTS, scalars))
    assert found["bubble"].value == pytest.approx(TRUTH["bubble"], rel=0.15)
    assert found["kernels"].value == pytest.approx(TRUTH["kernels"], rel=0.03)
    assert [(found[name].told, found[name].value) for name in ("step", "per_sequence")] == [
        (False, 0.8e-3),
        (False, 8e-6),
    ]


def test_a_few_steps_that_took_long_do_not_matter() -> None:
    steps = steps_of(TRUTH, async_scheduling=False)
    slow = steps.seconds.copy()
    slow[::25] *= 30
    values = replace(steps, seconds=slow).fit(DEFAULTS, SCALARS).values
    assert values == pytest.approx({name: TRUTH[name] for name in values}, rel=0.15)


def test_steps_that_the_engine_cannot_have_made_are_refused_all_at_once() -> None:
    model, layout, gpu, spec = engine(async_scheduling=False)
    run = record([([(2000, 0), (500, 0)], 300, 300)] * 3 + [([], 0, 0)], [0.01] * 4)
    run.steps.replace_column(run.steps.columns.index("draft_tokens"), run.steps["draft_tokens"] + 1)
    with pytest.raises(ServecastError) as refused:
        recorded_steps(run, model, layout, spec, Datasheet(gpu))
    said = "\n".join(refused.value.problems)
    for part in (
        "2,800 tokens",
        "max_num_batched_tokens is 2,048",
        "302 sequences",
        "max_num_seqs is 256",
        "speculative",
    ):
        assert part in said
    with pytest.raises(ServecastError, match="no step that computed anything"):
        recorded_steps(record([([], 0, 0)] * 3, [0.01] * 3), model, layout, spec, Datasheet(gpu))
