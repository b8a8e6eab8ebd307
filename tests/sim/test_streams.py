"""The longest gap of each request, and when any of its tokens came, equal those of all its gaps, listed one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import servecast
from reports.token_gaps import token_gaps
from tests.servecast.helpers import QUICKSTART

CASES: dict[str, dict[str, Any]] = {
    "mixed steps": {},
    "decodes pause for prompts": {"engine": {"preset": "sglang-0.5"}, "workload.arrivals.rate": 12},
    "few blocks": {"cluster.gpu": "rtx-4090", "engine.max_model_len": 8192, "workload.arrivals.rate": 3},
    "synchronous": {"engine": {"preset": "vllm-0.10"}, "cluster.replicas": 2, "workload.arrivals.rate": 16},
    "swapped": {"engine": {"preset": "vllm-0.6", "max_model_len": 8192}, "cluster.gpu": "rtx-4090"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_longest_gaps_are_the_longest_of_all(changes: dict[str, Any]) -> None:
    scenario = servecast.load_scenario(QUICKSTART, {"workload.num_requests": 400, **changes})
    result = servecast.simulate(scenario)
    every = token_gaps(result.requests, result.steps, result.gaps)
    found = result.requests["longest_gap_s"].to_numpy()
    known = [i for i, gaps in enumerate(every) if gaps is not None and len(gaps)]
    assert len(known) > 300
    expected = np.array([gaps.max() for i in known if (gaps := every[i]) is not None])
    assert found[known] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    summary = result.summary()
    assert summary["p99_longest_gap_ms"] == pytest.approx(1e3 * np.percentile(expected, 99), rel=0.02)
    assert summary["p50_longest_gap_ms"] > summary["p50_itl_ms"]
    left_out = result.gaps["id"].n_unique()
    assert left_out > 5 or "cluster.gpu" not in changes, "some are preempted there"
    done = result.requests.filter(result.requests["status"] == "finished")
    first, place = done["first_token_s"].to_numpy(), {id: i for i, id in enumerate(done["id"].to_list())}
    ids = result.requests["id"].to_list()
    for share in (0.1, 0.5, 0.9):
        number = np.maximum(1, (share * done["output_tokens"].to_numpy()).astype(np.int64))
        times = result._streamed.token_s(number)
        for row in known:
            i, gaps = place[ids[row]], every[row]
            assert gaps is not None
            assert times[i] == pytest.approx(first[i] + gaps[: number[i] - 1].sum(), rel=1e-7), (share, left_out)


def test_chunks_shorten_the_longest_gap() -> None:
    long = QUICKSTART.with_name("long-prompts.yaml")
    whole, chunks = (
        servecast.simulate(
            servecast.load_scenario(long, {"engine.max_num_batched_tokens": budget, "workload.num_requests": 300})
        ).summary()
        for budget in (40960, 2048)
    )
    assert whole["p99_longest_gap_ms"] > 5 * chunks["p99_longest_gap_ms"]


def test_what_has_no_gap_has_none() -> None:
    one = servecast.load_scenario(
        QUICKSTART, {"workload.num_requests": 20, "workload.lengths.output": {"kind": "fixed", "tokens": 1}}
    )
    result = servecast.simulate(one)
    assert result.requests["longest_gap_s"].null_count() == 20
    assert result.summary()["p99_longest_gap_ms"] is None
    stages = servecast.load_scenario(
        QUICKSTART, {"workload.num_requests": 20, "cluster.pp": 2, "engine.preset": "vllm-0.32"}
    )
    assert servecast.simulate(stages).requests["longest_gap_s"].null_count() == 20


def test_the_first_answer_token_comes_after_the_reasoning() -> None:
    base = {"workload.num_requests": 200}
    plain = servecast.simulate(servecast.load_scenario(QUICKSTART, base))
    assert "mean_first_answer_ms" not in plain.summary()
    assert plain.column("first_answer_s") == pytest.approx(plain.column("ttft_s"))
    half = servecast.simulate(servecast.load_scenario(QUICKSTART, {**base, "workload.reasoning": 0.5}))
    summary = half.summary()
    assert summary["mean_ttft_ms"] == plain.summary()["mean_ttft_ms"], "the engine does not know what is reasoning"
    middle = (summary["mean_ttft_ms"] + summary["mean_e2el_ms"]) / 2
    assert summary["mean_first_answer_ms"] == pytest.approx(middle, rel=0.03)


def test_classes_reason_on_their_own() -> None:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 100}}
    classes = [{"name": "chat", "lengths": lengths}, {"name": "think", "lengths": lengths, "reasoning": 0.9}]
    workload = {"num_requests": 100, "arrivals": {"kind": "poisson", "rate": 5}, "classes": classes}
    result = servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload": workload}))
    rows = result.requests
    waits = rows.with_columns(more=rows["first_answer_s"] - rows["ttft_s"])
    by = {name: group["more"].mean() for (name,), group in waits.group_by("class")}
    assert by["chat"] == 0.0
    assert by["think"] > 0.4


def test_a_first_token_that_another_replica_gave_leaves_the_stream_unknown() -> None:
    """The gap between the prefill side's token and the decode side's first one is in no log of steps."""
    split = QUICKSTART.with_name("split-serving.yaml")
    base = {"workload.num_requests": 60}
    for side, unknown in (("decode", 0), ("prefill", 60)):
        scenario = servecast.load_scenario(split, {**base, "cluster.split.first_token": side})
        rows = servecast.simulate(scenario).requests
        rows = rows.filter(rows["output_tokens"] > 1)
        assert rows["longest_gap_s"].null_count() == (unknown and rows.height), side


def test_streams_of_many_replicas_take_as_long_as_of_one() -> None:
    """What `reduceat` reduces in vain between two requests stays small: its operations, not seconds."""
    scenario = servecast.load_scenario(
        QUICKSTART, {"workload.num_requests": 2000, "cluster.replicas": 8, "workload.arrivals.rate": 64}
    )
    streams = servecast.simulate(scenario)._streamed._streams
    order = np.argsort(streams._begin, kind="stable")
    between = np.maximum(streams._begin[order][1:] - streams._last[order][:-1], 0).sum()
    assert between < 2 * len(streams._rows["step"])


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_gaps_over_the_limit_are_those_of_all_gaps(changes: dict[str, Any]) -> None:
    result = servecast.simulate(
        servecast.load_scenario(QUICKSTART, {"workload.num_requests": 400, "slo.gap": "40ms", **changes})
    )
    every = token_gaps(result.requests, result.steps, result.gaps)
    found = result.requests["gaps_over_slo"].to_list()
    known = {i: gaps for i, gaps in enumerate(every) if gaps is not None and len(gaps)}
    assert [found[i] for i in known] == [(gaps > 0.04).sum() for gaps in known.values()]
    over = np.array([found[i] for i in known])
    assert 0 < over.sum() < sum(map(len, known.values()))
    if len(known) == sum(gaps is None or len(gaps) > 0 for gaps in every):
        summary = result.summary()
        assert summary["gaps_over_slo_fraction"] == pytest.approx(over.sum() / sum(map(len, known.values())))
        assert summary["requests_with_gaps_over_slo_fraction"] == pytest.approx((over > 0).mean())
        limits = result.requests.select("ttft_s", "tpot_s").fill_null(0.0)
        good = (
            (limits["ttft_s"] <= 1) & (limits["tpot_s"] <= 0.05) & (result.requests["gaps_over_slo"].fill_null(0) == 0)
        )
        assert summary["slo_attainment"] == pytest.approx(good.mean())


@pytest.mark.parametrize("preset", ["vllm-0.24", "sglang-0.5"])
def test_a_stream_interval_changes_what_clients_see_and_nothing_else(preset: str) -> None:
    base = {"workload.num_requests": 200, "engine": preset, "slo.gap": "100ms"}
    one, four = (
        servecast.simulate(
            servecast.load_scenario(QUICKSTART, {**base, "engine": {"preset": preset, "stream_interval": n}})
        )
        for n in (1, 4)
    )
    a, b = one.summary(), four.summary()
    seen = ("itl_ms", "gap", "spent", "goodput", "slo_attainment")
    assert {k: v for k, v in a.items() if not any(s in k for s in seen)} == {
        k: v for k, v in b.items() if not any(s in k for s in seen)
    }
    gaps = token_gaps(one.requests, one.steps, one.gaps)
    assert all(g is not None for g in gaps)
    joined = [np.add.reduceat(g, np.arange(0, len(g), 4)) for g in gaps if g is not None and len(g)]
    every = np.concatenate(joined)
    assert four.itl.count == len(every)
    assert b["mean_itl_ms"] == pytest.approx(1e3 * every.mean())
    assert b["p99_itl_ms"] == pytest.approx(1e3 * np.percentile(every, 99), rel=1e-6)
    longest = [g.max() for g in joined]
    assert np.array(four.longest_gaps)[~np.isnan(four.longest_gaps)] == pytest.approx(np.array(longest), rel=1e-6)
    assert b["gaps_over_slo_fraction"] == pytest.approx((every > 0.1).mean())
    parts = four.itl_within(np.array([0.0, 5.0, 1e9]))
    assert sum(part.count for part in parts) == len(every)


def test_classes_have_limits_on_gaps_of_their_own() -> None:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 100}}
    classes = [{"name": "voice", "lengths": lengths, "slo": {"gap": "7ms"}}, {"name": "batch", "lengths": lengths}]
    workload = {"num_requests": 100, "arrivals": {"kind": "poisson", "rate": 5}, "classes": classes}
    result = servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload": workload}))
    rows, summary = result.requests, result.summary()
    voice = rows.filter(rows["class"] == "voice")
    assert voice["gaps_over_slo"].null_count() == 0
    assert rows.filter(rows["class"] == "batch")["gaps_over_slo"].null_count() == rows.height - voice.height
    share = voice["gaps_over_slo"].sum() / (99 * voice.height)
    assert 0 < share < 1
    assert (
        summary["classes"]["voice"]["gaps_over_slo_fraction"]
        == summary["gaps_over_slo_fraction"]
        == pytest.approx(share)
    )
    assert summary["classes"]["batch"]["gaps_over_slo_fraction"] is None
    met = (voice["gaps_over_slo"] == 0).mean()
    assert summary["classes"]["voice"]["slo_attainment"] == pytest.approx(met)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slo.gap": "1s", "cluster.pp": 2, "engine": "vllm-0.32"}, "slo.gap: .* pipelines"),
        ({"engine.stream_interval": 4, "workload.n": 2}, "engine.stream_interval: .* several samples"),
        ({"slo.gap": "0s"}, "slo.gap"),
        ({"engine.stream_interval": 0}, "engine.stream_interval is 0"),
        ({"engine": {"preset": "vllm-0.6", "stream_interval": 4}}, "does not have this option"),
    ],
)
def test_limits_on_what_is_not_known_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(servecast.ServecastError, match=said):
        servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload.num_requests": 20, **changes}))


def test_exports_list_messages() -> None:
    from reports.formats.seen import seen
    from servecast.exporting import simulated_of

    base = {"workload.num_requests": 50, "slo.gap": "1s"}
    one, four = (
        seen(
            simulated_of(servecast.simulate(servecast.load_scenario(QUICKSTART, {**base, "engine.stream_interval": n})))
        )
        for n in (1, 4)
    )
    assert "gap" not in four.run.slo, "load generators have no limit on gaps"
    for a, b, tokens in zip(one.gaps, four.gaps, one.output.tolist(), strict=True):
        assert a is not None
        assert b is not None
        assert len(b) == -(-(tokens - 1) // 4)
        assert a.sum() == pytest.approx(b.sum())
