"""What Grafana's API and panel inspector give says the same as Prometheus's own answer, and what does not is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servecast.errors import ServecastError
from tests.workloads.test_prometheus import EARLY, FULL, HALF, OUTPUTS, PROMPTS, answer, rows
from workloads.prometheus import Measured, read_prometheus
from workloads.scrapes import QUERY

Rows = list[tuple[str, dict[str, str], float]]
AT: dict[float, Rows] = {1_700_000_000.0: EARLY, 1_700_000_300.0: rows(PROMPTS[:3000], OUTPUTS[:3000]),
                         1_700_000_600.0: FULL}  # fmt: skip
EXPECTED = read_prometheus(answer(AT))


def frame(ref: str, labels: dict[str, str], times_s: list[float], values: list[Any]) -> dict[str, Any]:
    """A frame as grafana/grafana's pkg/promlib/testdata/range_missing.result.golden.jsonc has it."""
    meta = {"type": "timeseries-multi", "typeVersion": [0, 1], "custom": {"resultType": "matrix"}}
    time = {"name": "Time", "type": "time", "typeInfo": {"frame": "time.Time"}, "config": {"interval": 1000}}
    value = {"name": "Value", "type": "number", "typeInfo": {"frame": "float64"}, "labels": labels, "config": {}}
    data = {"values": [[int(1000 * t) for t in times_s], values]}
    return {"schema": {"refId": ref, "meta": meta, "fields": [time, value]}, "data": data}


def frames(ref: str = "A", rows_at: dict[float, Rows] = AT, part: str = "") -> list[dict[str, Any]]:
    """One frame a series of those whose name holds `part`."""
    found: dict[str, tuple[dict[str, str], list[float], list[Any]]] = {}
    for time, there in rows_at.items():
        for name, labels, value in there:
            if part in name:
                metric = {"__name__": name, **labels}
                _, times, values = found.setdefault(json.dumps(metric), (metric, [], []))
                times.append(time)
                values.append(value)
    return [frame(ref, *one) for one in found.values()]


def results(**queries: Any) -> dict[str, Any]:
    return {"results": {ref: {"status": 200, "frames": found} for ref, found in queries.items()}}


def read(found: Any, **options: Any) -> Measured:
    return read_prometheus(json.dumps(found), **options)


