"""Readers: what real and plain files hold, and what is said about files that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from tests.reference import reference
from workloads.readers import READERS, read_trace
from workloads.trace import Trace

HEADER = "arrival_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def problems(path: Path, format: str | None = None) -> str:
    with pytest.raises(ServecastError) as error:
        read_trace(path, format)
    assert all(str(path) in problem or "format" in problem for problem in error.value.problems)
    return str(error.value)


# -- real files


@pytest.mark.parametrize(
    ("name", "rows", "minutes", "cv", "prompt", "output"),
    [
        ("code", 8_819, 57.3, 13.2, [1469, 5188, 7436, 7437], [13, 55, 251, 1899]),
        ("conv", 19_366, 58.4, 1.09, [1020, 2735, 4142, 14050], [129, 424, 601, 1000]),
    ],
)
def test_azure_2023(name: str, rows: int, minutes: float, cv: float, prompt: list[int], output: list[int]) -> None:
    trace = read_trace(reference("traces", "azure", f"AzureLLMInferenceTrace_{name}.csv.gz"))
    gaps = np.diff(trace.arrival_s)
    assert len(trace) == rows
    assert trace.dropped == {}
    assert trace.arrival_s[0] == 0
    assert trace.arrival_s[-1] / 60 == pytest.approx(minutes, abs=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.005)
    assert np.percentile(trace.prompt_tokens, [50, 90, 99, 100]) == pytest.approx(prompt, abs=0.51)
    assert np.percentile(trace.output_tokens, [50, 90, 99, 100]) == pytest.approx(output, abs=0.51)


def test_traces_of_measured_runs() -> None:
    paths = sorted(reference("reference", "vllm_cpu", "traces").glob("*.csv"))
    assert paths
    for path in paths:
        trace = read_trace(path, "table")
        assert len(trace) == len(path.read_text().splitlines()) - 1


# -- what is accepted


def test_azure_stamps_of_every_year_and_kind(tmp_path: Path) -> None:
    rows = [
        "2024-05-12 00:00:00+00:00,10,1",
        "2024-05-12 00:00:00.009930+00:00,20,2",
        "2024-05-12 00:00:01.5000000,30,3",
        "2024-05-12T00:00:02.269Z,40,4",
    ]
    trace = read_trace(write(tmp_path, AZURE.replace("\n", "\r\n") + "\r\n".join(rows)))
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.00993, 1.5, 2.269], abs=1e-9)
    assert trace.output_tokens.tolist() == [1, 2, 3, 4]
    assert trace.notes == ("format azure recognised from the columns TIMESTAMP, ContextTokens, GeneratedTokens",)


def test_table_sorts_zero_bases_drops_and_says_so(tmp_path: Path) -> None:
    text = HEADER + "5,1,1\n3,0,7\n\n4,2,2.0\n4,3,3\n6,4,0\n"
    trace = read_trace(write(tmp_path, text), "table")
    assert trace.arrival_s.tolist() == [0, 0, 1]
    assert trace.prompt_tokens.tolist() == [2, 3, 1]
    assert trace.dropped == {"blank row": 1, "prompt_tokens is 0": 1, "output_tokens is 0": 1}
    assert trace.notes == ("not in order of arrival: 1 rows are earlier than the row above; sorted (stable)",)


@pytest.mark.parametrize(
    "header",
    ["arrived_at,num_prefill_tokens,num_decode_tokens", "timestamp,prompt_tokens,completion_tokens", " arrival_s , "
     "input_tokens,output_tokens", '"arrival_s","input_tokens","output_tokens"',
     "\ufeffarrival_s,input_tokens,output_tokens"],
)  # fmt: skip
def test_synonyms_spaces_quotes_and_bom(tmp_path: Path, header: str) -> None:
    trace = read_trace(write(tmp_path, header + "\n1.5, 10 ,2\n2.5,20,3"))
    assert trace.arrival_s.tolist() == [0, 1]
    assert trace.prompt_tokens.tolist() == [10, 20]


def test_canonical_name_wins_and_unused_columns_are_named(tmp_path: Path) -> None:
    text = "user,timestamp,output_tokens,input_tokens,arrival_s,max_tokens\nx,99,1,10,0,5\ny,98,2,20,1,2\n"
    trace = read_trace(write(tmp_path, text))
    assert trace.arrival_s.tolist() == [0, 1]
    assert trace.max_tokens.tolist() == [5, 2]
    assert "columns not used: user, timestamp" in trace.notes


def test_milliseconds_are_suspected_not_assumed(tmp_path: Path) -> None:
    rows = "".join(f"{i * 3000},5,5\n" for i in range(12))
    trace = read_trace(write(tmp_path, HEADER + rows))
    assert trace.arrival_s[1] == 3000
    assert "0.00033 requests per second with whole-numbered times: if the file is in milliseconds" in trace.notes[-1]
    assert len(read_trace(write(tmp_path, HEADER + rows.replace("000,", ",")), "table").notes) == 0


def test_jsonl_types_blank_lines_and_late_caps(tmp_path: Path) -> None:
    lines = ['{"arrival_s": 0, "input_tokens": 5, "output_tokens": "2"}', "", '{"output_tokens":3,"arrival_s":1.5,'
             '"input_tokens":6.0}']  # fmt: skip
    for text in ("\n".join(lines), "\ufeff" + "\r\n".join(lines) + "\n"):
        trace = read_trace(write(tmp_path, text, "t.jsonl"))
        assert trace.output_tokens.tolist() == [2, 3]
        assert trace.dropped == {"blank row": 1}
    late = lines[0] + '\n{"arrival_s":1,"input_tokens":6,"output_tokens":3,"max_tokens":9}\n'
    assert "column 'max_tokens' is empty in 1 row: 1;" in problems(write(tmp_path, late, "late.jsonl"))


# -- what is refused


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,-5,1\n", "column 'input_tokens' is negative in 1 row: 2 ('-5'); token counts must be whole numbers"),
        ("0,5,1.5\n1,5,2.5\n", "column 'output_tokens' is fractional in 2 rows: 2 ('1.5'), 3 ('2.5')"),
        ("0,nan,1\n", "column 'input_tokens' is not finite in 1 row: 2 ('nan')"),
        ("inf,5,1\n", "column 'arrival_s' is not finite in 1 row: 2 ('inf')"),
        ("-1,5,1\n", "column 'arrival_s' is negative in 1 row: 2"),
        ("1700000000000,5,1\n", "are they milliseconds? divide by 1000"),
        ("0,5,\n", "column 'output_tokens' is empty in 1 row: 2"),
        ("0,5,1\n1,6", "column 'output_tokens' is empty in 1 row: 3"),
        ("0,five,1\n", "column 'input_tokens' is not understood in 1 row: 2 ('five')"),
        ("2023-11-16 18:17:03,5,1\n", "column 'arrival_s' is not understood"),
        ("0,2147483648,1\n", "column 'input_tokens' is too large in 1 row: 2"),
        ("0,99999999999999999999999,1\n", "is too large in 1 row: 2"),
        ("0,5,1\n1,5,1,7\n", "row 3 has 4 fields, the header has 3 columns"),
        ('0,5,1\n1,"5,1\n', "quote"),
        ("\n\n", "no requests: a header"),
        ("", "no requests: a header"),
        ("0,0,1\n1,1,0\n", "no requests are left; dropped 1 because prompt_tokens is 0, 1 because output_tokens is 0"),
        ("0,x,1\n" * 9, "in 9 rows: 2 ('x'), 3 ('x'), 4 ('x'), 5 ('x'), 6 ('x'), ...;"),
    ],
)
def test_bad_rows(tmp_path: Path, rows: str, said: str) -> None:
    path = write(tmp_path, HEADER + rows)
    assert said in problems(path)
    assert said in problems(write(tmp_path, gzip.compress((HEADER + rows).encode()), "t.csv.gz"))


def test_problems_of_all_columns_at_once(tmp_path: Path) -> None:
    with pytest.raises(ServecastError) as error:
        read_trace(write(tmp_path, HEADER + "x,-1,1.5\n-1,nan,3\n"))
    assert len(error.value.problems) == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"\n" + HEADER.encode(), "row 1 is blank"),
        (bytes(range(256)), "binary or not UTF-8 text"),
        (b"\xff\xfe" + HEADER.encode("utf-16-le"), "binary or not UTF-8 text"),
        (HEADER.encode() + b"0,\xff\xfe,1\n", "row 2 is not UTF-8 text"),
        (gzip.compress(HEADER.encode() * 99, mtime=0)[:-20], "truncated or damaged"),
        (b"\x1f\x8bnot gzip", "truncated or damaged"),
        (b"PAR1 is not all", "damaged or truncated Parquet"),
        (b"0.0,5,1\n1.0,5,1\n", "of no known trace format"),
        (b"arrival_s,input_token,output_tokens\n", "column 'input_tokens' is missing (did you mean 'input_token'?)"),
        (b"TIMESTAMP,ContextTokens,GeneratdTokens\n", "'GeneratedTokens' is missing (did you mean 'GeneratdTokens'?)"),
        (b"arrival_s;input_tokens;output_tokens\n0;5;1\n", "separated by ';'; commas are needed"),
        (b"arrival_s\tinput_tokens\toutput_tokens\n", "separated by tabs"),
        (b"arrival_s,input_tokens,input_tokens,output_tokens\n", "names a column twice: input_tokens"),
        (b"timestamp,arrived_at,input_tokens,output_tokens\n", "arrived_at, timestamp all mean 'arrival_s'"),
        (b'[{"arrival_s": 0}]', "not a whole JSON object; JSONL has one object a line"),
        (b'{"arrival_s": 0,\n"input_tokens": 5}', "row 1 is not a whole JSON object"),
        (b'{"timestamp":0,"input_length":5,"output_length":5}', "of no known trace format"),
        (b'{"arrival_s":0,"input_tokens":5,"output_tokens":1}\n{"arrival_s":1,"inp', "in 1 row: 2; every line"),
        (b'{"arrival_s":0,"input_tokens":5,"output_tokens":1}\n{"arrival_s":1}', "'input_tokens' is empty in 1 row: 2"),
        (b'{"arrival_s":0,"input_tokens":true,"output_tokens":1}', "is not understood in 1 row: 1 ('true')"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in problems(write(tmp_path, content, "t.bin"))


def test_paths_and_formats_never_fall_back(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "0,1,1\n", "conversations.csv")
    assert "no such file (did you mean 'conversations.csv'?)" in problems(tmp_path / "conversation.csv")
    assert "no folder" in problems(tmp_path / "no" / "t.csv")
    assert "a folder" in problems(tmp_path)
    assert "unknown trace format 'tabel' (did you mean 'table'?); formats: azure, burstgpt," in problems(path, "tabel")
    assert "as format azure, column 'TIMESTAMP' is missing" in problems(path, "azure")
    assert len(READERS["table"](path)) == 1


def test_azure_bad_rows(tmp_path: Path) -> None:
    rows = "yesterday,5,1\n2023-13-01 00:00:00,5,1\n2023-11-16 18:17:03+02:00,5,1\n,5,1\n2023-11-16 18:17:03,5,1\n"
    said = problems(write(tmp_path, AZURE + rows))
    assert "'TIMESTAMP' is not understood in 3 rows: 2 ('yesterday'), 3 ('2023-13-01 00:00:00'), 4 (" in said
    assert "times must be dates with a time in UTC" in said
    assert "'TIMESTAMP' is empty in 1 row: 5" in said


def test_caps_below_outputs(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens,max_tokens\n0,5,5,5\n1,5,5,4\n2,5,0,0\n"
    assert "column 'max_tokens' is below 'output_tokens' in 1 row: 3" in problems(write(tmp_path, text))


def test_parquet_types(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    frame = pl.DataFrame({"arrival_s": [0.0, None], "input_tokens": [True, False], "output_tokens": [1, -1]})
    frame.write_parquet(path)
    said = problems(path)
    assert "'arrival_s' is empty in 1 row: 2" in said
    assert "'input_tokens' is not understood in 2 rows: 1 (True), 2 (False)" in said
    assert "'output_tokens' is negative in 1 row: 2 (-1)" in said
    path.write_bytes(path.read_bytes()[:-30])
    assert "Parquet" in problems(path)


# -- round trips and noise

requests = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 2**31 - 1), st.integers(1, 10**6), st.integers(0, 99)),
    min_size=1,
    max_size=20,
)
FOLDER_ONCE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FOLDER_ONCE
@given(requests, st.sampled_from(["csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"]), st.permutations(range(4)))
def test_round_trip(tmp_path: Path, rows: list[tuple[float, int, int, int]], kind: str, order: list[int]) -> None:
    columns = {
        "arrival_s": [row[0] for row in rows],
        "input_tokens": [row[1] for row in rows],
        "output_tokens": [row[2] for row in rows],
        "max_tokens": [row[2] + row[3] for row in rows],
    }
    frame = pl.DataFrame(columns).select([list(columns)[i] for i in order])
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        frame.write_parquet(path)
    else:
        text = frame.write_csv() if "csv" in kind else "".join(json.dumps(row) + "\n" for row in frame.to_dicts())
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    trace = read_trace(path)
    frame = frame.sort("arrival_s", maintain_order=True)
    expected = (frame["arrival_s"] - frame["arrival_s"][0]).to_list()
    assert trace.arrival_s.tolist() == expected
    assert trace.prompt_tokens.tolist() == frame["input_tokens"].to_list()
    assert trace.output_tokens.tolist() == frame["output_tokens"].to_list()
    assert trace.max_tokens.tolist() == frame["max_tokens"].to_list()


GOOD = [
    (HEADER + "0,5,1\n1.5,6,2\n2,7,3").encode(),
    (AZURE + "2023-11-16 18:17:03.9799600,5,1\r\n2023-11-16 18:17:04,6,2").encode(),
    b'{"arrival_s":0,"input_tokens":5,"output_tokens":1}\n{"arrival_s":1,"input_tokens":6,"output_tokens":2}\n',
]
GOOD.append(gzip.compress(GOOD[0], mtime=0))
CELLS = st.one_of(
    st.sampled_from(
        ["", " ", "0", "-1", "1.5", "nan", "inf", "1e400", "9" * 30, '"', "true", "null", "2023-11-16 18:17"]
    ),
    st.integers(0, 50).map(str),
    st.text(max_size=4),
)


def trace_or_error(path: Path, format: str | None) -> None:
    try:
        trace = read_trace(path, format)
    except ServecastError:
        return
    assert isinstance(trace, Trace)
    assert trace.output_tokens.min() >= 1


@FOLDER_ONCE
@given(st.data(), st.sampled_from([None, *READERS]))
def test_damaged_bytes_give_a_trace_or_an_error(tmp_path: Path, data: st.DataObject, format: str | None) -> None:
    content = bytearray(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    noise = data.draw(st.binary(max_size=20))
    trace_or_error(write(tmp_path, bytes(content[:cut]) + noise), format)


@FOLDER_ONCE
@given(
    st.sampled_from([HEADER, AZURE, HEADER.replace("arrival_s", "timestamp").replace("\n", ",max_tokens\n")]),
    st.lists(st.lists(CELLS, max_size=5), max_size=5),
    st.randoms(use_true_random=False),
    st.sampled_from([None, *READERS]),
)
def test_wrong_cells_and_shuffled_columns(
    tmp_path: Path, header: str, rows: list[list[str]], random: object, format: str | None
) -> None:
    names = header.strip().split(",")
    random.shuffle(names)  # type: ignore[attr-defined]
    text = "\n".join([",".join(names), *(",".join(row) for row in rows)])
    trace_or_error(write(tmp_path, text.encode(errors="replace")), format)
    values = [dict(zip(names, row, strict=False)) for row in rows]
    lines = "\n".join(json.dumps(value) for value in values)
    trace_or_error(write(tmp_path, lines), format)
