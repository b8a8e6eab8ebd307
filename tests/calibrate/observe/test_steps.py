"""Records and tables of steps as they are read: whole, cut off, damaged, or something else."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.observe.read import read_steps
from servecast.errors import ServecastError
from tests.calibrate.observe.helpers import END, HEAD, LINES, f, q, s, text


def read(tmp_path, *lines, head=HEAD):
    path = tmp_path / "steps.jsonl"
    path.write_text(text(*lines, head=head))
    return read_steps(path)


def problems(tmp_path, data, name="steps.jsonl"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ServecastError) as caught:
        read_steps(path)
    return [problem.replace(f"{path}", "FILE") for problem in caught.value.problems]


def test_a_record(tmp_path):
    run = read(tmp_path, *LINES)
    assert run.facts == {name: value for name, value in HEAD.items() if name != "servecast_steps"}
    assert run.notes == ()
    assert run.most_in_flight == 0
    assert run.steps.row(0, named=True) == {
        "step": 0, "updates": 0, "begin_s": 0.0, "planned_s": 0.0001, "update_s": 0.0008, "end_s": 0.0009,
        "chunk_request": [0], "chunk_tokens": [20], "chunk_cached": [0], "decodes": 0, "kv_tokens": 0, "running": 1,
        "waiting": 0, "free_blocks": 98, "preempted": [], "prefix_hits": 0, "draft_tokens": 0, "busy_s": 0.0009,
    }  # fmt: skip
    assert run.requests.rows(named=True) == [{
        "request": 0, "plan": 0, "reached_s": 0.0, "noted_s": 100.0, "prompt_tokens": 20, "max_tokens": 3,
        "priority": 0, "kinds": "", "end_plan": 3, "finished_s": 0.0028, "output_tokens": 3, "status": "length_capped",
    }]  # fmt: skip


def test_busy_time_of_an_asynchronous_engine_is_the_cadence_of_its_updates(tmp_path):
    """Steps 0 and 1 are planned at once; 2 while 1 runs; then the engine is idle before 3."""
    times = [(0.0, 0.010, 0), (0.001, 0.018, 0), (0.0105, 0.030, 1), (5.0, 5.012, 3)]
    steps = [["s", i, u, b, b, e, e, *s(i, decodes=1)[7:]] for i, (b, e, u) in enumerate(times)]
    run = read(tmp_path, *steps, END)
    assert run.most_in_flight == 1
    assert run.steps["busy_s"].to_list() == pytest.approx([0.010, 0.008, 0.012, 0.012])


def test_a_record_without_an_end(tmp_path):
    assert read(tmp_path, *LINES[:-1]).notes == ()  # an idle engine that was killed, as vLLM does it
    (note,) = read(tmp_path, *LINES[:-1], q(1, 4)).notes
    assert note == "the engine was killed at work, or still runs: what was written is used"
    (note,) = read(tmp_path, *LINES[:-1], ["e", 1.0, "planned: KeyError('x')"]).notes
    assert note == "the observer stopped before the engine did: planned: KeyError('x')"


@pytest.mark.parametrize("gone", [1, 5, 20])
def test_a_record_that_is_cut_off(tmp_path, gone):
    path = tmp_path / "steps.jsonl"
    path.write_text(text(*LINES[:-1])[:-gone])
    run = read_steps(path)
    assert len(run.steps) == (4 if gone == 1 else 3)  # a last line that lacks its line break only is whole
    assert any("cut off in line 7" in note for note in run.notes) == (gone > 1)


def test_unfinished_requests_have_no_end(tmp_path):
    run = read(tmp_path, q(0), s(0, [[0, 20, 0]]), q(1, 1))
    assert run.requests["output_tokens"].to_list() == [None, None]
    assert run.requests["status"].null_count() == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "FILE, line 1: is not the beginning of a record of servecast's observer; `servecast calibrate observe`"),
        (b"\xff\xfe\x00", "FILE: is not text; expected a record"),
        ("a,b\n1,2\n", "FILE, line 1: is not the beginning"),
        ('{"servecast_steps": "1"}\n', "FILE, line 1: is not the beginning"),
        ('{"servecast_steps": 2}\n["z", 1]\n', "FILE, line 1: format 2, written by a newer observer; this"),
        (text(), "FILE: holds no steps; did the engine get a request"),
        (text(q(0)), "FILE: holds no steps"),
        (text(head=HEAD | {"max_num_seqs": "8"}), "FILE, line 1: max_num_seqs is '8'; expected int"),
        (text(head=HEAD | {"block_size": True}), "FILE, line 1: block_size is True; expected int"),
        (text(["x", 1], *LINES), "FILE, line 2: is no line of a record"),
        (text({}, *LINES), "FILE, line 2: is no line of a record"),
        (text(*LINES).replace('["s", 1,', '["s" 1,'), "FILE, line 4: is no line of a record"),
        (text(q(0)[:-1], *LINES[1:]), "FILE, line 2: has 7 values after 'q'; expected 8"),
        (text(q(0, prompt=-1), *LINES[1:]), "FILE, line 2: prompt_tokens is -1; expected a count"),
        (text(q(0, prompt=2**60), *LINES[1:]), f"FILE, line 2: prompt_tokens is {2**60}; expected a count"),
        (text(q(0, kinds=[1] * 99), *LINES[1:]), "FILE, line 2: kinds is [1, 1, 1, 1, 1"),
        (text(q(0, noted_s=math.nan), *LINES[1:]), "FILE, line 2: is no line of a record"),
        (text(q(0), s(0, [[0, 0, 0]])), "FILE, line 3: chunks is [[0, 0, 0]]; expected a list of [request, new tokens"),
        (text(q(0), s(0, [[1, 5, 0]])), "FILE, line 3: names request 1, which has not arrived"),
        (text(q(0), s(0, lost=[3])), "FILE, line 3: names request 3, which has not arrived"),
        (text(q(0), s(0), s(2)), "FILE, line 4: step 2, 1 is due; are lines gone?"),
        (text(q(0), q(2), s(0)), "FILE, line 3: request 2, 1 is due; are lines gone?"),
        (text(q(0), s(0, updates=1)), "FILE, line 3: updates is 1; expected no less than before, and no more than"),
        (text(q(0), s(0), [*s(1)[:3], 0.2, 0.1, 0.3, 0.4, *s(1)[7:]]), "FILE, line 4: its times are not in order"),
        (text(q(0), s(0), [*s(1)[:3], 0.0, 0.0, 0.0, 0.0, *s(1)[7:]]), "FILE, line 4: begins or ends before the step"),
        (text(f(0, 1), s(0)), "FILE, line 2: request 0 is over before it has arrived"),
        (text(q(0), s(0), f(0, 1), f(0, 1)), "FILE, line 5: request 0 is over twice"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, data, said):
    assert problems(tmp_path, data)[0].startswith(said)


def test_all_mistakes_at_once_up_to_a_limit(tmp_path):
    found = problems(tmp_path, text(q(0), ["x"], s(0), q(0), *[[i] for i in range(100)]))
    assert found[:2] == ["FILE, line 3: is no line of a record", "FILE, line 5: request 0, 1 is due; are lines gone?"]
    assert len(found) == 21
    assert found[-1] == "FILE: 82 more lines like these"


def test_a_file_that_is_not_there(tmp_path):
    for name in ("steps.jsonl", "steps_a.csv"):
        with pytest.raises(ServecastError, match=f"{name}: cannot be read"):
            read_steps(tmp_path / name)


def test_tables(tmp_path):
    assert write_tables(tmp_path).steps["chunk_tokens"].to_list() == [[20], [], [8, 4]]
    run = write_tables(tmp_path)
    assert run.steps["chunk_cached"].to_list() == [[0], [], [0, 16]]
    assert run.steps["chunk_request"].to_list() == [[None], [], [None, None]]
    assert run.requests["plan"].to_list() == [0, 2]
    assert run.requests["reached_s"].to_list() == pytest.approx([0.01, 0.03])
    assert run.facts == {}
    assert run.notes == ("1 requests never reached the scheduler",)


STEPS = """t_sched,t_exec,t_out,t_end,gen_reqs,gen_kv,running,waiting,free_blocks,chunks
0.01,0.011,0.015,0.016,0,0,1,0,90,20@0
0.02,0.021,0.025,0.026,1,20,1,0,90,
0.03,0.031,0.035,0.036,1,21,2,0,90,8@0 4@16
"""
REQUESTS = """input_tokens,output_tokens,sent_s,send_to_scheduler_ms
20,5,0.005,5
12,5,0.02,10
12,5,,
"""


def write_tables(tmp_path, steps=STEPS, requests=REQUESTS, summary=None):
    (tmp_path / "steps_a.csv").write_text(steps)
    (tmp_path / "requests_a.csv").write_text(requests)
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    return read_steps(tmp_path / "steps_a.csv")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": STEPS.replace("20@0", "20@")}, "row 2: chunk '20@'; expected tokens@already_cached, such as 128@0"),
        ({"steps": STEPS.replace("8@0", "0@0")}, "row 4: chunk '0@0'; expected"),
        ({"steps": STEPS.replace("gen_kv", "kv")}, "no column gen_kv"),
        ({"steps": STEPS.replace("0.03,", "0.0,")}, "t_sched decreases from one row to the next"),
        ({"requests": REQUESTS.replace("12", "x")}, "row 3: input_tokens is 'x'; expected a whole number"),
        ({"summary": "{}"}, "summary.json: has no scheduler_config that can be read"),
        ({"summary": "[" * 99_999}, "summary.json: has no scheduler_config that can be read"),
    ],
)
def test_mistakes_in_tables(tmp_path, changes, said):
    with pytest.raises(ServecastError) as caught:
        write_tables(tmp_path, **changes)
    assert said in caught.value.problems[0]


def test_facts_of_tables(tmp_path):
    config = {"max_num_seqs": 4, "policy": "fcfs", "block_size": None, "num_gpu_blocks": 9, "watermark": 0.0}
    run = write_tables(tmp_path, summary=json.dumps({"scheduler_config": config}))
    assert run.facts == {"max_num_seqs": 4, "num_gpu_blocks": 9, "scheduling_policy": "fcfs"}


def test_a_table_by_another_name(tmp_path):
    assert problems(tmp_path, STEPS, "a.csv") == [
        "FILE: a table of steps is called steps_X.csv, with requests_X.csv beside it"
    ]


def reads_or_says(path, data):
    path.write_bytes(data)
    said = None
    try:
        run = read_steps(path)
    except ServecastError as error:
        said = error.problems
    assert len(run.steps) if said is None else said and all(problem.strip() for problem in said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes(folder, data):
    reads_or_says(folder / "any.jsonl", data)
    reads_or_says(folder / "any.jsonl", text(*LINES[:3]).encode() + data)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_damage(folder, data):
    whole = bytearray(text(*LINES).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 9))] = data.draw(
            st.binary(max_size=5) | st.sampled_from([b"1e999", b"-1"])
        )
    reads_or_says(folder / "damaged.jsonl", bytes(whole))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(LINES), max_size=6), st.integers(0, 6), st.integers(0, 16), JSON)
def test_any_value(folder, lines, line, place, value):
    lines = [list(line) for line in lines]
    if line < len(lines) and place < len(lines[line]):
        lines[line][place] = value
    reads_or_says(folder / "values.jsonl", text(*lines).encode())


@settings(deadline=None)
@given(st.binary(max_size=100), st.integers(0, len(STEPS)))
def test_any_bytes_in_tables(folder, data, at):
    (folder / "requests_any.csv").write_text(REQUESTS)
    reads_or_says(folder / "steps_any.csv", data)
    reads_or_says(folder / "steps_any.csv", STEPS.encode()[:at] + data + STEPS.encode()[at:])