def panel_data(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The raw model passed to the panel: fields hold their values."""
    series = [
        {**one["schema"], "length": len(one["data"]["values"][0]),
         "fields": [field | {"values": values, "entities": {}}
                    for field, values in zip(one["schema"]["fields"], one["data"]["values"], strict=True)]}
        for one in found
    ]  # fmt: skip
    return {"state": "Done", "series": series, "annotations": [], "request": {"app": "panel-editor"}}


def test_all_that_can_be_saved_says_the_same_as_prometheus(tmp_path: Path) -> None:
    one_query, parts = frames(), ("prompt_tokens", "generation_tokens", "success")
    several = results(**{ref: frames(ref, part=part) for ref, part in zip("ABC", parts, strict=True)})
    for found in (
        results(A=one_query),
        several,
        {"traceId": "x", "request": {"url": "api/ds/query"}, "response": several},
        one_query,
        [one for ref, part in zip("ABC", parts, strict=True) for one in frames(ref, part=part)],
        panel_data(one_query),
    ):
        assert read(found) == EXPECTED
    (tmp_path / "panel.json").write_text(json.dumps(several, indent=2))
    assert read_prometheus(tmp_path / "panel.json") == EXPECTED


def test_two_instant_queries_are_two_scrapes() -> None:
    early, late = ({time: AT[time]} for time in (1_700_000_000.0, 1_700_000_600.0))
    expected = read_prometheus(answer(late), answer(early))
    assert (
        read_prometheus(json.dumps(results(A=frames("A", late))), json.dumps(results(A=frames("A", early)))) == expected
    )
    assert read(results(B=frames("B", late), A=frames("A", early))) == expected  # in whatever order the queries stand
    assert expected.rate == (PROMPTS.size - HALF) / 600


def test_several_numbers_in_one_frame_and_frames_of_other_things() -> None:
    found = frames()
    wide = copy.deepcopy(found[0])
    for one in found[1:]:
        wide["schema"]["fields"].append(one["schema"]["fields"][1])
        wide["data"]["values"].append(one["data"]["values"][1])
    assert read(results(A=[wide])) == EXPECTED
    exemplars = frame("A", {}, [1e9], [1])
    exemplars["schema"]["meta"]["custom"]["resultType"] = "exemplar"
    exemplars["schema"]["fields"].append({"name": "traceID", "type": "string"})
    exemplars["data"]["values"].append(["x"])
    other = frame("B", {"__name__": "vllm:num_requests_running"}, [1.7e9], [None])
    other["data"]["entities"] = [None, {"NaN": [0]}]
    empty = {"schema": {"refId": "B", "meta": {}, "fields": []}, "data": {"values": []}}
    assert read(results(A=[*found, exemplars], B=[other, empty], C=[], D=None)) == EXPECTED


def test_the_query_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs" / "workloads.md"
    assert f"\n{QUERY}\n" in docs.read_text(encoding="utf-8")


def test_a_null_is_a_time_without_a_sample() -> None:
    whole = frames()
    for one in whole[:5]:
        one["data"]["values"][1][1] = None
    assert read(results(A=whole)) == EXPECTED
    whole[3]["data"]["entities"] = [None, {"NaN": [1]}]
    with pytest.raises(
        ServecastError, match="scrape: refId A, frame 3: vllm:request_prompt_tokens_bucket is 'NaN'; a co"
    ):
        read(results(A=whole))


def changed(change: Callable[[dict[str, Any]], Any], place: int = 2) -> dict[str, Any]:
    found = frames()
    change(found[place])
    return results(A=found)


def with_values(column: int, values: list[Any]) -> dict[str, Any]:
    return changed(lambda one: one["data"]["values"].__setitem__(column, values))


def nameless(one: dict[str, Any]) -> None:
    del one["schema"]["fields"][1]["labels"]["__name__"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (results(), "vllm:request_prompt_tokens_bucket is missing; found: none of the needed metrics"),
        (results(A=frames(part="prompt")), "vllm:request_generation_tokens_bucket is missing; found: request_prompt"),
        ({"results": {"A": {"error": "bad_data: parse error", "status": 400}}},
         "scrape: refId A: Grafana's query failed: bad_data: parse error"),
        ({"results": {"A": [1]}}, "scrape: refId A: '[1]' where an object with a list of frames was expected"),
        ({"results": {"A": {"frames": 3}}}, "refId A: \"{'frames': 3}\" where an object with a list of frames"),
        (results(A=[3]), "refId A, frame 0: not a data frame with schema.fields and data.values (AttributeError"),
        (changed(lambda one: one.pop("data")), "refId A, frame 2: not a data frame with schema.fields and data.values"),
        (changed(lambda one: one["data"]["values"].pop()), "refId A, frame 2: 2 fields, but columns of 3 values"),
        (changed(lambda one: one["data"]["values"][1].pop()), "refId A, frame 2: 2 fields, but columns of 3, 2 values"),
        (with_values(0, ["a", "b", "c"]), "frame 2: not a data frame"),
        (with_values(0, [1e999, 1, 2]), "(ValueError: a time is not finite)"),
        (with_values(1, [1, "many", 2]), "is 'many'; a count of 0 or more"),
        (with_values(1, [1, 10**400, 2]), "frame 2: vllm:request_prompt_toke"),
        (with_values(0, [1, 2, 2]), "is there twice"),
        (changed(nameless), "refId A, frame 2 ({'engine': '0', 'model_name': 'org/model', 'le': '5.0'}) has no metric "
         "name; functions such as rate() and sum(), and Grafana's formats Table and Heatmap, take it away, so query"),
        (changed(lambda one: one["schema"]["meta"].update(type="heatmap-rows")), "refId A, frame 2 is a table or a "
         "heatmap (meta.type heatmap-rows; fields Time (time), Value (number)); a time and numbers are needed: set "
         "the query's format to Time series"),
        (changed(lambda one: one["schema"]["meta"].update(type="timeseries-long")), "frame 2 is a table or a heatmap"),
        (changed(lambda one: one["schema"]["fields"][1].update(type="string")), "fields Time (time), Value (string)"),
        (changed(lambda one: one["schema"]["fields"].pop(0)), "frame 2 is a table or a heatmap"),
        ([{"schema": 3}], "neither /metrics text nor an answer of Prometheus's query API with data.result[].metric and "
         ".value, nor data frames of Grafana"),
        ({"type": "heatmap", "targets": [{"expr": "x"}]}, "nor data frames of Grafana (KeyError: 'data')"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(found: Any, said: str) -> None:
    with pytest.raises(ServecastError) as error:
        read(found)
    assert said in str(error.value)


def test_all_frames_that_cannot_be_read_are_said() -> None:
    found = frames("A", part="prompt")
    found[1]["data"]["values"].pop()
    found[4]["schema"]["meta"]["type"] = "heatmap-cells"
    broken = results(A=found, C=frames("C", part="generation"))
    broken["results"]["B"] = {"error": "timeout"}
    with pytest.raises(ServecastError) as error:
        read(broken)
    assert [problem.split(" is ")[0].split(": 2 ")[0] for problem in error.value.problems] == [
        "scrape: refId A, frame 1",
        "scrape: refId A, frame 4",
        "scrape: refId B: Grafana's query failed: timeout",
    ]


def test_json_that_is_nested_too_deeply() -> None:
    with pytest.raises(ServecastError, match="RecursionError"):
        read_prometheus('{"results":' + "[" * 100_000)
