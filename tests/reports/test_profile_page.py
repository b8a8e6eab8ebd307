"""The page of a profile and the numbers it shows: rates of known devices, comparisons, escaped, drawn by a browser."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from plotly.offline import get_plotlyjs

from calibrate.measurements import Measurements
from calibrate.profile import MODELS, Profile, Residual, Source
from reports import profile_against, profile_words
from reports.profile_against import compare
from reports.profile_diff import diff
from reports.profile_figures import figures_of
from reports.profile_page import profile_html
from reports.profile_rates import Achieved, achieved, best, by_size
from servecast.errors import ServecastError
from tests.measured import fitted, measured, profile
from tests.reports.browser import figures_drawn

EVIL = '</script><script>alert(1)</script> <b>ünïcode</b> "quotes"'


def only(made: Profile, *families: str) -> Profile:
    return replace(made, families={name: made.families[name] for name in families})


def tables(of: Measurements, **changed: pl.DataFrame) -> Measurements:
    return replace(of, tables=dict(of.tables) | changed)


def rates() -> dict[tuple[str, str, str, str], Achieved]:
    return {(each.family, each.of, each.size, each.bound): each for each in achieved(profile())}


@pytest.fixture(scope="module")
def page() -> str:
    return profile_html(profile(), compare(profile(), measured()))


def test_every_family_is_described() -> None:
    assert set(profile_words.NAMES) == set(MODELS)
    assert {family for family, *_ in profile_words.ranges(profile())} == set(profile_words.NAMES.values())


def test_rates_of_a_known_device() -> None:
    # the shares of the datasheet's rates that tests/measured.py gives the device, give or take its ripple and the fit
    found = rates()
    for key, share in {
        ("gemm", "bf16", "m 4,096", "flops"): 0.803,
        ("gemm", "bf16", "m 1", "bytes"): 0.84,
        ("prefill_attention", "bf16 KV", "8,192 tokens", "flops"): 0.6,
        ("decode_attention", "bf16 KV", "128 x 2,048 tokens", "bytes"): 0.85,
        ("moe", "bf16", "16 tokens", "bytes"): 0.86,
        ("collective", "all_reduce", "64 MiB", "bytes"): 0.79,
    }.items():
        assert found[key].best / found[key].limit == pytest.approx(share, rel=0.08), key
    assert found["gemm", "fp8", "m 16", "bytes"].limit == 3.35e12
    assert found["gemm", "fp8", "m 4,096", "flops"].limit == 1979e12
    assert all(each.median <= each.best <= each.limit for each in found.values())
    assert [each.bound for each in by_size(list(found.values())) if (each.family, each.of) == ("gemm", "bf16")] == [
        "bytes", "bytes", "bytes", "flops",
    ]  # fmt: skip


def test_only_what_was_measured_counts() -> None:
    families = {(each.family, each.of) for each in achieved(profile())}
    assert ("prefill_attention", "bf16 KV, after cached") not in families  # derived
    layers = [each for each in achieved(profile()) if each.family == "moe"]
    assert {each.at.split(",")[0] for each in layers} == {"mixtral-8x7b"}
    assert [row[:2] for row in best(achieved(only(profile(), "collective")))] == [("collective", "all_reduce")]


def test_marks_lie_under_the_roof() -> None:
    figure = figures_of(profile())["roofline"][0](profile())
    under = 0
    for axis, peak in (("x", 989.0), ("x2", 1979.0)):
        for trace in (t for t in figure.data if t.xaxis == axis and t.mode == "markers"):
            roof = np.minimum(peak, np.asarray(trace.x) * 3.35)
            assert (np.asarray(trace.y) <= 1.001 * roof).all()
            under += len(trace.y)
    assert under == 2 * 5 * len(trace.y) > 1000
    symbols = {symbol for trace in figure.data if trace.mode == "markers" for symbol in trace.marker.symbol}
    assert {"circle", "circle-open"} <= symbols


def test_curves_end_where_the_measurements_end() -> None:
    figure = figures_of(profile())["decode"][0](profile())
    lines = {(trace.name, trace.xaxis): trace for trace in figure.data}
    assert max(lines["batch 1", "x"].x) <= 16384
    assert max(lines["batch 128", "x2"].x) == pytest.approx(128 * 16383, rel=0.01)
    assert len(lines["datasheet", "x"].y) == 2
    assert ("batch 512", "x") not in lines  # not measured


def test_a_profile_of_other_shapes_is_drawn(tmp_path: Path) -> None:
    own = measured()
    heads = {"heads": 14, "kv_heads": 2, "head_dim": 64, "value_dim": 64}
    rows = {
        name: own.tables[name].filter(pl.col("heads") == 32).with_columns(pl.lit(v).alias(k) for k, v in heads.items())
        for name in ("prefill_attention", "decode_attention")
    }
    gathered = own.tables["collective"].with_columns(op=pl.lit("all_gather"))
    made = fitted(replace(own, tables=rows | {"collective": gathered}))
    assert list(figures_of(made)) == ["prefill", "decode"]
    text = profile_html(made).replace(get_plotlyjs(), "")
    assert "14/2 heads of 64" in text
    assert "Not measured, priced from the datasheet: elementwise, GEMM, experts (MoE)." in text
    assert "Against the measurements" not in text


def test_what_is_said(page: str) -> None:
    for said in (
        "<title>h100-sxm: profile</title>",
        "NVIDIA H100-SXM5-80GB",
        "Fitted to kernel times measured by a test (Apache-2.0).",
        "<dt>Software</dt><dd>none 1.0</dd>",
        "m 1 to 8,192; n 4,096 to 28,672; k 4,096 to 14,336",
        "1 to 128 sequences of 128 to 16,384 tokens; heads of 128 elements",
        "prompts of 16 to 8,192 tokens, 1 at once; heads of 128 elements",
        "by custom_graph, 2, 4, 8 GPUs; 1 KiB to 256 MiB",
        f"<strong>Accuracy</strong>: {profile().provenance['accuracy']}.",
        '<td class="number">6.9 % (16.5 %)</td>',
    ):
        assert said in page, said
    assert "priced from the datasheet" not in page


def test_the_summary_shows_the_worst_edge_and_no_nan() -> None:
    rows = {(family, kind): cells for family, kind, cells in profile_words.summary(profile().residuals)}
    assert set(rows) == {("GEMM", "bf16"), ("decode attention", "all")}
    points, shapes, edge = rows["GEMM", "bf16"]
    assert (points.median, shapes, edge.median) == (0.0271, None, 0.0687)
    lost = profile_words.summary([Residual("moe", "bf16", "rows", math.nan, math.nan, 0)])
    assert lost == [("experts (MoE)", "bf16", [None, None, None])]


def test_pages_are_escaped_and_load_nothing() -> None:
    own = measured(device=EVIL, measured_by=EVIL, source=EVIL, licence=EVIL, software=EVIL, notes=(EVIL,))
    gemm = own.tables["gemm"].filter(pl.col("weights") == "bf16")
    renamed = own.tables["collective"].with_columns(backend=pl.lit(EVIL))
    small = replace(own, tables={"gemm": gemm, "collective": renamed, "elementwise": own.tables["elementwise"]})
    made = fitted(small)
    made = replace(made, residuals=(Residual("gemm", EVIL, EVIL, math.nan, 0.1, 1),))
    page = profile_html(made, compare(made, small))
    assert len(page.encode()) < 6_500_000
    text = page.replace(get_plotlyjs(), "")
    assert re.search(r"\b(nan|NaN|None|inf|Infinity)\b", text) is None
    assert re.search(r"""(src|href)\s*=|@import|url\(""", text) is None
    assert "default-src 'none'" in text
    assert "alert(1)</script>" not in text
    assert "<b>ünïcode" not in text
    assert "\\u003cscript>" not in text  # nor in a figure's text


def test_against_its_own_measurements() -> None:
    against = compare(profile(), measured())
    assert "was fitted to these points" in against.seen
    assert [each.family for each in against.families] == list(profile_words.NAMES)
    assert against.left_out == ()
    for each in against.families:
        assert np.median(np.abs(each.ratio - 1)) < 0.06, each.family


def test_against_other_measurements() -> None:
    others = tables(
        measured(slower=2.0, measured_by="somebody else"),
        quantize=pl.DataFrame({"op": ["static"], "weights": ["fp8"], "m": [1], "k": [64], "seconds": [1e-6]}),
        gemm=measured(slower=2.0, weights=("bf16", "int8")).tables["gemm"],
    )
    against = compare(profile(), others)
    assert "was not fitted to these points" in against.seen
    assert against.left_out == (
        "GEMM: 28 points of types that the profile was not fitted to",
        "quantize (1 points): the profile does not price it",
    )
    for each in against.families:
        assert np.median(each.ratio) == pytest.approx(0.5, rel=0.05), each.family
        assert each.row[-1].startswith("-")


def test_against_a_sample_of_many() -> None:
    own = measured()
    many = pl.concat([own.tables["gemm"].with_columns(n=pl.col("n") + i) for i in range(20)])
    (gemm,) = compare(profile(), replace(own, tables={"gemm": many})).families
    assert gemm.row[1] == f"1,000 of {len(many):,}"
    assert len(gemm.names) == len(gemm.predicted) == 1000
    _, said = profile_against.figures_of(compare(profile(), replace(own, tables={"gemm": many})))["against-gemm"]
    assert said.startswith("GEMM, 1,000 of 1,120 points: |error| median ")


def test_against_what_cannot_be_compared() -> None:
    with pytest.raises(ServecastError, match="of h200-sxm, the profile is of h100-sxm"):
        compare(profile(), measured("h200-sxm"))
    with pytest.raises(ServecastError, match="nothing that the profile was fitted to; it was to gemm"):
        compare(only(profile(), "gemm"), replace(measured(), tables={"moe": measured().tables["moe"]}))


def test_a_slower_device_is_as_much_slower_everywhere() -> None:
    later = measured(slower=1.25)
    kept = ("gemm", "prefill_attention", "elementwise", "collective")
    slower = fitted(replace(later, tables={name: later.tables[name] for name in kept}))
    found = diff(only(profile(), *kept), slower)
    assert {row.family for row in found.rows} == set(kept)
    for row in found.rows:
        if "cached" not in row.of:
            assert row.median == pytest.approx(1.25, rel=0.05), row
            assert row.p10 <= row.median <= row.p90
    assert found.only == ((), ())
    same = diff(profile(), profile())
    assert same.largest == ()
    assert all(row.median == row.p90 == 1 for row in same.rows)


def test_disagreements_have_their_shapes() -> None:
    own = measured()
    odd = pl.when((pl.col("n") == 28672) & (pl.col("weights") == "fp8")).then(3.0).otherwise(1.0)
    gemm = own.tables["gemm"].with_columns(pl.col("seconds") * odd)
    other = fitted(replace(own, tables={"gemm": gemm, "collective": own.tables["collective"]}))
    found = diff(profile(), other)
    worst = found.largest[0]
    assert worst.family == "gemm"
    assert worst.what.startswith("fp8, m ")
    assert "n 28,672, k 4,096" in worst.shape
    assert worst.b / worst.a == pytest.approx(3, rel=0.3)
    assert [call.off for call in found.largest] == sorted((call.off for call in found.largest), reverse=True)
    assert len({call.shape for call in found.largest}) == len(found.largest)
    assert found.only[1] == ()
    assert found.only[0][0] == ("prefill_attention", ("all of it",))
    assert {row.family for row in found.rows} == {"gemm", "collective"}


def test_what_only_one_has() -> None:
    own = measured()
    less = {
        "gemm": own.tables["gemm"].filter(pl.col("weights") == "bf16"),
        "collective": own.tables["collective"].filter(pl.col("gpus") == 2),
    }
    found = diff(only(profile(), "gemm", "collective", "elementwise"), fitted(replace(own, tables=less)))
    assert found.only == (
        (
            ("gemm", ("fp8",)),
            ("elementwise", ("all of it",)),
            ("collective", ("all_reduce by custom_graph, GPUs 4, 8",)),
        ),
        (),
    )
    assert [row.of for row in found.rows] == ["bf16", "all_reduce"]
    assert found.rows[1].points == 3
    norms = own.tables["elementwise"]
    rope = pl.concat([norms.with_columns(op=pl.lit("rope"), elements=pl.lit(size)) for size in (4096, 8192)])
    more = fitted(replace(own, tables={"elementwise": pl.concat([norms, rope], how="vertical_relaxed")}))
    assert diff(only(profile(), "elementwise"), more).only == ((), (("elementwise", ("rope",)),))


def test_a_profile_of_one_model_shows_that_model_only() -> None:
    one = replace(profile(), only=((28672, 4096), (4096, 14336)))
    assert {each.at.split(",")[0] for each in achieved(only(one, "gemm"))} <= {"llama-3-8b gate_up", "llama-3-8b down"}
    figure = figures_of(one)["roofline"][0](one)
    assert {len(trace.y) for trace in figure.data if trace.mode == "markers"} == {2}
    assert "2 GEMM shapes: other models are refused." in profile_words.limits(one)[0]
    (row, _) = diff(only(profile(), "gemm"), only(one, "gemm")).rows
    assert row.points == 2 * 4
    assert figures_of(replace(one, only=((1, 1),))).keys() == figures_of(one).keys() - {"roofline"}


def test_rates_above_the_datasheet_are_explained() -> None:
    each = achieved(only(profile(), "collective"))[-1]
    assert profile_words.cached([each]) == ""
    assert "in a cache" in profile_words.cached([replace(each, best=1.5 * each.limit)])


def test_several_sources_are_all_named() -> None:
    another = Source(("moe",), {"measured_by": "another", "licence": "MIT"})
    made = replace(profile(), sources=(*profile().sources, another))
    assert "measured by a test (Apache-2.0); and by another (MIT)." in profile_words.origin(made)
    assert profile_words.sources(made)[1][1][1] == ("On", "not stated")
    assert "does not say who" in profile_words.origin(replace(made, sources=()))


def test_in_a_browser(page: str, tmp_path: Path) -> None:
    assert len(figures_of(profile())) == 5
    assert figures_drawn(page, tmp_path) == 5 + len(profile_words.NAMES)
