"""Whatever stands in a file, every reader gives a Trace or says what is wrong: nothing else ever comes out."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.readers import READERS, read_trace
from workloads.readers.options import ReadOptions
from workloads.statistics import describe
from workloads.trace import Trace

FOLDER_ONCE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
HUGE = [2**31, 2**63, 2**64, 10**30, -1, 1.5, 1e300]
WRONG: list[Any] = [None, "", " ", "x", True, [], {}, [[1]], {"a": [1]}, "2023-11-16 18:17", "nan", "1e400", *HUGE]


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ASK = {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 1.0, "api_time": 2}
AGENT = {"t": 30.0, "type": "subagent", "duration_ms": 9000, "requests": [ASK, ASK | {"t": 4.0}]}
CHUNKS = {"sys_prompt": [1, 2], "passages_ids": [3], "history": [], "web_search": [], "user_input": [4]}
# fmt: off
GOOD = {
    "azure": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1,5,1\r\n"
    "2024-05-10 00:00:00+00:00,0,6,2\n",
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    '5.0,a,4,GPT-4,9,2,11,"Conversation, log"\n7.0,,1,GPT-4,0,0,0,API log\n9.0,a,2,GPT-4,9,2,11,Conversation log\n',
    "mooncake": jsonl(
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 2]},
    ),
    "timed_trace": jsonl(
        {"timestamp": 0.5, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0.25, "input_length": 32, "output_length": 1, "hash_ids": [0, 1]},
    ),
    "aiperf": jsonl(
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "a", "delay": 10.5, "input_length": 700, "output_length": 5},
        {"input_length": 7, "output_length": 5},
    ),
    "bailian": jsonl(
        *(
            {"chat_id": i, "parent_chat_id": p, "timestamp": i / 2, "input_length": 16, "output_length": 2,
             "type": "text", "turn": 1, "hash_ids": [i]}
            for i, p in ((1, -1), (2, 1), (3, 1), (4, 9))
        )
    ),
    "ragpulse": jsonl(
        {"timestamp": "8", "input_length": 31, "output_length": 4, "hash_ids": CHUNKS, "session_id": "s"},
        {"timestamp": "9", "input_length": 31, "output_length": 4, "hash_ids": CHUNKS, "session_id": "s"},
    ),
    "claude_code": jsonl(
        {"id": "a", "block_size": 64, "tool_tokens": 64, "system_tokens": 9,
         "requests": [ASK, AGENT, ASK | {"t": 60.0}]},
        {"id": "b", "block_size": 64, "tool_tokens": 64, "system_tokens": 9, "requests": [ASK | {"out": 0}, ASK]},
    ),
    "table": jsonl(
        {"arrival_s": 0.5, "input_tokens": 30, "output_tokens": 2, "max_tokens": 3, "session": "a", "turn": 0,
         "think_s": 0, "class": "chat", "patience_s": 3.5, "samples": 2, "block_ids": [1, 2], "block_tokens": 16,
         "blocks_chained": True, "provenance": json.dumps({"source": "x", "notes": [], "dropped": {}})},
        {"arrival_s": 1.5, "input_tokens": 30, "output_tokens": 2, "max_tokens": 3, "session": "a", "turn": 1,
         "think_s": 0.25, "class": "code", "block_ids": [1], "block_tokens": 16, "blocks_chained": True},
    ),
}
# fmt: on
assert set(GOOD) == set(READERS)


def outcome(path: Path, format: str | None, options: ReadOptions | None = None) -> Trace | str:
    """A trace, whose numbers can be taken, or what is wrong with the file; anything else fails the test."""
    try:
        trace = read_trace(path, format, options)
    except ServecastError as error:
        return str(error)
    assert len(trace) >= 1
    assert trace.arrival_s[0] == 0
    json.dumps(describe(trace, lru_blocks=(1,)), allow_nan=False)
    return trace


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_recognised(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t"
    path.write_text(GOOD[name])
    trace = outcome(path, None)
    assert isinstance(trace, Trace)
    assert f"format {name} " in trace.notes[0]
    again = outcome(path, name)
    assert isinstance(again, Trace)
    assert again.notes == trace.notes[1:]
    path.write_bytes(gzip.compress(GOOD[name].encode()))
    packed = outcome(path, None)
    assert isinstance(packed, Trace)
    assert packed.prompt_tokens.tolist() == trace.prompt_tokens.tolist()


@settings(max_examples=200, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from(list(GOOD)), st.sampled_from([None, *READERS]), st.booleans())
def test_damaged_bytes(tmp_path: Path, data: st.DataObject, name: str, format: str | None, packed: bool) -> None:
    """Truncated, overwritten, with noise at the end, two formats in one file; also inside gzip."""
    content = bytearray(GOOD[name].encode())
    if data.draw(st.booleans()):
        content += GOOD[data.draw(st.sampled_from(list(GOOD)))].encode()
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=12))
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(bytes(content)) if packed else bytes(content))
    outcome(path, name if format is None and data.draw(st.booleans()) else format)


@settings(max_examples=200, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from(list(GOOD)), st.booleans(), st.randoms(use_true_random=False))
def test_wrong_values(tmp_path: Path, data: st.DataObject, name: str, named: bool, rng: random.Random) -> None:
    """Values of other types, huge ones, missing and shuffled keys, rows in another order, no header."""
    path = tmp_path / "t"
    lines = GOOD[name].splitlines()
    if lines[0].startswith("{"):
        rows = [json.loads(line) for line in lines]
        for _ in range(data.draw(st.integers(1, 3))):
            _spoil(data, data.draw(st.sampled_from(rows)))
        rng.shuffle(rows)
        shuffled = [dict(rng.sample(list(row.items()), len(row))) for row in rows]
        lines = [json.dumps(row) for row in shuffled]
    else:
        cells = [line.split(",") for line in lines]
        row = data.draw(st.sampled_from(cells[1:]))
        wrong = data.draw(st.sampled_from(WRONG))
        row[data.draw(st.integers(0, len(row) - 1))] = "" if wrong is None else str(wrong)
        body = cells[1:]
        rng.shuffle(body)
        lines = [",".join(row) for row in (body if data.draw(st.booleans()) else [cells[0], *body])]
    path.write_text("\n".join(lines))
    outcome(path, name if named else None)


def _spoil(data: st.DataObject, value: Any) -> None:
    """Change, or take away, something somewhere inside an object or a list."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if isinstance(value[key], dict | list) and value[key] and data.draw(st.booleans()):
        _spoil(data, value[key])
    elif data.draw(st.booleans()):
        value[key] = copy.deepcopy(data.draw(st.sampled_from(WRONG)))  # it may be spoiled in turn
    else:
        del value[key]


