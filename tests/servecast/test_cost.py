"""What runs cost: against sums over the logs, and against what one pays hour by hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.hardware import gpu_ids, load_gpu
from reports.cost_words import dollars
from reports.html import report_html
from servecast.costing.ownership import HOURS_A_YEAR, Owned, capex_per_hour, rent_use
from servecast.costing.part import PowerPart
from servecast.costing.power import draw_of
from servecast.costing.prices import DEFAULT, price_sets
from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from tests.servecast.helpers import QUICKSTART, fixed, problems, small
from tests.servecast.test_cli import call

FLEET = QUICKSTART.with_name("mixed-fleet.yaml")
ELASTIC = QUICKSTART.with_name("autoscaling.yaml")
SPLIT = QUICKSTART.with_name("split-serving.yaml")
BUY = {"price": 30_000, "years": 3}


def wrong(tmp_path: Path, cost: object) -> str:
    """What is wrong with a quickstart that has this key."""
    file = tmp_path / "s.yaml"
    file.write_text(QUICKSTART.read_text() + f"\ncost: {json.dumps(cost)}\n")
    return "\n".join(problems(file))


def test_bundled_prices_say_whose_they_are():
    sets = price_sets()
    assert DEFAULT in sets
    assert {each.what for each in sets.values()} == {"on-demand", "reserved", "spot"}
    for each in sets.values():
        assert each.source.startswith("https://")
        assert each.date
        assert set(each.prices) <= set(gpu_ids())
    assert sets["hyperstack-reserved"].prices["h100-sxm"] < sets["hyperstack"].prices["h100-sxm"]
    assert "  h100-sxm          3.49" in call("list", "prices").output


def test_every_gpu_is_charged_whether_busy_or_not():
    for replicas in (1, 5):
        s = simulate(small(cluster__replicas=replicas, cluster__tp=2)).summary()
        assert s["cost_per_hour"] == pytest.approx(2 * replicas * 3.49)
        assert s["cost_per_month"] == pytest.approx(730 * s["cost_per_hour"])
        assert s["cost_of_run"] == pytest.approx(2 * replicas * 3.49 * s["duration"] / 3600)
        whole = s["cost_of_run"]
        tokens = {"": s["total_input_tokens"] + s["total_output_tokens"], "input_": s["total_input_tokens"],
                  "output_": s["total_output_tokens"]}  # fmt: skip
        for kind, count in tokens.items():
            assert s[f"cost_per_million_{kind}tokens"] * count / 1e6 == pytest.approx(whole)
        assert s["cost_per_request"] * s["completed"] == pytest.approx(whole)


def test_pools_have_prices_of_their_own():
    prices = {gpu: i + 0.5 for i, gpu in enumerate(gpu_ids())}
    scenario = load_scenario(FLEET, {"workload.num_requests": 60, "cost": {"prices": prices}})
    result = simulate(scenario)
    gpus = [prices[pool.gpu] * pool.tp * pool.replicas for pool in scenario.cluster.pools]
    assert result.summary()["cost_per_hour"] == pytest.approx(sum(gpus))


def test_replicas_that_come_and_go_are_charged_while_they_exist():
    result = simulate(load_scenario(ELASTIC, {"workload.num_requests": 4000, "cost": {"prices": {"h100-sxm": 3600.0}}}))
    s, since, charged = result.summary(), {}, 0.0
    for row in result.replicas.sort("time_s", maintain_order=True).iter_rows(named=True):
        if row["change"] in ("gone", "failed"):
            charged += min(row["time_s"], s["duration"]) - min(since.pop(row["replica"]), s["duration"])
        else:
            since.setdefault(row["replica"], row["time_s"])
    charged += sum(max(0.0, s["duration"] - start) for start in since.values())
    assert s["replica_starts"]
    assert s["cost_of_run"] == pytest.approx(charged, rel=1e-9)


def test_prompts_and_answers_carry_their_own_pools():
    s = simulate(load_scenario(SPLIT, {"workload.num_requests": 100})).summary()
    prompts = s["prefill_cost_per_million_input_tokens"] * s["total_input_tokens"]
    answers = s["decode_cost_per_million_output_tokens"] * s["total_output_tokens"]
    assert (prompts + answers) / 1e6 == pytest.approx(s["cost_of_run"])
    assert "prefill_cost_per_million_input_tokens" not in simulate(small()).summary()


def test_nothing_finished_costs_nothing_per_token():
    s = simulate(small(engine__max_model_len=1024, workload__lengths=fixed(2000, 10))).summary()
    assert (s["completed"], s["cost_per_request"], s["cost_per_million_tokens"]) == (0, None, None)


def test_a_gpu_without_a_list_price():
    out = call("run", QUICKSTART, "--set", "cluster.gpu=a10", "--set", "workload.num_requests=20", "--set",
               "model=llama-3.2-1b", "--json")  # fmt: skip
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["cost_per_hour"] is None
    [note] = [n for n in set_up_notes(cluster__gpu="a10", model="llama-3.2-1b") if "no cost" in n]
    assert "runpod has no price for a10; these sets do: lambda" in note
    assert any("nor does any bundled set" in n for n in set_up_notes(cluster__gpu="mi300x"))


def set_up_notes(**changes):
    return simulate(small(**changes)).manifest["notes"]


def test_prices_of_a_file_lie_beside_the_scenario(tmp_path, monkeypatch):
    (tmp_path / "deals").mkdir()
    (tmp_path / "deals" / "mine.yaml").write_text(
        "ours: {what: reserved, date: 2026-01-02, prices: {h100-sxm: 2}}\nother: {prices: {h100-sxm: 9}}\n"
    )
    file = tmp_path / "deals" / "s.yaml"
    file.write_text(QUICKSTART.read_text() + "\ncost: {prices: mine.yaml:ours}\n")
    monkeypatch.chdir(tmp_path)
    setup = set_up(load_scenario(file, {"workload.num_requests": 20}))
    assert setup.costing.rates == {"h100-sxm": 2}
    assert setup.costing.facts()["prices"] == "ours, reserved, 2026-01-02"
    assert setup.resolved()["cost"] == {"prices": f"{file.with_name('mine.yaml')}:ours"}
    assert "it holds several sets; write mine.yaml:NAME with one of ours, other" in wrong(
        tmp_path / "deals", {"prices": "mine.yaml"}
    )
    assert "it has no set 'our' (did you mean 'ours'?)" in wrong(tmp_path / "deals", {"prices": "mine.yaml:our"})


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"prices": "runpot"}, "cost.prices: 'runpot' is no set of prices (did you mean 'runpod'?); known: runpod"),
        ({"prices": "none.yaml"}, "none.yaml: no such file; the bundled sets are runpod"),
        ({"prices": {"h100": 2}}, "'h100' is not in the catalogue"),
        ({"prices": {"h100-sxm": 0}}, "0 is not above 0"),
        ({"prices": {"a10": 2}}, "cost.prices: yours has no price for h100-sxm; these sets do: runpod, lambda"),
        ({"prices": "hyperstack-spot"}, "cost.prices: hyperstack-spot has no price for h100-sxm"),
        ({"power": {"pue": 0.9}}, "cost.power.pue: 0.9 is not 1 or more"),
        ({"buy": {"price": 1}}, "cost.buy.years: missing"),
        ({"buy": BUY | {"price": {"a10": 9}}}, "cost.buy.price: nothing for h100-sxm"),
        ({"buy": BUY | {"yaers": 2}}, "cost.buy.yaers: unknown key (did you mean 'years'?)"),
        ({"api": {"input": -1, "output": 1}}, "cost.api.input: -1"),
        ({"spot": True}, "cost.spot: unknown key; allowed here: prices, power, buy, api"),
    ],
)
def test_mistakes(tmp_path, cost, words):
    assert words in wrong(tmp_path, cost)


def test_mistakes_of_a_price_file_have_lines(tmp_path):
    (tmp_path / "p.yaml").write_text("a:\n  what: sometimes\n  date: May\n  prices: {h100-sxm: -1, tpu: 1}\nb: 3\n")
    found = wrong(tmp_path, {"prices": "p.yaml:a"})
    for words in (
        "p.yaml:2: a.what: 'sometimes'",
        "p.yaml:3: a.date",
        "p.yaml:4: a.prices.h100-sxm",
        "'tpu'",
        "p.yaml:5: b",
    ):
        assert words in found


def test_energy_is_what_steps_draw():
    part = {"price": 0.2, "pue": 1.5, "rest": 100, "idle": 0.1, "decode": 0.5, "prompt": 0.9, "tdp": {"h100-sxm": 600}}
    result = simulate(small(cost={"power": part}, cluster__replicas=2))
    s, steps = result.summary(), result.steps
    took = steps["end_s"] - steps["start_s"]
    prompts = float(took.filter(steps["prefill_tokens"] > 0).sum())
    decodes = float(took.sum()) - prompts
    idle = 2 * s["duration"] - prompts - decodes
    joules = 1.5 * (prompts * (540 + 100) + decodes * (300 + 100) + idle * (60 + 100))
    assert s["energy_kwh"] * 3.6e6 == pytest.approx(joules)
    assert s["mean_power_w"] == pytest.approx(joules / s["duration"])
    assert s["joules_per_output_token"] == pytest.approx(joules / s["total_output_tokens"])
    assert s["energy_cost_per_hour"] == pytest.approx(s["mean_power_w"] / 1000 * 0.2)


def test_a_gpu_draws_between_idle_and_its_tdp():
    for gpu in map(load_gpu, gpu_ids()):
        if gpu.power.tdp_w is not None:
            draw = draw_of(gpu, PowerPart())
            assert 0 < draw.idle_w < draw.decode_w < draw.prompt_w <= gpu.power.tdp_w
    assert "no datasheet says what b300-sxm draws" in "".join(
        problems(QUICKSTART, {"cluster.gpu": "b300-sxm", "cost": {"power": {}}})
    )


def test_pipeline_stages_are_busy_at_most_all_of_the_time():
    low, high = (
        simulate(small(cluster__pp=2, cost={"power": {"idle": 0.0, "decode": share, "prompt": share}})).summary()
        for share in (0.5, 1.0)
    )
    assert low["mean_power_w"] <= 2 * 350
    assert high["mean_power_w"] == pytest.approx(2 * low["mean_power_w"])


@given(
    fixed=st.floats(0.01, 100), idle=st.floats(0, 5), more=st.floats(0, 5), other=st.floats(0.01, 200)
)  # fmt: skip
def test_break_even_is_where_the_bills_of_a_year_meet(fixed, idle, more, other):
    mine = Owned(fixed, idle, idle + more)
    use = mine.break_even(other)
    if use is None:
        assert other <= more
        return
    busy = use * HOURS_A_YEAR
    bought = HOURS_A_YEAR * fixed + busy * (idle + more) + (HOURS_A_YEAR - busy) * idle
    assert bought == pytest.approx(busy * other)
    less = 0.9 * busy
    assert HOURS_A_YEAR * (fixed + idle) + less * more >= less * other - 1e-6


def test_buying_over_its_term():
    assert capex_per_hour(40_000, 4, 0.25) * 4 * HOURS_A_YEAR == pytest.approx(30_000)
    assert rent_use(3.0, 4.0) == 0.75
    s = simulate(
        small(cost={"buy": BUY | {"opex": 0.1}, "api": {"input": 1, "output": 2}, "prices": {"h100-sxm": 4}})
    ).summary()
    each = 30_000 / (3 * HOURS_A_YEAR) + 3_000 / HOURS_A_YEAR
    assert s["owned_cost_per_hour"] == pytest.approx(each)
    assert s["break_even_buy_rent"] == pytest.approx(each / 4)
    paid = (s["total_input_tokens"] + 2 * s["total_output_tokens"]) / 1e6 * 3600 / s["duration"]
    assert s["api_cost_per_hour"] == pytest.approx(paid)
    assert s["break_even_buy_api"] == pytest.approx(each / paid)
    assert s["break_even_rent_api"] == pytest.approx(4 / paid)


def test_bought_gpus_idle_when_they_are_not_there():
    cost = {"buy": BUY, "power": {"price": 1.0, "idle": 0.5, "decode": 0.5, "prompt": 0.5}}
    result = simulate(load_scenario(ELASTIC, {"workload.num_requests": 4000, "cost": cost}))
    s = result.summary()
    each = 30_000 / (3 * HOURS_A_YEAR) + 0.35
    assert s["mean_replicas"] < s["peak_replicas"]
    assert s["owned_cost_per_hour"] == pytest.approx(s["gpus"] * each)


def test_the_report_shows_cost_and_its_assumptions():
    result = simulate(small(cost={"power": {"price": 0.1}, "buy": BUY, "api": {"input": 1, "output": 1}}))
    page = report_html(result)
    for words in (
        "<h2>Cost</h2>",
        "runpod, on-demand, 2026-09-25",
        "https://www.runpod.io/pricing",
        "idle, starting and draining",
        "buying is cheaper than renting",
        "power: watts per gpu",
        "vllm serve meta-llama/Llama-3.1-8B",
    ):
        assert words in page
    out = call("run", QUICKSTART, "--set", "workload.num_requests=20")
    assert "Cost         $3.49 an hour" in out.output


@pytest.mark.parametrize(
    ("value", "text"), [(2547.7, "$2,548"), (3.49, "$3.49"), (0.0973, "$0.097"), (0.000122, "$0.00012"), (0.0, "$0.00")]
)
def test_dollars(value, text):
    assert dollars(value) == text
