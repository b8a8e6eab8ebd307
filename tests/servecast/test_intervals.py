"""How sure a forecast is: draws that scenarios share, wider where less is known, and what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from calibrate.datasheet import Datasheet
from calibrate.hardware import load_gpu
from calibrate.profile import FOLDER, load_profile
from calibrate.scaled import Scaled
from calibrate.uncertainty import DATASHEET, QUARTILE, draws
from servecast import load_scenario, predict_intervals, simulate
from servecast.cli import main
from servecast.setup import Setup, set_up
from tests.servecast.helpers import QUICKSTART

FEW = {"workload.num_requests": 150}


def setup(**overrides: object) -> Setup:
    return set_up(load_scenario(QUICKSTART, FEW | overrides))


def test_draws_are_shared_whatever_the_prices() -> None:
    profile, sheet = load_profile(FOLDER / "h100-sxm.json"), Datasheet(load_gpu("h100-sxm"))
    one, other = list(draws(profile, 300, 1)), list(draws(sheet, 300, 1))
    assert [d.host for d in one] == [d.host for d in other]
    assert list(draws(Scaled(profile, {"gemm": 2.0}), 300, 1)) == one
    assert [d.host for d in draws(profile, 5, 2)] != [d.host for d in one[:5]]
    assert 0.75 <= min(d.long_steps for d in one) < max(d.long_steps for d in one) <= 1.35
    logs = {name: np.log([[d.factors[name] for d in each] for each in (one, other)]) for name in ("gemm", "moe")}
    assert logs["gemm"].std(axis=1)[1] == pytest.approx(DATASHEET, rel=0.15), "a datasheet says less"
    off = max(r.median for r in profile.residuals if (r.family, r.what) == ("gemm", "rows")) / QUARTILE
    assert logs["gemm"].std(axis=1)[0] == pytest.approx(np.hypot(off, 0.045), rel=0.15)
    assert np.corrcoef(*logs["gemm"])[0, 1] > 0.8, "the same error, larger"
    assert logs["moe"].mean(axis=1)[0] == pytest.approx(0.0, abs=0.03), "no lean"
    assert logs["moe"].std(axis=1)[0] > 0.2, "loads of experts differ"


def test_intervals_hold_the_forecast_and_widen_with_ignorance() -> None:
    found = predict_intervals(setup(), 30)
    forecast = simulate(setup()).summary()
    for metric in ("mean_tpot_ms", "mean_ttft_ms", "p99_ttft_ms"):
        low, high = found.of(metric) or (0.0, 0.0)
        assert low < forecast[metric] * 1.05 < high * 1.1, metric
    tpot = found.draws["mean_tpot_ms"]
    assert found.of("mean_tpot_ms") == (np.quantile(tpot, 0.1), np.quantile(tpot, 0.9))
    assert found.of("nothing") is None
    assert found.saturated == 0
    sheet = predict_intervals(setup(**{"cluster.profile": "datasheet"}), 30)
    width = [np.log(high / low) for low, high in (i.of("mean_tpot_ms") or (1, 1) for i in (found, sheet))]
    assert width[1] > 1.5 * width[0]
    again = predict_intervals(setup(), 30)
    assert np.array_equal(again.draws["mean_tpot_ms"], tpot), "the same bytes"


def test_what_may_be_wrong_moves_what_it_should() -> None:
    base = setup().pool
    draw = next(draws(base.prices, 1, 0))
    none = replace(draw, factors={}, long_steps=1.0, host=1.0, front_end=1.0)
    assert none.engine(base.engine) == base.engine
    slow = replace(none, host=2.0, front_end=3.0).engine(base.engine)
    assert slow.host.bubble_s == 2 * base.engine.host.bubble_s
    assert slow.front_end.request_s == 3 * base.engine.front_end.request_s
    hot = replace(none, long_steps=1.2).cost(base.cost)
    assert hot.step_s([(2000, 0)], 0, 0) == pytest.approx(1.2 * base.cost.step_s([(2000, 0)], 0, 0), rel=0.01)
    assert hot.step_s((), 8, 8000) == base.cost.step_s((), 8, 8000), "decode reads memory, whatever the clock"


def test_the_command_says_how_sure_it_is(tmp_path: Path) -> None:
    args = ["run", str(QUICKSTART), "--set", "workload.num_requests=60", "--intervals", "5"]
    shown = CliRunner().invoke(main, [*args, "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "80 % intervals from 5 draws" in shown.output
    assert "How sure is it?" in (tmp_path / "report.html").read_text("utf-8")
    plain = CliRunner().invoke(main, [*args, "--json"])
    found = json.loads(plain.output)["intervals"]
    assert found["draws"] == 5
    low, high = found["intervals"]["mean_ttft_ms"]
    assert low < high
    assert "'3' is not a number of draws, 5 to 1000" in CliRunner().invoke(main, [*args[:-1], "3"]).output