@settings(max_examples=80, deadline=None, suppress_health_check=FOLDER_ONCE)
@given(st.data(), st.sampled_from(list(GOOD)), st.integers(1, 400))
def test_batches_change_nothing(tmp_path: Path, data: st.DataObject, name: str, size: int) -> None:
    """Blank lines, quotes over lines and mistakes anywhere: the same trace, or error, for any size of a batch."""
    lines = GOOD[name].splitlines()
    for _ in range(data.draw(st.integers(0, 6))):
        more = ["", "", lines[-1], lines[-1], "{}", '"', "x", 'a,"b\nc",1', lines[0]]
        lines.insert(data.draw(st.integers(1, len(lines))), data.draw(st.sampled_from(more)))
    path = tmp_path / "t"
    path.write_text("\n".join(lines) + "\n" * data.draw(st.integers(0, 2)))
    whole = outcome(path, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workloads.readers.chunks.CHUNK_BYTES", size)
        batches = outcome(path, name)
    if isinstance(whole, Trace) and isinstance(batches, Trace):
        assert np.array_equal(whole.arrival_s, batches.arrival_s)
        assert np.array_equal(whole.output_tokens, batches.output_tokens)
        assert (whole.dropped, whole.notes) == (batches.dropped, batches.notes)
        if whole.prefix is not None and batches.prefix is not None:
            assert np.array_equal(whole.prefix.ids, batches.prefix.ids)
    elif "not readable as csv" in str(whole):
        assert "not readable as csv" in str(batches)  # which of two broken rows is named first may differ
    else:
        assert whole == batches


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "options",
    [ReadOptions(1), ReadOptions(512), ReadOptions(spread_s=9.5), ReadOptions(shared_prefix=True)],
)
def test_options_with_every_format(tmp_path: Path, name: str, options: ReadOptions) -> None:
    path = tmp_path / "t"
    path.write_text(GOOD[name])
    outcome(path, name, options)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}", b"{}\n{}\n", b"[]", b"null\n", b"\xff\xfe\0", b",\n,\n", b"a,b\n"]
)
def test_nearly_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    assert isinstance(outcome(path, name), str)
    path.write_bytes(GOOD[name].encode()[: GOOD[name].index("\n") + 1] if name in ("azure", "burstgpt") else b"")
    assert isinstance(outcome(path, name), str)


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(GOOD["claude_code"])
    options = ReadOptions(spread_s=100, shared_prefix=True, seed=7)
    one, two = outcome(path, None, options), outcome(path, None, options)
    assert isinstance(one, Trace)
    assert isinstance(two, Trace)
    assert one.arrival_s.tobytes() == two.arrival_s.tobytes()
