"""Mistakes in a scenario: each is said with its place, what was found and what is allowed; all of them at once."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servecast.yamlfile import dump_yaml
from tests.servecast.helpers import QUICKSTART, fixed, problems

TEXT = QUICKSTART.read_text(encoding="utf-8")
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 9)}]\n" for c in "bcdefghijklm"
)


def said(tmp_path: Path, text: str | bytes) -> list[str]:
    file = tmp_path / "s.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [problem.replace(str(tmp_path) + "/", "") for problem in problems(file)]


def test_all_mistakes_of_a_file_at_once(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        """name: 3
model: lama-3.1-8b
engine: {preset: vllm-0.19, max_num_seq: 1, block_size: 17}
cluster: {gpu: h100-sx, tp: x, replicas: 0, routr: a}
workload:
  num_requests: many
  arrivals: {kind: posson, rate: 8}
  lengths:
    prompt: {kind: lognormal, mean: -3, cv: 1.0, mx: 4}
    output: {kind: lognorml, mean: 256}
slo: {ttft: 1, tpott: 50ms}
seed: -1
sede: 1
""",
    )
    expected = [
        ("s.yaml:1: name: ", "quotes"),
        ("s.yaml:2: model: 'lama-3.1-8b'", "(did you mean 'llama-3.1-8b'?)"),
        ("s.yaml:3: engine.max_num_seq: ", "(did you mean 'max_num_seqs'?)"),
        ("s.yaml:3: engine.block_size is 17", "16"),
        ("s.yaml:4: cluster.gpu: 'h100-sx'", "(did you mean 'h100-sxm'?)"),
        ("s.yaml:4: cluster.tp: 'x'", "whole number"),
        ("s.yaml:4: cluster.replicas: 0", "1 or more"),
        ("s.yaml:4: cluster.routr: ", "(did you mean 'router'?)"),
        ("s.yaml:6: workload.num_requests: 'many'", "whole number"),
        ("s.yaml:7: workload.arrivals.kind: unknown kind 'posson'", "(did you mean 'poisson'?)"),
        ("s.yaml:9: workload.lengths.prompt.mx: ", "(did you mean 'max'?)"),
        ("s.yaml:9: workload.lengths.prompt.mean: -3", "from 1"),
        ("s.yaml:10: workload.lengths.output.kind: unknown kind 'lognorml'", "(did you mean 'lognormal'?)"),
        ("s.yaml:11: slo.ttft: 1 ", "write 1s or 1ms"),
        ("s.yaml:11: slo.tpott: ", "(did you mean 'tpot'?)"),
        ("s.yaml:12: seed: -1", "0 or more"),
        ("s.yaml:13: sede: unknown key", "(did you mean 'seed'?)"),
    ]
    for start, part in expected:
        (match,) = [problem for problem in found if problem.startswith(start)]
        assert part in match
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("cluster.tp", True, "true is not a whole number"),
        ("cluster.tp", 1.0, "write 1"),
        ("cluster.tp", 0, "0 is not 1 or more"),
        ("cluster.tp", 3, "llama-3.1-8b on h100-sxm allows tp 1, 2, 4, 8"),
        ("cluster.tp", 16, "exceeds the 8 GPUs"),
        ("cluster.tp", 10**30, "allows tp"),
        ("cluster.replicas", 10**12, "100,000 or less"),
        ("cluster.pp", 0, "0 is not 1 or more"),
        ("cluster.dp", 2, "has no experts"),
        ("cluster.ep", 2, "cluster.ep: 2 is not true or false"),
        ("cluster.gpu", "h100", "did you mean 'h100-sxm'"),
        ("cluster.gpu", 4090, "4090 is not text"),
        ("cluster.gpu", None, "cluster.gpu: missing"),
        ("cluster.router", "randm", "did you mean 'random'"),
        ("cluster.router", {"kind": "random", "seed": 3}, "cluster.router.seed: "),
        ("cluster.router", {"kind": "prefix-affinity", "cache_threshold": 3}, "cluster.router.cache_threshold: 3"),
        ("cluster.router", "session-affinity", "cluster.router: session-affinity goes by sessions"),
        ("cluster.router", "prefix-affinity", "cluster.router: prefix-affinity goes by what prompts begin with"),
        ("cluster", None, "cluster: missing"),
        ("cluster", 3, "3 is not a mapping"),
        ("cluster", {}, "cluster.gpu: missing"),
        ("cluster", {"pools": []}, "[] is not a list of 1 or more"),
        ("cluster", {"pools": [3]}, "cluster.pools.0: 3 is not a mapping"),
        ("cluster", {"pools": [{"gpu": "l4"}], "tp": 2}, "tp beside pools"),
        ("cluster", {"pools": [{"gpu": "h100-sxm", "name": "a"}] * 2}, "a is the name of several pools"),
        ("cluster", {"pools": [{"gpu": "h100-sxm", "engine": {}}]}, "cluster.pools.0.engine: there is one pool"),
        ("cluster", {"pools": [{"gpu": "h200-sxm"}, {"gpu": "h200-sxm", "replicas": 0}]}, "cluster.pools.1.replicas: "),
        (
            "cluster",
            {"pools": [{"gpu": "h200-sxm"}, {"gpu": "h200-sxm", "engine": {"max_num_seq": 3}}]},
            "pools.1.engine.max_num_seq",
        ),
        ("cluster", {"pools": [{"gpu": "h200-sxm"}, {"gpu": "h200-sxm", "model": "x"}]}, "cluster.pools.1.model: "),
        (
            "cluster",
            {"pools": [{"gpu": "h100-sxm"}, {"gpu": "h100-sxm", "model": "qwen3-8b"}]},
            "which requests ask for",
        ),
        ("cluster", {"pools": [{"gpu": "h100-sxm", "role": "prefill"}]}, "needs a decode pool"),
        ("cluster", {"pools": [{"gpu": "h100-sxm", "role": "x"}]}, "'unified', 'prefill' or 'decode'"),
        ("model", "Llama-3.1-8B", "did you mean 'llama-3.1-8b'"),
        ("model", "meta-llama/Llama-3.1-8B", "nothing is downloaded"),
        ("model", "deepseek-v3.2", "not priced yet"),
        ("model", "llama-3.1-70b", "raise tp to 4"),
        ("model", "./no.json", "no such file"),
        ("engine", None, "engine: missing"),
        ("engine", [], "[] is not a mapping"),
        ("engine", {}, "engine.preset: missing"),
        ("engine", "sglang", "did you mean 'sglang-0.5'"),
        ("engine.preset", "vllm-0.1", "older than the oldest preset"),
        ("engine.tensor_parallel_size", 2, "set it as cluster.tp"),
        ("engine.enable_prefix_caching", 1, "expected true or false"),
        ("engine.max_num_seq", 2, "did you mean 'max_num_seqs'"),
        ("engine.max_num_seqs", True, "expected a number"),
        ("engine.max_num_seqs", "256", "whole number"),
        ("engine.max_num_batched_tokens", 10**11, "at most"),
        ("engine", {"preset": "vllm-0.19", "max_num_seqs": 64, "max_num_batched_tokens": 10}, "below max_num_seqs"),
        ("engine.max_model_len", 10**7, "above the 131072 tokens"),
        ("engine.gpu_memory_utilization", math.nan, "at most 1"),
        ("engine.gpu_memory_utilization", 90, "at most 1"),
        ("engine.gpu_memory_utilization", 0.25, "lower max_model_len to at most"),
        ("engine.num_gpu_blocks_override", 10**9, "lower num_gpu_blocks_override to at most"),
        ("engine.num_gpu_blocks_override", 1, "1 blocks of 16 tokens, of which the null block takes one"),
        ("engine.enable_lora", True, "not modelled yet (a time of yours can stand for it: docs/not-modelled.md)"),
        ("engine.limit_mm_per_prompt", {"image": 1}, "none that is modelled (docs/not-modelled.md); take it out"),
        ("engine.structured_outputs_config", {"backend": "xgrammar"}, "none that is modelled"),
        ("workload", None, "workload: missing"),
        ("workload", 3, "3 is not a mapping"),
        ("workload", {}, "exactly one of trace, closed_loop, prometheus, servegen, sessions, mix, arrivals; found"),
        ("workload.trace", "t.csv", "found trace, arrivals"),
        ("workload.closed_loop", {"concurrency": 3}, "found closed_loop, arrivals"),
        ("workload.rate_scale", 2, "rate_scale has no meaning with arrivals"),
        ("workload.n", 20_000, "workload.n: 20000 is not 16,384 or less"),
        ("workload.best_of", 2, "workload.best_of: best_of is not modelled, and newer engines do not have it"),
        (
            "workload.beam_width",
            4,
            "workload.beam_width: beam search is not modelled by itself: vLLM's front end asks for one token",
        ),
        ("workload.n", 0, "workload.n: 0 is not 1 or more"),
        ("workload.n", 2.0, "write 2"),
        ("workload.n", True, "true is not a whole number"),
        ("workload.lengths", None, "lengths missing"),
        ("workload.lengths.prompt", None, "prompt missing"),
        ("workload.lengths.prompt", 1024, "for example prompt: {kind: fixed, tokens: 1024}"),
        ("workload.lengths.prompt.cv", 0, "from 0.01 to 100"),
        ("workload.lengths.prompt", {"kind": "fixed", "tokens": 1.5}, "whole number"),
        ("workload.lengths.prompt", {"kind": "uniform", "low": 3, "high": 1}, "swap them"),
        ("workload.num_requests", 0, "1 or more"),
        ("workload.num_requests", 1e3, "write 1000"),
        ("workload.num_requests", 10**20, "100,000,000 or less"),
        ("workload.arrivals.rate", 0, "from 1e-06"),
        ("workload.arrivals.rate", -1, "from 1e-06"),
        ("workload.arrivals.rate", math.nan, "from 1e-06"),
        ("workload.arrivals.rate", math.inf, "from 1e-06"),
        ("workload.arrivals.rate", True, "number of requests per second"),
        ("workload.arrivals", "poisson", "for example arrivals: {kind: poisson, rate: 8}"),
        ("workload.max_tokens", 1, "more output tokens"),
        ("workload.max_tokens", 0, "unlimited"),
        ("workload.max_tokens", "unlimitd", "unlimited"),
        ("workload.network", "20ms", "'20ms' is not a mapping of keys to values; for example network: {latency: 20ms}"),
        ("cluster.network", 5, "cluster.network: 5 is not text"),
        ("workload.sessions", [], "is not a mapping"),
        ("workload.num_request", 3, "did you mean 'num_requests'"),
        ("slo.ttft", 0.5, "write 0.5s or 0.5ms"),
        ("slo.ttft", "1sec", "500ms, 1.5s, 10min or 2h"),
        ("slo.ttft", "-1s", "negative"),
        ("slo.ttft", "0s", "above 0"),
        ("slo.ttft", "1e999s", "not a duration"),
        ("slo", 3, "for example slo: {ttft: 1s, tpot: 50ms}"),
        ("seed", True, "true is not a whole number"),
        ("seed", 2**63, "below"),
        ("name", ["x"], "is not text"),
        ("seed.x", 3, "which has no keys"),
    ],
)
def test_a_mistake_says_where_what_and_what_is_allowed(key: str, value: object, part: str) -> None:
    found = problems(QUICKSTART, {key: value})
    assert len(found) == 1 or key == "cluster.tp"
    assert all(problem.startswith(("--set", str(QUICKSTART))) for problem in found)
    assert any(part in problem for problem in found), found


@pytest.mark.parametrize(
    ("workload", "part"),
    [
        ({"trace": "t.cvs"}, "did you mean 't.csv'"),
        ({"trace": "."}, "a folder"),
        ({"trace": 3}, "3 is not text"),
        ({"trace": "s.yaml"}, "no known trace format"),
        ({"trace": "t.csv", "format": "azur"}, "did you mean 'azure'"),
        ({"trace": "t.csv", "format": "azure"}, "'TIMESTAMP' is missing"),
        ({"trace": "t.csv", "window": ["1min", "0s"]}, "start before end"),
        ({"trace": "t.csv", "window": ["1h", "2h"]}, "no request arrives in the window"),
        ({"trace": "t.csv", "window": [1, "2s"]}, "write 1s or 1ms"),
        ({"trace": "t.csv", "window": "10s"}, "for example window: [0s, 10min]"),
        ({"trace": "t.csv", "window": ["0s", "1s", "2s"]}, "at most 2"),
        ({"trace": "t.csv", "rate_scale": 0}, "above 0"),
        ({"trace": "t.csv", "rate_scale": math.nan}, "nan"),
        ({"trace": "t.csv", "lengths": fixed(1, 1)}, "lengths has no meaning with trace"),
        ({"trace": "bad.csv"}, "negative in 1 row: 2 ('-1')"),
        ({"closed_loop": {"concurrency": 0}, "num_requests": 1, "lengths": fixed(1, 1)}, "1 or more"),
        ({"closed_loop": 3, "num_requests": 1, "lengths": fixed(1, 1)}, "for example closed_loop: {concurrency: 64}"),
        ({"closed_loop": {"concurrency": 2}}, "num_requests, lengths missing"),
    ],
)
def test_a_mistake_in_a_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: dict[str, Any], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    header = "arrival_s,input_tokens,output_tokens\n"
    Path("t.csv").write_text(header + "0,10,5\n1,10,5\n")
    Path("bad.csv").write_text(header + "0,-1,5\n")
    Path("s.yaml").write_text("a: b\n")
    found = problems(QUICKSTART, {"workload": workload})
    assert any(part in problem for problem in found), found
    assert all(problem.startswith(("--set workload: ", "--set workload.")) for problem in found)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "s.yaml: it is empty"),
        ("# only a comment\n", "s.yaml: it is empty"),
        ("- a\n- b\n", "it holds a list"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n", "is it a trace?"),
        ('{"a": 1}\n{"a": 2}\n', "s.yaml:2: "),
        ("3", "it holds only 3"),
        (bytes(range(256)), "not a text file"),
        (b"model: \x00\x01\n", "not a text file"),
        (TEXT.encode("utf-16"), "not a text file"),
        (TEXT + "---\n" + TEXT, "a scenario file holds one"),
        (TEXT.replace("  num_requests", "\tnum_requests"), "indent with spaces"),
        (TEXT + "seed: 2\n", "'seed' is written twice"),
        (TEXT.replace("rate: 8}", "rate: 8, rate: 9}"), "'rate' is written twice"),
        (TEXT + "x: *nowhere\n", "undefined alias 'nowhere'"),
        ("&a\nmodel: *a\n", "holds itself"),
        (TEXT + "x: &a [*a]\n", "holds itself"),
        (TEXT.replace("slo: {ttft: 1s", "slo: &a {<<: *a, ttft: 1s"), "holds itself"),
        (BOMB, "more than 20,000 values"),
        ("a: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
        ("slo: " + "{a: " * 900 + "1" + "}" * 900, "nested too deeply"),
        (TEXT + "3: 4\n", "'3' stands where a key is expected"),
        (TEXT + "on: 4\n", "'on' stands where a key is expected"),
        (TEXT + "? [a, b]\n: 4\n", "where a key is expected"),
        (TEXT.replace("slo: {", "slo: {3: 4, "), "'3' stands where a key is expected"),
        (TEXT.replace("seed: 1", "seed: 2024-13-45"), "month must be in 1..12"),
        (TEXT.replace("seed: 1", "seed: 2024-01-05"), "seed: 2024-01-05 is not a whole number"),
        (TEXT.replace("seed: 1", "seed: " + "9" * 5000), "not valid YAML"),
        (TEXT + "x: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        (TEXT + "x: {a: 1\n", "expected ',' or '}'"),
        (TEXT + "模型: 1\n", "模型: unknown key"),
        (TEXT + "two words: 1\n", "two words: unknown key"),
        ("x" * 300_000, "a scenario is a small YAML file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str | bytes, part: str) -> None:
    found = said(tmp_path, text)
    assert all(problem.startswith("s.yaml") for problem in found)
    assert any(part in problem for problem in found), found


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    (problem,) = said(tmp_path, TEXT + "two words: 1\n")
    assert problem.startswith(f"s.yaml:{len(TEXT.splitlines()) + 1}: ")


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + TEXT,
        TEXT.replace("\n", "\r\n"),
        TEXT.replace("chat on one H100", "聊天 🚀"),
        TEXT.replace("{kind: lognormal, mean: 1024, cv: 1.0}", "&p {kind: lognormal, mean: 1024, cv: 1.0}").replace(
            "{kind: lognormal, mean: 256, cv: 1.0}", "{<<: *p, mean: 256}"
        ),
    ],
    ids=["byte order mark", "CRLF", "unicode", "anchors"],
)
def test_what_editors_and_people_do_is_fine(tmp_path: Path, text: str) -> None:
    assert said(tmp_path, text) == []


def test_a_missing_file_names_the_nearest() -> None:
    assert "did you mean 'quickstart.yaml'" in problems(QUICKSTART.with_name("quikstart.yaml"))[0]
    assert "servecast list scenarios" in problems(Path("no/such/folder/x.yaml"))[0]
    assert "a folder" in problems(QUICKSTART.parent)[0]
    assert "cannot be read" in problems(Path("x" * 300))[0]
    assert "no such file" in problems(Path("a\0b"))[0]


def test_engine_clashes_are_said_beside_other_mistakes() -> None:
    found = problems(QUICKSTART, {"engine.max_num_batched_tokens": 10, "engine.max_num_seqs": 64, "sede": 1})
    assert len(found) == 2


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=8),
    st.sampled_from(["1s", "azure", "poisson", "h100-sxm", ".", "a/b", "unlimited"]),
    st.lists(st.integers(-2, 2), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.dates(),
)  # fmt: skip


def paths(data: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key path of a mapping."""
    if not isinstance(data, dict):
        return []
    return [p for key, child in data.items() for p in ((*prefix, key), *paths(child, (*prefix, key)))]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_mangled_scenario_gets_past_or_crashes(tmp_path: Path, data: st.DataObject) -> None:
    scenario = yaml.safe_load(TEXT)
    scenario["workload"]["num_requests"] = 5
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(scenario)))
        parent = scenario
        for key in path[:-1]:
            parent = parent[key]
        kind = data.draw(st.sampled_from(["drop", "rename", "replace"]))
        value = parent.pop(path[-1])
        if kind == "rename":
            parent[data.draw(st.text(max_size=6))] = value
        elif kind == "replace":
            parent[path[-1]] = data.draw(JUNK)
    before = copy.deepcopy(scenario)
    file = tmp_path / "s.yaml"
    file.write_text(dump_yaml(scenario), encoding="utf-8")
    problems(file)
    if scenario:
        problems(QUICKSTART, scenario)
    assert repr(scenario) == repr(before)
