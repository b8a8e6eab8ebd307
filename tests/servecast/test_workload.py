"""Every kind of workload runs from a scenario, and means what it says."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from reports.html import report_html
from reports.terminal import print_summary
from servecast import ServecastError, load_scenario, simulate
from servecast.setup import set_up
from tests.reference import reference

BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "engine": {"preset": "vllm-0.19", "max_model_len": 32768},
    "cluster": {"gpu": "h100-sxm"},
    "seed": 3,
}
SHORT = {"prompt": {"kind": "fixed", "tokens": 200}, "output": {"kind": "fixed", "tokens": 20}}
LONG = {"prompt": {"kind": "fixed", "tokens": 4000}, "output": {"kind": "fixed", "tokens": 300}}


def scenario(tmp_path: Path, workload: dict[str, Any], **others: Any) -> Any:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(BASE | others | {"workload": workload}), encoding="utf-8")
    return load_scenario(path)


def summary(tmp_path: Path, workload: dict[str, Any], **others: Any) -> dict[str, Any]:
    result = simulate(scenario(tmp_path, workload, **others))
    s = result.summary()
    assert s["submitted"] == s["completed"] + s["cancelled"] + s["rejected"] + s["unfinished"]
    return s


CHAT = {
    "kind": "chat", "arrivals": {"kind": "poisson", "rate": 1.0}, "turns": {"kind": "fixed", "turns": 3},
    "think": {"kind": "exponential", "mean": "5s"}, "message": {"kind": "fixed", "tokens": 50},
    "answer": {"kind": "fixed", "tokens": 100},
}  # fmt: skip
THINK = {"kind": "fixed", "time": "2s"}
ALL = {"kind": "all-at-once"}


@pytest.mark.parametrize(
    ("workload", "requests"),
    [
        ({"num_requests": 30, "arrivals": {"kind": "gamma", "rate": 5, "cv": 2}, "lengths": SHORT}, 30),
        ({"num_requests": 30, "arrivals": {"kind": "steps", "rates": [["10s", 5], ["1s", 50]]}, "lengths": SHORT}, 30),
        (
            {"num_requests": 30, "arrivals": {"kind": "diurnal", "rate": 8, "peak_to_mean": 3, "period": "1h"},
             "lengths": SHORT | {"correlation": 0.5}}, 30,
        ),
        ({"num_requests": 30, "closed_loop": {"concurrency": 4, "think": THINK}, "lengths": SHORT}, 30),
        ({"num_sessions": 10, "sessions": CHAT}, 30),
        ({"num_requests": 30, "mix": "chat", "rate": 2}, 30),
        ({"num_sessions": 10, "mix": "agent"}, None),
    ],
)  # fmt: skip
def test_it_runs_and_can_be_resolved(tmp_path: Path, workload: dict[str, Any], requests: int | None) -> None:
    s = summary(tmp_path, workload)
    assert s["completed"] > 0
    assert requests is None or s["submitted"] == requests
    resolved = set_up(scenario(tmp_path, workload)).resolved()
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    assert simulate(load_scenario(tmp_path / "again.yaml")).summary() == s


def test_turns_follow_answers_and_thinking(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, {"num_sessions": 10, "sessions": CHAT}))
    turns = set_up(scenario(tmp_path, {"num_sessions": 10, "sessions": CHAT})).requests.trace.turns
    assert turns is not None
    rows = result.requests
    for i, previous in enumerate(turns.previous.tolist()):
        if previous >= 0:
            assert rows["arrival_s"][i] == rows["finish_s"][previous] + turns.think_s[i]
    assert result.summary()["saturated"] is None


def test_classes_have_lengths_slos_and_figures_of_their_own(tmp_path: Path) -> None:
    classes = [
        {"name": "chat", "weight": 3, "lengths": SHORT},
        {"name": "report", "lengths": LONG, "slo": {"ttft": "1ms"}},
    ]
    workload = {"num_requests": 400, "arrivals": {"kind": "poisson", "rate": 8}, "classes": classes}
    result = simulate(scenario(tmp_path, workload, slo={"ttft": "10s"}))
    s = result.summary()
    chat, report = s["classes"]["chat"], s["classes"]["report"]
    assert chat["submitted"] + report["submitted"] == 400
    assert 60 < report["submitted"] < 140
    assert (chat["slo_attainment"], report["slo_attainment"]) == (1.0, 0.0)
    assert s["slo_attainment"] == chat["submitted"] / 400
    assert chat["mean_ttft_ms"] < report["mean_ttft_ms"]
    assert set(result.requests["class"].unique()) == {"chat", "report"}
    assert result.requests.filter(result.requests["class"] == "report")["prompt_tokens"].unique().to_list() == [4000]


def test_samples_are_asked_for_by_the_workload_a_class_or_a_trace(tmp_path: Path) -> None:
    workload = {"num_requests": 30, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": SHORT}
    one = summary(tmp_path, workload)
    assert summary(tmp_path, workload | {"n": 1}) == one
    three = summary(tmp_path, workload | {"n": 3})
    assert three["total_output_tokens"] == 3 * one["total_output_tokens"]
    assert (three["completed"], three["total_input_tokens"]) == (30, one["total_input_tokens"])
    assert three["total_cached_tokens"] > 0
    apart = summary(tmp_path, workload | {"n": 3}, engine=BASE["engine"] | {"enable_prefix_caching": False})
    assert apart["total_cached_tokens"] == 0
    classes = [{"name": "a", "lengths": SHORT, "n": 1}, {"name": "b", "lengths": SHORT, "n": 4}]
    of_classes = simulate(scenario(tmp_path, {"num_requests": 30, "arrivals": ALL, "classes": classes})).requests
    assert set(of_classes.select("class", "samples").unique().rows()) == {("a", 1), ("b", 4)}
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens,samples\n0,10,5,1\n1,10,5,4\n")
    rows = simulate(scenario(tmp_path, {"trace": "t.csv"})).requests
    assert rows.select("samples", "output_tokens").rows() == [(1, 5), (4, 20)]
    assert "samples of 2 prompts" in simulate(scenario(tmp_path, {"trace": "t.csv"})).manifest["workload"]["notes"][-1]


def test_beams_can_be_written_as_a_trace(tmp_path: Path) -> None:
    """Four beams of three tokens: a prompt of 100 tokens, of which each later turn finds its six full blocks."""
    rows = [
        {"arrival_s": 0, "session": "a", "think_s": 0, "input_tokens": 100 + k, "output_tokens": 1}
        | {"samples": 4 if k else 1, "block_ids": list(range(7)), "block_tokens": 16}
        for k in range(3)
    ]
    (tmp_path / "beams.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = simulate(scenario(tmp_path, {"trace": "beams.jsonl"})).requests
    assert result["arrival_s"].to_list()[1:] == result["finish_s"].to_list()[:2]
    assert result["cached_tokens"].to_list() == [0, 4 * 96, 4 * 96]


def test_samples_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens,samples\n0,10,5,2\n")
    classes = [{"name": "a", "lengths": SHORT, "n": 2}]
    of_classes = {"num_requests": 9, "arrivals": ALL, "classes": classes, "n": 2}
    for workload, preset, problem in (
        ({"trace": "t.csv", "n": 2}, "vllm-0.19", "workload.n: the trace has samples of its own"),
        (of_classes, "vllm-0.19", "n is given for all requests and for classes"),
        ({"trace": "t.csv"}, "sglang-0.5", "which SGLang does in its own way: it computes the prompt alone before"),
        ({"trace": "t.csv"}, "tgi-3", "which TGI does in its own way"),
    ):
        with pytest.raises(ServecastError, match=re.escape(problem)):
            set_up(scenario(tmp_path, workload, engine={"preset": preset}))


def test_clients_that_time_out_are_counted(tmp_path: Path) -> None:
    workload = {"num_requests": 200, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": LONG, "timeout": "2500ms"}
    result = simulate(scenario(tmp_path, workload, slo={"e2e": "10s"}))
    s = result.summary()
    assert 0 < s["cancelled"] < 200
    gone = result.requests.filter(result.requests["status"] == "cancelled")
    assert gone["e2e_s"].null_count() == gone["tpot_s"].null_count() == s["cancelled"]
    assert (gone["finish_s"] - gone["arrival_s"]).to_list() == pytest.approx([2.5] * s["cancelled"])
    assert s["slo_attainment"] == s["completed"] / 200
    assert s["p99_e2el_ms"] <= 2500


def test_a_mooncake_trace_with_options(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp": {3000 * (i // 5)}, "input_length": {600 + i}, "output_length": 5, "hash_ids": [0, {i + 1}]}}\n'
        for i in range(40)
    )
    with gzip.open(tmp_path / "t.jsonl.gz", "wt") as file:
        file.write(rows)
    workload = {"trace": "t.jsonl.gz", "jitter": "3s", "sample": 0.5, "max_prompt": 610, "over_long": "truncate"}
    setup = set_up(scenario(tmp_path, workload))
    trace = setup.requests.trace
    assert trace.prompt_tokens.max() == 610
    assert 5 < len(trace) < 35
    assert len(set(trace.arrival_s.tolist())) == len(trace)
    assert any("mooncake" in note for note in trace.notes)


def test_real_traces_replay(tmp_path: Path) -> None:
    for parts, more in (
        (("azure", "AzureLLMInferenceTrace_conv.csv.gz"), {"num_requests": 300}),
        (("mooncake", "conversation_trace.jsonl.gz"), {"num_requests": 100}),
        (("burstgpt", "BurstGPT_3.first188.csv.gz"), {}),
        (("kv-cache-tester", "claude_code_traces_0001-0064.jsonl.gz"), {"num_requests": 60}),
    ):
        path = reference("traces", *parts)
        s = summary(tmp_path, {"trace": str(path), **more}, engine={"preset": "vllm-0.19"})
        assert s["completed"] > 50, parts


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"num_requests": 3, "sessions": CHAT}, "num_requests has no meaning with sessions"),
        ({"num_sessions": 3, "mix": "chat"}, "mix chat takes num_requests, not num_sessions"),
        ({"num_requests": 3, "mix": "chats"}, "did you mean 'chat'"),
        ({"num_requests": 3, "prometheus": {"scrape": "gone.txt"}}, "gone.txt"),
        ({"servegen": {"pool": "gone.tar.gz"}}, "gone.tar.gz"),
        ({"num_requests": 3, "arrivals": {"kind": "poisson", "rate": 1}, "lengths": SHORT, "classes": []}, "classes"),
        ({"trace": "gone.csv", "over_long": "truncate"}, "give one of them"),
        (
            {"num_requests": 3, "arrivals": {"kind": "poisson", "rate": 1},
             "classes": [{"name": "a", "lengths": SHORT}, {"name": "a", "lengths": SHORT}]}, "two have the same name",
        ),
        (
            {"num_requests": 3, "arrivals": {"kind": "poisson", "rate": 1},
             "classes": [{"name": "a", "weigth": 2, "lengths": SHORT}]},
            "workload.classes.0.weigth: unknown key (did you mean 'weight'?)",
        ),
        (
            {"num_requests": 3, "closed_loop": {"concurrency": 2, "think": THINK | {"time": 3}}, "lengths": SHORT},
            "3s or 3ms",
        ),
        (
            {"num_sessions": 3, "sessions": CHAT | {"turns": {"kind": "fixed", "turn": 3}}},
            "workload.sessions.turns.turn",
        ),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, workload: dict[str, Any], said: str) -> None:
    with pytest.raises(ServecastError) as caught:
        set_up(scenario(tmp_path, workload))
    assert said in str(caught.value)
    assert all(str(tmp_path / "s.yaml") in problem for problem in caught.value.problems)


def test_by_priority_the_class_of_the_lowest_number_goes_first(tmp_path: Path) -> None:
    classes = [{"name": name, "priority": rank, "lengths": SHORT} for name, rank in (("late", 5), ("early", -5))]
    workload = {"num_requests": 40, "arrivals": {"kind": "all-at-once"}, "classes": classes}
    engine = BASE["engine"] | {"max_num_seqs": 4, "scheduling_policy": "priority"}
    rows = simulate(scenario(tmp_path, workload, engine=engine)).requests
    early, late = (rows.filter(rows["class"] == name)["scheduled_s"] for name in ("early", "late"))
    assert early.max() <= sorted(late)[1], "all but the first, which came alone through the front end"
    assert 4 < len(early) < 36
    with pytest.raises(ServecastError, match=r"workload\.classes: they have priorities, which vLLM refuses unless"):
        set_up(scenario(tmp_path, workload))
    classes[0]["priority"] = 1.5
    with pytest.raises(ServecastError, match=r"workload\.classes\.0\.priority: 1\.5 is not a whole number"):
        set_up(scenario(tmp_path, workload, engine=engine))


def test_classes_and_clients_that_gave_up_are_shown(tmp_path: Path) -> None:
    classes = [{"name": "<b>", "lengths": LONG, "slo": {"ttft": "9s"}}, {"name": "c", "lengths": LONG}]
    workload = {"num_requests": 60, "arrivals": {"kind": "poisson", "rate": 6}, "timeout": "2s", "classes": classes}
    result = simulate(scenario(tmp_path, workload))
    out = io.StringIO()
    print_summary(result, Console(file=out, width=80))
    text = out.getvalue()
    assert "Given up by their clients" in text
    assert "meet the SLO of their class" in text
    assert any(line.strip().startswith("<b>") and "%" in line for line in text.splitlines())
    page = report_html(result)
    assert "&lt;b&gt;" in page
    assert "<h2>Request classes</h2>" in page
