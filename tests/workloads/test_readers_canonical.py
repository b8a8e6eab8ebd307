"""The canonical form: everything a trace knows comes back, to the last bit; contradictions are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.prefix import Prefix
from workloads.readers import read_trace
from workloads.trace import Trace, Turns
from workloads.write import write_trace

HEADER = "arrival_s,input_tokens,output_tokens"


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A trace with any of the optional columns."""
    n = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.Generator(np.random.PCG64(seed))
    arrival = np.sort(rng.uniform(0, 10.0 ** rng.integers(-3, 10), n))
    prompt, output = rng.integers(1, 400, n), rng.integers(1, 50, n)
    given = draw(st.sets(st.sampled_from(["prefix", "turns", "classes", "patience", "samples", "cap"])))
    counts = rng.integers(0, -(-prompt // 16) + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    prefix = Prefix(offsets, rng.integers(0, 10**17, offsets[-1]), 16, bool(rng.integers(2)))
    previous = np.full(n, -1)
    for i in range(1, n):
        free = np.setdiff1d(np.arange(i), previous)
        if free.size and rng.random() < 0.6:
            previous[i] = rng.choice(free)
    turns = Turns(previous, np.where(previous >= 0, rng.exponential(10, n), 0.0))
    return Trace(
        arrival - arrival[0],
        prompt,
        output,
        output + rng.integers(0, 9, n) * ("cap" in given),
        source="made up",
        prefix=prefix if "prefix" in given and offsets[-1] else None,
        turns=turns if "turns" in given else None,
        classes=(rng.integers(0, 2, n), ("b, ü", "a", "unused")) if "classes" in given else None,
        patience_s=np.where(np.arange(n) % 2, np.inf, 0.1 + rng.random(n)) if "patience" in given else None,
        samples=rng.integers(1, 4, n) if "samples" in given else None,
        dropped={"output_tokens is 0": 3},
        notes=("a note, with a comma", 'and a "quote"'),
    )


def assert_equal(a: Trace, b: Trace) -> None:
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "max_tokens"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist()
    assert (a.prefix is None, a.turns is None) == (b.prefix is None, b.turns is None)
    if a.prefix is not None and b.prefix is not None:
        assert a.prefix.offsets.tolist() == b.prefix.offsets.tolist()
        assert a.prefix.ids.tolist() == b.prefix.ids.tolist()
        assert (a.prefix.block_tokens, a.prefix.chained) == (b.prefix.block_tokens, b.prefix.chained)
    if a.turns is not None and b.turns is not None:
        assert a.turns.previous.tolist() == b.turns.previous.tolist()
        assert a.turns.think_s.tolist() == b.turns.think_s.tolist()
    assert (a.classes is None) == (b.classes is None)
    if a.classes is not None and b.classes is not None:
        assert a.classes[0].tolist() == b.classes[0].tolist()
        assert a.classes[1] == b.classes[1]
    known = a.patience_s is not None and np.isfinite(a.patience_s).any()  # a column of nothing says the same as none
    assert (b.patience_s is not None) == known
    if known:
        assert a.patience_s is not None
        assert b.patience_s is not None
        assert a.patience_s.tolist() == b.patience_s.tolist()
    assert (a.samples is None) == (b.samples is None)
    if a.samples is not None and b.samples is not None:
        assert a.samples.tolist() == b.samples.tolist()
    assert a.dropped == b.dropped
    assert a.notes == b.notes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(), st.sampled_from(["parquet", "jsonl", "jsonl.gz"]))
def test_round_trip(tmp_path: Path, trace: Trace, ending: str) -> None:
    path = tmp_path / f"t.{ending}"
    write_trace(trace, path)
    back = read_trace(path, "table")
    assert_equal(trace, back)
    assert back.source == f"{path} (made from made up)"
    assert [entry.name for entry in tmp_path.glob("*.part")] == []


def test_many_rows_and_no_requests_between_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.write.ROWS", 3)
    offsets = np.array([0, 2, 2, 2, 3, 3, 3, 3, 4])
    prefix = Prefix(offsets, np.array([1, 2, 3, 4]), 8)
    trace = Trace.from_columns(range(8), [20] * 8, [1] * 8)
    whole = Trace(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.max_tokens, "t", prefix)
    write_trace(whole, tmp_path / "t.jsonl")
    back = read_trace(tmp_path / "t.jsonl")
    assert back.prefix is not None
    assert back.prefix.offsets.tolist() == offsets.tolist()


def test_sessions_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER},session,class\n0,5,1,x,chat\n1,5,1,,code\n3,5,0,x,chat\n7,5,1,x,chat\n")
    trace = read_trace(path)
    assert trace.turns is not None
    assert trace.turns.previous.tolist() == [-1, -1, 0]
    assert trace.turns.think_s.tolist() == [0, 0, 7]  # without think_s: the gap between arrivals
    assert trace.classes is not None
    assert trace.classes[1] == ("chat", "code")
    assert any("think times are gaps" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        ("session,turn", "0,5,1,x,2\n1,5,1,x,1\n", "column 'turn' does not rise within its session in 1 row: 3"),
        ("think_s,session", "0,5,1,-3,x\n", "column 'think_s' is negative in 1 row: 2"),
        ("patience_s", "0,5,1,0\n", "column 'patience_s' is too small in 1 row: 2"),
        ("samples", "0,5,1,0\n", "column 'samples' is too small in 1 row: 2"),
        ("class", "0,5,1,a\n1,5,1,\n", "column 'class' is empty in 1 row: 3"),
        ("block_ids", "0,5,1,[1]\n", "need one block size in column 'block_tokens'; found none"),
        ("block_ids,block_tokens", "0,5,1,[1],8\n1,5,1,[1],9\n", "one block size in column 'block_tokens'; found 8, 9"),
        ("block_ids,block_tokens", '0,5,1,"[1,2]",8\n', "more blocks of 8 tokens than the prompt has in 1 row: 2"),
        ("block_ids,block_tokens,blocks_chained", "0,5,1,[1],8,maybe\n", "'blocks_chained' must be true or false"),
        ("provenance", "0,5,1,hello\n", "column 'provenance' is not what servecast writes"),
    ],
)  # fmt: skip
def test_contradictions(tmp_path: Path, header: str, rows: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER},{header}\n{rows}")
    with pytest.raises(ServecastError) as error:
        read_trace(path, "table")
    assert words in str(error.value)


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    trace = Trace.from_columns([0], [1], [1])
    with pytest.raises(ServecastError, match=r"use one of \.parquet, \.jsonl, \.jsonl\.gz"):
        write_trace(trace, tmp_path / "t.csv")
    with pytest.raises(ServecastError, match="cannot be written"):
        write_trace(trace, tmp_path / "no" / "t.jsonl")
