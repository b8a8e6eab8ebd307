"""A profile says the same after a round trip, prices what it holds, and owns up to what it does not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from calibrate.cost import compile_cost
from calibrate.coverage import outside_shares
from calibrate.datasheet import Datasheet
from calibrate.fit import fit_profile
from calibrate.hardware import load_gpu
from calibrate.kernel_times import kernels_s
from calibrate.measurements import FAMILIES, Device, Measurements
from calibrate.profile import FOLDER, MODELS, SKEW, Profile, load_profile, profile_names
from servecast.errors import ServecastError
from tests.calibrate.helpers import parts

DEVICE = Device("h100-sxm", "NVIDIA H100", "us", "made up", "none", "nothing", "never")
GPU = Datasheet(load_gpu("h100-sxm"))


def table(family: str, rows: list[tuple[object, ...]]) -> pl.DataFrame:
    names = (*FAMILIES[family], "seconds", "spread", "kernel")
    return pl.DataFrame([dict(zip(names, (*row, None, "k"), strict=True)) for row in rows])


@cache
def profile() -> Profile:
    """Fitted to GEMMs and norms that take twice what the datasheet says, up to m = 1024."""
    gemm = [
        ("bf16", m, n, k, 2 * float(GPU.gemm_s("bf16", np.array([float(m)]), n, k)[0]))
        for m in (1, 16, 64, 256, 1024)
        for n in (1024, 4096, 16384, 65536)
        for k in (1024, 4096, 16384)
    ]
    norms = [
        ("norms", rows, 16384, 2 * float(GPU.elementwise_s("norms", np.array([float(rows)]), 16384)[0]))
        for rows in (1, 8, 64, 512, 4096)
    ]
    tables = {"gemm": table("gemm", gemm), "elementwise": table("elementwise", norms)}
    return fit_profile([Measurements(DEVICE, tables)])


def saved(folder: Path, **changes: object) -> Path:
    path = folder / "p.json"
    path.write_text(json.dumps(json.loads(profile().to_text()) | changes), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ServecastError) as caught:
        dict(load_profile(path).families)
    return caught.value.problems[0]


def test_a_round_trip_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(profile().to_text(), encoding="utf-8")
    again = load_profile(path)
    assert again.to_text() == profile().to_text()
    assert max(len(line) for line in profile().to_text().splitlines()) < 2000, "a row a line"


def test_it_prices_what_was_measured_and_the_rest_from_the_datasheet() -> None:
    p, m = profile(), np.array([1.0, 100.0, 1024.0])
    assert p.gemm_s("bf16", m, 4096, 4096) == pytest.approx(2 * GPU.gemm_s("bf16", m, 4096, 4096), rel=0.1)
    assert p.collective_s("allreduce", m, 2) == pytest.approx(GPU.collective_s("allreduce", m, 2))
    assert p.missing == ["collective", "decode_attention", "moe", "prefill_attention"]
    assert p.inside("gemm", "bf16", m * 2, 4096, 4096).tolist() == [True, True, False]
    assert not p.inside("collective", "allreduce", m, 2).any()
    assert {r.family for r in p.residuals} == {"gemm", "elementwise"}
    assert p.provenance["from_datasheet"] == p.missing


def test_experts_of_a_dtype_that_nobody_measured_come_from_the_datasheet() -> None:
    a100 = load_profile(FOLDER / "a100-sxm.json")
    rows = np.array([1.0, 64.0, 4096.0])
    layer = (2048, 768, 128, 8, 1)
    assert a100.moe_s("fp8", rows, *layer).tolist() == Datasheet(a100.gpu).moe_s("fp8", rows, *layer).tolist()
    assert not a100.inside("moe", "fp8", rows, *layer, 1).any()
    assert a100.moe_s("bf16", rows, *layer).tolist() != Datasheet(a100.gpu).moe_s("bf16", rows, *layer).tolist()


def test_time_outside_what_was_measured_is_counted() -> None:
    model, layout, _, engine = parts("llama-3.1-8b", "h100-sxm")
    cost = compile_cost(model, layout, engine, profile())
    inside, beyond = cost.step_s((), 8, 8000), cost.step_s([(4096, 0)], 0, 0)
    steps = {
        "start_s": [0.0, inside], "end_s": [inside, inside + beyond], "steps": [1.0, 1.0],
        "prefill_requests": [0.0, 1.0],
        "prefill_tokens": [0.0, 4096.0], "decodes": [8.0, 0.0], "kv_tokens": [8000.0, 0.0],
        "draft_tokens": [0.0, 0.0],
    }  # fmt: skip
    columns = {name: np.array(values) for name, values in steps.items()}
    shares = outside_shares(model, layout, engine, profile(), cost, [columns])
    assert set(shares) == {"gemm", "elementwise", "prefill_attention", "decode_attention"}
    known = sum(cost.tokens_s) > 0 and cost.tokens_s[4096]
    assert shares["gemm"] < known / (inside + beyond), "the norms of 4,096 tokens were measured"
    assert sum(shares.values()) < 1.0
    first = {name: values[:1] for name, values in columns.items()}
    assert outside_shares(model, layout, engine, profile(), cost, [first]).get("gemm", 0.0) < 0.1  # the lm_head alone


def test_sums_of_kernels_are_compared_with_whole_steps() -> None:
    model, layout, _, _ = parts("llama-3.1-8b", "h100-sxm")
    batches = [(0, 0, 0, 8, 8000), (2, 512, 1024, 0, 0), (1, 256, 0, 4, 4000)]
    steps = []
    for n, q, context, decodes, kv in batches:
        seconds = kernels_s(model, layout, profile(), [(q, context)] * n, decodes, kv)
        steps.append(("llama-3.1-8b", 1, n, q, context, decodes, kv, 1.25 * seconds))
    steps.append(("nobody-knows-it", 1, 0, 0, 0, 1, 100, 1.0))
    gemm = [("bf16", m, 4096, 4096, 1e-5 * m) for m in (1, 16, 256)]
    tables = {"gemm": table("gemm", gemm), "step": table("step", steps)}
    found = fit_profile([Measurements(DEVICE, tables)])
    off = {r.kind: r for r in found.residuals if r.family == "step"}
    assert {kind: r.points for kind, r in off.items()} == {"all": 3, "decode": 1, "prefill": 1, "mixed": 1}
    mine = kernels_s(model, layout, found, [], 8, 8000)
    assert off["decode"].median == pytest.approx(abs(mine / steps[0][-1] - 1))
    cost = compile_cost(model, layout, parts("llama-3.1-8b", "h100-sxm")[3], profile())
    assert kernels_s(model, layout, profile(), [], 8, 8000) == pytest.approx(cost.step_s((), 8, 8000) - cost.after_s[8])


def test_a_profile_of_one_model_refuses_other_shapes(tmp_path: Path) -> None:
    found = load_profile(saved(tmp_path, only=[[4096, 4096]]))
    assert found.gemm_s("bf16", np.ones(1), 4096, 4096) > 0
    with pytest.raises(ServecastError, match="would only guess a 4096 x 11008 matrix"):
        found.gemm_s("bf16", np.ones(1), 4096, 11008)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    assert "it may have been cut off" in refusal(path)
    assert "has format 99" in refusal(saved(tmp_path, format=99))
    assert "did you mean 'h100-sxm'" in refusal(saved(tmp_path, gpu="h100-sxn"))
    assert "family 'gem' is not known (did you mean 'gemm'?)" in refusal(saved(tmp_path, families={"gem": {}}))
    assert "families.gemm: the key 'flops' is missing" in refusal(saved(tmp_path, families={"gemm": {}}))
    assert "cannot be read" in refusal(tmp_path / "none.json")
    path.write_text("[]", encoding="utf-8")
    assert str(path) in refusal(path)


def test_measurements_of_several_gpus_make_no_profile() -> None:
    other = Measurements(Device("l40s", "L40S", "us", "made up", "none", "nothing", "never"), {})
    with pytest.raises(ServecastError, match="found h100-sxm, l40s"):
        fit_profile([Measurements(DEVICE, {}), other])
    with pytest.raises(ServecastError, match="no family that is fitted"):
        fit_profile([Measurements(DEVICE, {})])


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_whole(name: str) -> None:
    found = load_profile(FOLDER / f"{name}.json")
    assert found.gpu.id == name
    assert set(found.families) <= set(MODELS)
    held_out = {r.family for r in found.residuals if r.what == "rows"}
    for family in ("gemm", "prefill_attention", "decode_attention"):
        assert found.families[family]
        assert family in held_out
    assert all(source.facts["licence"] for source in found.sources)


def test_few_experts_are_drawn_at_random() -> None:
    """And many by a power law, which touches fewer of them in a small batch."""
    moe = load_profile(FOLDER / "h100-sxm.json")
    model, rows = moe.families["moe"], np.array([16.0, 90.0])
    few, many = (4096, 14336, 8, 2, 2), (2048, 768, 128, 8, 1)
    assert moe.moe_s("bf16", rows, *few).tolist() == model.seconds("bf16", rows, *few, 1, "uniform").tolist()
    assert moe.moe_s("bf16", rows, *many).tolist() == model.seconds("bf16", rows, *many, 1, SKEW).tolist()
