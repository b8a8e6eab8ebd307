"""Workloads from scraped metrics: the lengths and the rate that were put in come out, and everything odd is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servecast.errors import ServecastError
from workloads.generate import generate
from workloads.prometheus import read_prometheus
from workloads.trace import Ints

EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
RNG = np.random.default_rng(5)
PROMPTS = np.maximum(np.rint(RNG.lognormal(6, 0.7, 5000)), 1).astype(np.int64)
OUTPUTS = np.maximum(np.rint(RNG.lognormal(4, 1.0, 5000)), 1).astype(np.int64)
HALF = 2000


def rows(prompts: Ints, outputs: Ints, edges: Any = EDGES, **labels: str) -> list[tuple[str, dict[str, str], float]]:
    """(metric, labels, value) as an engine that answered these requests would show."""
    labels = {"engine": "0", "model_name": "org/model"} | labels
    found: list[tuple[str, dict[str, str], float]] = []
    for what, lengths in (("prompt", prompts), ("generation", outputs)):
        name = f"vllm:request_{what}_tokens"
        found += [(f"{name}_bucket", labels | {"le": f"{edge:.1f}"}, float((lengths <= edge).sum())) for edge in edges]
        found.append((f"{name}_bucket", labels | {"le": "+Inf"}, float(lengths.size)))
        found.append((f"{name}_count", labels, float(lengths.size)))
        found.append((f"{name}_sum", labels, float(lengths.sum())))
    stopped = prompts.size // 2
    for reason, count in (("stop", stopped), ("length", prompts.size - stopped), ("abort", 0)):
        found.append(("vllm:request_success_total", labels | {"finished_reason": reason}, float(count)))
    return found


def text(*engines: list[tuple[str, dict[str, str], float]]) -> str:
    lines = ["# HELP vllm:request_prompt_tokens Number of prefill tokens processed.", "python_gc_total 3.0"]
    for name, labels, value in (row for engine in engines for row in engine):
        inside = ",".join(f'{key}="{word}"' for key, word in labels.items())
        lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join([*lines, 'vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1.0', ""])


def answer(rows_at: dict[float, list[tuple[str, dict[str, str], float]]]) -> str:
    """The JSON of Prometheus: a vector for one time, a matrix for several."""
    series: dict[str, Any] = {}
    for time, found in rows_at.items():
        for name, labels, value in found:
            metric = {"__name__": name, **labels}
            series.setdefault(json.dumps(metric), {"metric": metric, "values": []})["values"].append([time, str(value)])
    result = list(series.values())
    if len(rows_at) == 1:
        result = [{"metric": one["metric"], "value": one["values"][0]} for one in result]
    kind = "vector" if len(rows_at) == 1 else "matrix"
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}})


FULL, EARLY = rows(PROMPTS, OUTPUTS), rows(PROMPTS[:HALF], OUTPUTS[:HALF])


def test_lengths_and_rate_come_back() -> None:
    measured = read_prometheus(text(FULL), text(EARLY), interval_s=600)
    assert measured.requests == 3000
    assert measured.rate == 5
    assert measured.rate is not None
    trace = generate(50_000, 1, {"kind": "poisson", "rate": measured.rate}, (measured.prompt, measured.output))
    for drawn, real in ((trace.prompt_tokens, PROMPTS[HALF:]), (trace.output_tokens, OUTPUTS[HALF:])):
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.02)
        assert np.percentile(drawn, [25, 50, 75, 90]) == pytest.approx(np.percentile(real, [25, 50, 75, 90]), rel=0.1)
        for low, high in zip((0, *EDGES), EDGES, strict=False):
            share = np.mean((real > low) & (real <= high))
            assert np.mean((drawn > low) & (drawn <= high)) == pytest.approx(share, abs=0.01)
    assert "3,000 requests finished in 600 s" in measured.notes[0]


def test_files_prometheus_answers_and_matrices_say_the_same(tmp_path: Path) -> None:
    expected = read_prometheus(text(FULL), text(EARLY), interval_s=600)
    (tmp_path / "a.txt").write_text(text(EARLY))
    (tmp_path / "b.txt").write_text(text(FULL))
    assert read_prometheus(tmp_path / "b.txt", tmp_path / "a.txt", interval_s=600) == expected
    assert read_prometheus(answer({1_700_000_600: FULL}), answer({1_700_000_000: EARLY})) == expected
    middle = rows(PROMPTS[:3000], OUTPUTS[:3000])
    assert read_prometheus(answer({1e9: EARLY, 1e9 + 300: middle, 1e9 + 600: FULL})) == expected
    renamed = text(FULL).replace("vllm:", "vllm_"), text(EARLY).replace("vllm:", "vllm_")
    assert read_prometheus(*renamed, interval_s=600) == expected


def test_one_scrape_has_lengths_and_no_rate() -> None:
    measured = read_prometheus(text(FULL), interval_s=600)
    assert measured.rate is None
    assert measured.requests == 5000
    assert measured.prompt["mean"] == pytest.approx(PROMPTS.mean())
    assert "since the engine started" in measured.notes[0]


def test_engines_are_added_up_also_with_fewer_buckets() -> None:
    two = text(rows(PROMPTS[:HALF], OUTPUTS[:HALF]), rows(PROMPTS[HALF:], OUTPUTS[HALF:], engine="1"))
    assert read_prometheus(two).prompt == read_prometheus(text(FULL)).prompt
    short = np.full(10, 40)
    small = text(FULL, rows(short, short, EDGES[:6], engine="1"))
    assert read_prometheus(small).requests == 5010
    long = text(FULL, rows(np.full(10, 60), short, EDGES[:6], engine="1"))
    with pytest.raises(ServecastError, match=r'engine="1".*has no bucket le=100, which other engines have'):
        read_prometheus(long)


def test_models_are_not_mixed() -> None:
    both = text(FULL, rows(PROMPTS[:10], OUTPUTS[:10], model_name="other"))
    with pytest.raises(ServecastError, match="several models \\(org/model, other\\)"):
        read_prometheus(both)
    assert read_prometheus(both, model="other").requests == 10
    with pytest.raises(ServecastError, match="'othr' is not among the model_name labels"):
        read_prometheus(both, model="othr")


def test_a_reset_counts_from_zero_for_the_whole_engine() -> None:
    after = rows(PROMPTS[:2500], OUTPUTS[:2500])  # restarted: some buckets fell, others passed their old values
    measured = read_prometheus(text(after), text(FULL), interval_s=100)
    assert measured.requests == 2500
    assert measured.prompt == read_prometheus(text(after)).prompt
    assert "counters were reset between the scrapes" in measured.notes[0]
    lucky = rows(np.array([1] * 10), np.array([1] * 10))
    before = rows(np.array([1] * 5 + [700] * 6), np.array([1] * 11))
    assert read_prometheus(text(lucky), text(before)).requests == 10


def test_engines_that_come_and_go_are_said() -> None:
    new = rows(PROMPTS[:10], OUTPUTS[:10], engine="1")
    measured = read_prometheus(text(FULL, new), text(EARLY), interval_s=600)
    assert measured.requests == 3010
    assert "an engine was started between the scrapes: counted from 0" in measured.notes
    gone = read_prometheus(text(FULL), text(EARLY, new), interval_s=600)
    assert gone.requests == 3000
    assert any("was stopped" in note for note in gone.notes)


def without(found: list[tuple[str, dict[str, str], float]], *names: str) -> list[tuple[str, dict[str, str], float]]:
    return [row for row in found if not row[0].endswith(names)]


def test_absent_sums_and_counters_are_said() -> None:
    measured = read_prometheus(text(without(FULL, "_sum", "_success_total", "_count")))
    assert "mean" not in measured.prompt
    assert measured.requests == 5000
    assert any("spread evenly" in note for note in measured.notes)
    assert any("counted by the prompt histogram" in note for note in measured.notes)


def test_aborted_requests_are_said() -> None:
    found = [*without(FULL, "_success_total")]
    found += [("vllm:request_success_total", {"finished_reason": "abort", "model_name": "org/model"}, 50.0)]
    found += [("vllm:request_success_total", {"finished_reason": "stop", "model_name": "org/model"}, 150.0)]
    assert any("25.0% of the requests were aborted" in note for note in read_prometheus(text(found)).notes)


def test_the_open_bucket_needs_an_end() -> None:
    long = rows(np.append(PROMPTS, 7000), np.append(OUTPUTS, 3))
    with pytest.raises(ServecastError, match=r"vllm:request_prompt_tokens: .* lie above the last edge 5000 .*give max"):
        read_prometheus(text(long))
    assert read_prometheus(text(long), max_model_len=8192).prompt["max"] == 8192
    assert "max" not in read_prometheus(text(long), max_model_len=8192).output
    with pytest.raises(ServecastError, match="max 4096 is not above the last edge 5000"):
        read_prometheus(text(long), max_model_len=4096)


def change(old: str, new: str) -> str:
    changed = text(FULL).replace(old, new, 1)
    assert changed != text(FULL)
    return changed


@pytest.mark.parametrize(
    ("scrape", "said"),
    [
        ("", "vllm:request_prompt_tokens_bucket is missing; found: none of the needed metrics"),
        ("python_gc_total 3", "vllm:request_generation_tokens_bucket is missing"),
        (text(without(FULL, "_bucket")), "_bucket is missing; found: request_generation_tokens_count"),
        (change('le="100.0"', 'le="abc"'), "le='abc' is not a number"),
        (change('le="+Inf"', 'le="9000.0"'), 'the bucket le="+Inf" is missing'),
        (change('le="2.0"', 'le="4000.0"'), "falls from"),
        (text([*FULL[:13], (*FULL[13][:2], 6000.0), *FULL[14:]]), 'le="+Inf" counts 5000, vllm:request_prompt'),
        (change(f"{float(PROMPTS.sum())}", "9e9"), "vllm:request_prompt_tokens: mean 1.8e+06 contradicts the counts"),
        (change(" 5000.0", " many"), "is 'many'; a count of 0 or more was expected"),
        (change(" 5000.0", " -1"), "is '-1'; a count"),
        (change(" 5000.0", " NaN"), "is 'NaN'; a count"),
        (change('model",le="1.0"', 'model,le="1.0"'), "line 3: 'vllm:request_prompt_tokens_bucket{engine="),
        (text(FULL, FULL[:1]), "is there twice"),
        ("{", "neither /metrics text nor an answer of Prometheus's query API"),
        ('{"data": 3}', "neither /metrics text nor"),
        ("[1, 2]", "neither /metrics text nor"),
        ('{"status": "error", "error": "bad query"}', "Prometheus answered with an error: bad query"),
        (answer({1e9: FULL}).replace("__name__", "job"), "has no metric name; functions such as rate()"),
        (text(rows(PROMPTS[:0], OUTPUTS[:0])), "vllm:request_prompt_tokens: counts are all 0"),
        (text(rows(PROMPTS, OUTPUTS, ())), 'no bucket beside le="+Inf"'),
    ],
)  # fmt: skip
def test_what_cannot_be_read(scrape: str, said: str) -> None:
    with pytest.raises(ServecastError) as error:
        read_prometheus(scrape)
    assert said in str(error.value)


def test_odd_pairs_of_scrapes() -> None:
    with pytest.raises(ServecastError, match="earlier: is not of an earlier time"):
        read_prometheus(answer({1e9: FULL}), answer({2e9: EARLY}))
    with pytest.raises(ServecastError, match="earlier: is not of an earlier time"):
        read_prometheus(answer({1e9: FULL}), answer({1e9: EARLY}))
    with pytest.raises(ServecastError, match="interval: -3 is not"):
        read_prometheus(text(FULL), text(EARLY), interval_s=-3)
    with pytest.raises(ServecastError, match="cannot be read"):
        read_prometheus(Path("/nowhere/metrics.txt"))
    same = "counts are all 0"  # nothing happened between the scrapes
    with pytest.raises(ServecastError, match=same):
        read_prometheus(text(FULL), text(FULL))
