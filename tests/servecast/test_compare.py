"""Comparisons: what `run` gives under every seed, paired; no ranking of what chance, other requests or the error of the
model explain; and what people see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import ttest_rel

from reports.comparing import words
from reports.comparing.facts import Compared, Difference, Line
from reports.comparing.page import compare_html
from servecast.cli import main
from servecast.comparing.compare import compare
from servecast.comparing.scenarios import candidates, fingerprint
from servecast.errors import ServecastError
from servecast.intervals import predict_intervals
from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from servecast.yamlfile import dump_yaml
from tests.reports.browser import figures_drawn

SCENARIO: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "engine": {"preset": "vllm-0.19"},
    "cluster": {"gpu": "h100-sxm"},
    "workload": {
        "num_requests": 240,
        "arrivals": {"kind": "poisson", "rate": 12},
        "lengths": {
            "prompt": {"kind": "lognormal", "mean": 600, "cv": 1},
            "output": {"kind": "lognormal", "mean": 80, "cv": 1},
        },
    },
    "slo": {"ttft": "200ms"},
    "seed": 7,
}
SEQS = {"engine.max_num_seqs": [4, 32]}


def written(folder: Path, name: str, /, **changes: Any) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(SCENARIO | changes), encoding="utf-8")
    return file


def recorded(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    rows = zip(np.cumsum(rng.exponential(0.1, 400)), rng.integers(50, 900, 400), rng.integers(2, 150, 400), strict=True)
    lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{a:.4f},{p},{o}" for a, p, o in rows)]
    (folder / "trace.csv").write_text("\n".join(lines), encoding="utf-8")
    return written(folder, "recorded", workload={"trace": "trace.csv"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def seqs(folder: Path) -> Compared:
    return compare(written(folder, "chat"), SEQS, seeds=4, workers=1)


@pytest.fixture(scope="module")
def course(folder: Path) -> Compared:
    return compare(recorded(folder), SEQS, workers=1)


def line(c: Compared, key: str) -> Line:
    return next(line for line in c.lines if line.metric.key == key)


def last(c: Compared, key: str) -> Difference:
    found = line(c, key).differences[-1]
    assert found is not None
    return found


@pytest.mark.parametrize("key", ["p50_ttft_ms", "p99_itl_ms", "output_throughput", "cost_per_million_output_tokens"])
def test_figures_are_those_of_run_paired_by_seed(seqs: Compared, folder: Path, key: str) -> None:
    a, b = (
        [simulate(load_scenario(folder / "chat.yaml", {"engine.max_num_seqs": n, "seed": s})).summary()[key]
         for s in seqs.seeds]
        for n in (4, 32)
    )  # fmt: skip
    assert seqs.seeds == (7, 8, 9, 10)
    assert [v.mean for v in line(seqs, key).values if v] == pytest.approx([np.mean(a), np.mean(b)])
    low, high = ttest_rel(b, a).confidence_interval(0.95)
    found = last(seqs, key).interval
    assert found is not None
    assert found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_better_and_worse_only_beyond_noise(seqs: Compared) -> None:
    assert last(seqs, "p50_ttft_ms").word == "better"
    assert line(seqs, "p50_ttft_ms").best == 1
    assert last(seqs, "p50_tpot_ms").word == "worse"  # larger batches
    assert line(seqs, "p50_tpot_ms").best == 0
    assert last(seqs, "preemptions").word == "equal"
    for found in seqs.lines:
        difference = found.differences[1]
        assert difference is not None
        assert difference.interval is not None
        assert (difference.word in ("better", "worse")) == difference.interval.excludes_zero
        assert (found.best is None) != (difference.word in ("better", "worse"))


def test_why(seqs: Compared) -> None:
    said = " ".join(words.why(seqs, 1))
    assert "queue -" in said
    first, other = seqs.ran
    assert sum(first.spent["ttft_ms"].values()) == pytest.approx(first.figures["mean_ttft_ms"])
    assert sum(other.spent["tpot_ms"].values()) == pytest.approx(other.figures["mean_tpot_ms"])
    assert first.changes == ()
    assert other.changes == (("engine.max_num_seqs", "4", "32"),)


def test_a_saturated_one_is_labelled(seqs: Compared) -> None:
    assert seqs.ran[0].saturated == 4
    assert "depend on how long the run is" in words.piled_up(seqs)[0]
    assert seqs.trimmed is None
    assert "no steady window" in " ".join(words.method(seqs))


def test_a_steady_window_has_fewer_requests(folder: Path) -> None:
    slow = written(folder, "slow", workload=SCENARIO["workload"] | {"arrivals": {"kind": "poisson", "rate": 4}})
    c = compare(slow, "cluster.router=random,round-robin", seeds=2, workers=1)  # among one replica
    assert c.trimmed is not None
    assert [found.metric.key for found in c.steady] == [
        f"{q}_{name}_ms" for name in ("ttft", "tpot", "e2el") for q in ("p50", "p99")
    ]
    if not c.trimmed:
        assert [v.mean for v in c.steady[0].values if v] == pytest.approx(
            [v.mean for v in line(c, "p50_ttft_ms").values if v]
        )
    assert set(words.SIGNS) == set(words.VERDICTS)
    assert "the very same figures" in words.answer(c)[0]


def test_the_same_scenario_is_said_to_be(folder: Path) -> None:
    a, b = written(folder, "a"), written(folder, "b", name="another name", seed=99)
    c = compare([a, b], seeds=2, workers=1)
    assert c.ran[1].same
    assert words.answer(c) == ["b and a are the same scenario, and so is every figure."]
    assert {found.differences[1].word for found in c.lines if found.differences[1]} == {"equal"}


def test_other_requests_are_not_ranked(folder: Path) -> None:
    faster = written(folder, "faster", workload=SCENARIO["workload"] | {"arrivals": {"kind": "poisson", "rate": 6}})
    c = compare([written(folder, "a"), faster], seeds=2, workers=1)
    assert not c.alike
    assert {found.differences[1].word for found in c.lines if found.differences[1]} <= {"unlike", "equal"}
    assert all(found.best is None for found in c.lines)
    assert "different workloads" in words.answer(c)[0]


def test_another_slo_makes_goodput_another_thing_and_only_that(folder: Path) -> None:
    c = compare([written(folder, "a"), written(folder, "strict", slo={"ttft": "50ms"})], seeds=2, workers=1)
    assert c.alike
    assert last(c, "request_goodput").word == "unlike"
    assert last(c, "p99_ttft_ms").word == "equal"


def test_what_serves_requests_is_not_in_their_fingerprint(folder: Path) -> None:
    file = written(folder, "a")

    def of(**changes: Any) -> str:
        return fingerprint(set_up(load_scenario(file, {k.replace("__", "."): v for k, v in changes.items()})))

    assert of() == of(cluster__gpu="l40s", engine__max_num_seqs=4, slo__ttft="1s")
    assert len({of(), of(seed=8), of(workload__num_requests=239), of(workload__arrivals__rate=13)}) == 4


def test_a_recording_has_one_course(course: Compared, folder: Path) -> None:
    assert len(course.seeds) == 1
    assert "seeds change nothing" in course.one_course
    assert "sections" in words.method(course)[0]
    found = last(course, "p50_ttft_ms")
    assert found.interval is not None
    one, other = (
        simulate(load_scenario(folder / "recorded.yaml", {"engine.max_num_seqs": n})).summary() for n in (4, 32)
    )
    assert found.interval.mean == pytest.approx(other["p50_ttft_ms"] - one["p50_ttft_ms"])
    assert found.interval.half is not None
    assert last(course, "kv_peak_fraction").word in ("unknown", "equal")
    assert last(course, "output_throughput").interval is not None
    assert last(course, "output_throughput").word != "unknown"


def test_spans_of_token_gaps_make_up_all(folder: Path) -> None:
    result = simulate(load_scenario(folder / "chat.yaml", {"engine.max_num_seqs": 8}))
    spans = result.itl_within(np.linspace(0.0, result.duration_s, 9))
    assert sum(span.count for span in spans) == result.itl.count
    (whole,) = result.itl_within(np.array([0.0, result.duration_s]))
    assert np.array_equal(whole.values, result.itl.values)


def test_differences_under_the_models_error_are_taken_draw_by_draw(folder: Path) -> None:
    file = written(folder, "a")
    c = compare(file, SEQS, seeds=2, intervals=5, workers=1)
    a, b = (
        predict_intervals(set_up(load_scenario(file, {"engine.max_num_seqs": n})), 5).draws["p99_tpot_ms"]
        for n in (4, 32)
    )
    found = last(c, "p99_tpot_ms").under_error
    assert found == pytest.approx(tuple(np.quantile(b - a, [0.1, 0.9])))
    for each in c.lines:
        difference = each.differences[1]
        assert difference is not None
        assert difference.under_error is not None
        low, high = difference.under_error
        assert difference.word not in ("better", "worse") or low > 0 or high < 0


def test_what_cannot_run_is_listed_and_the_others_are_compared(folder: Path) -> None:
    large = written(folder, "large", model="llama-3.1-70b")
    c = compare([large, written(folder, "a"), written(folder, "b", cluster={"gpu": "l40s"})], seeds=2, workers=1)
    assert [r.label for r in c.ran] == ["a", "b"]
    ((label, error),) = c.failed
    assert label == "large"
    assert "does not fit" in error
    assert "large" in compare_html(c)


@pytest.mark.parametrize(
    ("files", "vary", "said"),
    [
        (["a"], (), "nothing to compare it with"),
        (["a", "nowhere"], (), "no such file"),
        (["a", "b"], ["engine.max_num_seqs=1,2"], "goes with one scenario"),
        (["a"], ["engine.max_num_seqs=4"], "is the only value"),
        (["a"], ["engine.max_num_sqes=4,5"], "--vary engine.max_num_sqes"),
        (["a"], ["seed=1,2"], "--vary seed"),
        (["a"], ["engine.max_num_seqs=1:13:13"], "servecast sweep"),
    ],
)
def test_mistakes(folder: Path, files: list[str], vary: list[str], said: str) -> None:
    for name in ("a", "b"):
        written(folder, name)
    with pytest.raises(ServecastError, match=said):
        candidates([folder / f"{name}.yaml" for name in files], vary, ())


def test_mistakes_of_the_whole(folder: Path) -> None:
    file = written(folder, "a")
    with pytest.raises(ServecastError, match="--seeds: 0"):
        compare(file, SEQS, seeds=0)
    with pytest.raises(ServecastError, match="fewer than two"):
        compare([file, written(folder, "large", model="llama-3.1-70b")])
    with pytest.raises(ServecastError, match="seed"):
        compare(written(folder, "bad", seed="seven"), SEQS)


def test_files_of_one_name_are_told_apart(folder: Path) -> None:
    (folder / "other").mkdir(exist_ok=True)
    found = candidates([written(folder, "a"), written(folder / "other", "a"), written(folder, "a")], (), ())
    assert len({each.label for each in found}) == 3


def test_points_of_several_keys_are_told_apart(folder: Path) -> None:
    keys, file = "cluster.tp+model+engine.kv_cache_dtype", written(folder, "a")
    found = candidates([file], [f"{keys}=[1,llama-3.1-8b,auto],[1,llama-3.1-8b,fp8]"], ())
    assert [each.label for each in found] == ["tp 1, llama-3.1-8b, auto", "tp 1, llama-3.1-8b, fp8"]
    same = 30 * "long "
    found = candidates([file], [f"name+engine.max_num_seqs=[{same},8],[{same},16]"], ())
    assert len({each.label for each in found}) == 2


@pytest.mark.parametrize("name", ["seqs", "course"])
def test_the_page(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert figures_drawn(compare_html(request.getfixturevalue(name)), tmp_path) == 3


def test_names_are_escaped(folder: Path) -> None:
    name = "<b>x</b>"
    (folder / "u").mkdir(exist_ok=True)
    file = folder / "u" / "b&<i>.yaml"
    file.write_text(dump_yaml(SCENARIO | {"name": name}), encoding="utf-8")
    html = compare_html(compare([written(folder, "a"), file], seeds=1, workers=1))
    assert "b&amp;&lt;i&gt;" in html
    assert "b&<i>" not in html


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(written(folder, "a"))
    typed = ["compare", file, "--vary", "engine.max_num_seqs=2,6,32", "--seeds", "3", "--workers", "1"]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 0, done.output
    assert "Better than every other beyond noise" in done.output
    facts = json.loads((tmp_path / "runs" / "a-compare" / "compare.json").read_text(encoding="utf-8"))
    assert [each["label"] for each in facts["scenarios"]] == [f"max_num_seqs {n}" for n in (2, 6, 32)]
    assert (tmp_path / "runs" / "a-compare" / "report.html").exists()
    done = CliRunner().invoke(main, [*typed, "--json"])
    assert json.loads(done.stdout)["metrics"] == facts["metrics"]
    assert CliRunner().invoke(main, ["compare", "no.yaml", file]).exit_code == 2
