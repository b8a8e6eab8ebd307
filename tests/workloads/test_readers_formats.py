"""Each public format: what its quirks become, on a few hand-written rows and, where they are at hand, on real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servecast.errors import ServecastError
from tests.reference import reference
from workloads.chains import sessions
from workloads.readers import read_trace
from workloads.readers.options import ReadOptions
from workloads.trace import Trace

BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(folder: Path, content: str | list[Any], name: str = "t.jsonl") -> Path:
    path = folder / name
    text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(text, encoding="utf-8")
    return path


def said(path: Path, format: str | None = None, options: ReadOptions | None = None) -> str:
    with pytest.raises(ServecastError) as error:
        read_trace(path, format, options)
    return str(error.value)


def previous(trace: Trace) -> list[int]:
    assert trace.turns is not None
    return trace.turns.previous.tolist()


def thinks(trace: Trace) -> list[float]:
    assert trace.turns is not None
    return trace.turns.think_s.tolist()


# -- Azure, multimodal


def test_azure_images_are_counted(tmp_path: Path) -> None:
    rows = "2024-10-15T12:00:00.269Z,0,10,1\n2024-10-15T12:00:01.269Z,3,20,2\n2024-10-15T12:00:02Z,1,30,3\n"
    trace = read_trace(written(tmp_path, "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + rows, "a.csv"))
    assert trace.arrival_s.tolist() == pytest.approx([0, 1, 1.731], abs=1e-9)
    assert "4 images in 2 requests are not modelled; ContextTokens is the prompt" in trace.notes


# -- BurstGPT


def test_burstgpt_drops_failures_and_reads_by_name(tmp_path: Path) -> None:
    rows = "5,GPT-4,10,2,12,API log\n5,ChatGPT,0,0,0,API log\n9,GPT-4,7,0,7,API log\n11,GPT-4,3,4,7,API log\n"
    one = read_trace(written(tmp_path, BURST_1 + rows, "b.csv"))
    assert one.dropped == {"failed (0 response tokens)": 2}
    assert one.arrival_s.tolist() == [0, 6]
    assert one.turns is None
    assert "format burstgpt recognised from the columns Timestamp, Model" in one.notes[0]


def test_burstgpt_sessions(tmp_path: Path) -> None:
    rows = [
        "100.0,a,4,GPT-4,10,2,12,Conversation log",
        "101.0,,,GPT-4,10,2,12,API log",
        "102.0,b,9,GPT-4,10,2,12,Conversation log",
        "103.0,a,0,GPT-4,0,0,0,Conversation log",
        "110.0,a,1,GPT-4,20,2,22,Conversation log",
        "110.0,b,1,GPT-4,20,2,22,Conversation log",
        "111.0,,,GPT-4,10,2,12,API log",
    ]
    trace = read_trace(written(tmp_path, BURST_3 + "\n".join(rows), "b.csv"))
    assert trace.arrival_s.tolist() == [0, 1, 2, 10, 10, 11]
    assert previous(trace) == [-1, -1, -1, 0, 2, -1]
    assert thinks(trace) == [0, 0, 0, 6, 0, 0]
    assert "1 turns were sent before the answer before had ended; their think time is 0 s" in trace.notes
    path = written(tmp_path, BURST_3.replace("Elapsed time", "Elapsed") + rows[0].replace(",4,", ",x,"), "c.csv")
    assert "column 'Elapsed time' is missing (did you mean 'Elapsed'?)" in said(path, "burstgpt")


def test_burstgpt_samples() -> None:
    one = read_trace(reference("traces", "burstgpt", "BurstGPT_1.first400.csv.gz"))
    assert (len(one), one.dropped) == (383, {"failed (0 response tokens)": 17})
    three = read_trace(reference("traces", "burstgpt", "BurstGPT_3.first188.csv.gz"))
    assert (len(three), three.dropped) == (187, {"failed (0 response tokens)": 1})
    assert three.arrival_s[0] == 0
    assert np.unique(sessions(np.array(previous(three)))[0]).size == 76


# -- Mooncake, aiperf, timed traces

MOONCAKE = [
    {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 27482, "input_length": 1025, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"timestamp": 28000, "input_length": 100, "output_length": 0, "hash_ids": [0]},
]


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert trace.arrival_s.tolist() == [0, 27482 / 1000 - 1]
    assert trace.prefix is not None
    assert trace.prefix.ids.tolist() == [0, 1, 0, 1, 2]
    assert (trace.prefix.block_tokens, trace.prefix.chained) == (512, True)
    assert trace.prefix.known_blocks().tolist() == [0, 2]
    assert trace.dropped == {"output_tokens is 0": 1}
    assert "format mooncake (times in milliseconds) recognised" in trace.notes[0]
    assert "blocks of 512 tokens in its first rows tell it from timed_trace" in trace.notes[0]


def test_mooncake_grid_is_said(tmp_path: Path) -> None:
    rows = [MOONCAKE[0] | {"timestamp": 3000 * (i // 5) + i % 2} for i in range(200)]
    assert "grid of 3 s" not in " ".join(read_trace(written(tmp_path, rows[:4])).notes)
    rows = [row | {"timestamp": 3000 * (i // 5)} for i, row in enumerate(rows)]
    assert any(
        "grid of 3 s (40 distinct times for 200 requests)" in n for n in read_trace(written(tmp_path, rows)).notes
    )


def test_times_in_the_wrong_unit_are_suspected(tmp_path: Path) -> None:
    fast = [MOONCAKE[0] | {"timestamp": i} for i in range(100)]
    assert any(
        "if the file is in seconds, scale the rate by 0.001" in n
        for n in read_trace(written(tmp_path, fast[::2] * 3)).notes
    )
    rows = [{"timestamp": 3000 * i, "input_length": 16, "output_length": 2, "hash_ids": [i]} for i in range(20)]
    notes = read_trace(written(tmp_path, rows), "timed_trace").notes
    assert any("if the file is in milliseconds" in note for note in notes)


@pytest.mark.parametrize(
    ("ids", "length", "options", "words"),
    [
        ([0, 1, 2], 600, None, "more blocks of 512 tokens than the prompt has in 1 row: 1 (3 blocks, 600 tokens)"),
        ([0] * 38, 600, None, "; 16 tokens a block would fit: say block_tokens 16"),
        ([0, 1], 600, ReadOptions(block_tokens=16), "blocks of 16 tokens cover 5.33 % of the prompts"),
        ([0, 1], 600, ReadOptions(spread_s=5), "format mooncake has no option spread_s; it understands block_tokens"),
        ([0, 1.5], 600, None, "'hash_ids' is not understood in 1 row: 1 ('[0, 1.5]')"),
        ([0, 10**19], 600, None, "'hash_ids' is not understood in 1 row: 1"),
        ("0, 1", 600, None, "'hash_ids' is not understood in 1 row: 1 ('0, 1')"),
        (None, 600, None, "'hash_ids' is empty in 1 row: 1"),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit(tmp_path: Path, ids: Any, length: int, options: ReadOptions | None, words: str) -> None:
    row = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
    assert words in said(written(tmp_path, [row]), "mooncake", options)


def test_blocks_of_a_part_of_the_prompt_are_said(tmp_path: Path) -> None:
    rows = [MOONCAKE[0] | {"input_length": 10_000, "hash_ids": [0, 1, 2]}, *MOONCAKE[:1] * 5]
    assert any(
        "1 prompts are longer than their blocks of 512 tokens" in n for n in read_trace(written(tmp_path, rows)).notes
    )


def test_timed_trace_is_told_by_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 12.5, "input_length": 40, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 10.25, "input_length": 32, "output_length": 2, "hash_ids": [7, 8]},
    ]
    trace = read_trace(written(tmp_path, rows))
    assert trace.arrival_s.tolist() == [0, 2.25]
    assert trace.prefix is not None
    assert trace.prefix.block_tokens == 16
    assert "format timed_trace (times in seconds) recognised" in trace.notes[0]
    short = written(tmp_path, [rows[1] | {"input_length": 9, "hash_ids": [7]}])
    assert "timed_trace has the same keys, and the blocks of its first rows do not tell" in read_trace(short).notes[0]
    assert read_trace(short, "timed_trace").prefix is not None


def test_aiperf_sessions_and_delays(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 500, "input_length": 512, "output_length": 3, "hash_ids": [1]},
        {"session_id": "b", "timestamp": 900, "input_length": 5, "output_length": 3},
        {"session_id": "a", "delay": 2000, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 250, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 1500, "input_length": 6, "output_length": 3},
        {"timestamp": 9000, "input_length": 6, "output_length": 3},
    ]
    trace = read_trace(written(tmp_path, rows))
    # The turn that is dropped hands its two seconds on.
    assert previous(trace) == [-1, -1, 1, 0, -1]
    assert thinks(trace) == pytest.approx([0, 0, 0.6, 2.25, 0])
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.4, 1.0, 4.25, 8.5])
    assert trace.prefix is not None
    assert np.diff(trace.prefix.offsets).tolist() == [1, 0, 0, 2, 0]
    assert any("1 turns have no delay" in note for note in trace.notes)


def test_aiperf_without_time_stamps(tmp_path: Path) -> None:
    rows = [{"session_id": s, "delay": 1000, "input_length": 5, "output_length": 3} for s in "aabb"]
    trace = read_trace(written(tmp_path, rows))
    assert trace.arrival_s.tolist() == [0, 0, 1, 1]
    assert any("2 sessions and lone requests have no timestamp: they start at 0 s" in note for note in trace.notes)
    spread = read_trace(written(tmp_path, rows), options=ReadOptions(spread_s=100, seed=1))
    again = read_trace(written(tmp_path, rows), options=ReadOptions(spread_s=100, seed=1))
    assert spread.arrival_s.tolist() == again.arrival_s.tolist() != trace.arrival_s.tolist()
    text = [{"session_id": "a", "text_input": "hello", "output_length": 3}]
    assert "key 'input_length' is missing" in said(written(tmp_path, text), "aiperf")


def test_mooncake_files() -> None:
    conversation = read_trace(reference("traces", "mooncake", "conversation_trace.jsonl.gz"))
    assert len(conversation) == 12_031
    assert any("grid of 3 s (1,180 distinct times" in note for note in conversation.notes)
    assert len(read_trace(reference("traces", "mooncake", "synthetic_trace.jsonl.gz"))) == 3_993


# -- Bailian


def chat(number: int, parent: int, at: float, ids: list[int]) -> dict[str, Any]:
    length = 16 * len(ids)
    return {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": length, "output_length": 1,
            "type": "text", "turn": 1, "hash_ids": ids}  # fmt: skip


def test_bailian_chains_and_what_they_cannot_say(tmp_path: Path) -> None:
    rows = [
        chat(10, -1, 0.5, [1]),
        chat(11, -1, 1.0, [5]),
        chat(12, 10, 4.5, [1, 2]),
        chat(13, 10, 5.0, [1, 3]),  # a branch: another turn followed 10 already
        chat(14, 99, 6.0, [8]),  # its parent came before the file begins
        chat(15, 12, 9.5, [1, 2, 4]),
    ]
    trace = read_trace(written(tmp_path, rows))
    assert previous(trace) == [-1, -1, 0, -1, -1, 2]
    assert thinks(trace) == pytest.approx([0, 0, 4, 0, 0, 5])
    assert trace.prefix is not None
    assert trace.prefix.block_tokens == 16
    notes = " ".join(trace.notes)
    assert "format bailian recognised" in notes
    assert "1 turns that follow an answer which another turn followed already (a branch)" in notes
    assert "1 turns whose parent is not in the file" in notes


# -- RAGPulse

PULSE = [
    {"timestamp": "82", "input_length": 31, "output_length": 4, "session_id": "s",
     "hash_ids": {"sys_prompt": [1, 2], "passages_ids": [9], "history": [], "web_search": [], "user_input": [5]}},
    {"timestamp": "90", "input_length": 31, "output_length": 4, "session_id": "s",
     "hash_ids": {"sys_prompt": [1, 2], "passages_ids": [8, 9], "history": [], "web_search": [], "user_input": [6]}},
]  # fmt: skip


def test_ragpulse_says_what_is_shared(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, PULSE))
    assert previous(trace) == [-1, 0]
    assert thinks(trace) == [0, 8]
    assert trace.prefix is None
    notes = " ".join(trace.notes)
    assert "no file 1_sys_prompt.jsonl beside the trace" in notes
    assert (
        "of the chunks, 22.2 % are in a start that an earlier prompt had and 33.3 % in an earlier prompt any" in notes
    )
    bad = [PULSE[0], PULSE[1] | {"hash_ids": {"sys_prompt": ["x"]}}]
    assert "column 'hash_ids' is not understood in 1 row: 2" in said(written(tmp_path, bad))


def test_ragpulse_file() -> None:
    trace = read_trace(reference("traces", "ragpulse", "0_trace.jsonl.gz"))
    assert (len(trace), trace.dropped) == (7_106, {"blank row": 1})
    notes = " ".join(trace.notes)
    assert "of the tokens of all chunks, 31.5 % are in a start that an earlier prompt had and 72.0 % in" in notes
    assert "1 rows are earlier than the row above; sorted" in notes


# -- Claude Code


def turn(t: float, tokens: int, ids: list[int], out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids, **more}


def session(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 64,
            "system_tokens": 70, "requests": list(requests), "totals": {}}  # fmt: skip


ONE = session(
    "one",
    turn(0.0, 200, [1, 2, 3], api_time=2.0, think_time=0.0),
    {"t": 20.0, "type": "subagent", "duration_ms": 15_000,
     "requests": [turn(0.0, 64, [9]), turn(6.0, 128, [9, 10], think_time=3.0)]},
    turn(30.0, 210, [1, 2, 3], out=0, api_time=1.0, think_time=28.0),
    turn(36.0, 260, [1, 2, 3, 4], api_time=1.0, think_time=5.0),
)  # fmt: skip
TWO = session("two", turn(0.0, 190, [1, 2], think_time=0.0), turn(9.0, 192, [1, 2, 7]))


def test_claude_code_sessions(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, [ONE, TWO]))
    assert trace.dropped == {"output_tokens is 0": 1}
    # one, two, one's subagent (it ended at 20 s after 15 s), two's second turn, the subagent's, one's last
    assert trace.arrival_s.tolist() == [0, 0, 5, 9, 11, 36]
    assert trace.prompt_tokens.tolist() == [200, 190, 64, 192, 128, 260]
    assert previous(trace) == [-1, -1, -1, 1, 2, 0]
    assert thinks(trace) == [0, 0, 0, 9, 3, 33]
    assert trace.prefix is not None
    assert trace.prefix.known_blocks().tolist() == [0, 0, 0, 2, 1, 3]
    notes = " ".join(trace.notes)
    assert "2 sessions and 1 subagents as sessions of their own; they all begin at 0 s" in notes
    assert "no blocks with each other" in notes


def test_claude_code_options(tmp_path: Path) -> None:
    path = written(tmp_path, [ONE, TWO])
    shared = read_trace(path, options=ReadOptions(shared_prefix=True))
    assert shared.prefix is not None
    assert shared.prefix.known_blocks().tolist() == [0, 2, 0, 2, 1, 3]  # 134 tokens of tools and system: two blocks
    spread = read_trace(path, options=ReadOptions(spread_s=1000, seed=3))
    starts = spread.arrival_s[np.array(previous(spread)) < 0]
    assert starts.max() > 40
    assert sorted(thinks(spread)) == [0, 0, 0, 3, 9, 33]
    assert "spread over 1000 s (seed 3)" in " ".join(spread.notes)


def test_claude_code_one_session_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(TWO, indent=2), "trace_0001.json")
    assert len(read_trace(path)) == 2
    packed = tmp_path / "trace_0001.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read_trace(packed)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in": -1}, "'in' is not a whole number"),
        ({"out": 1.5}, "'out' is not a whole number"),
        ({"t": "x"}, "'t' is not a number of seconds"),
        ({"think_time": -3}, "'think_time' is not a number of seconds"),
        ({"hash_ids": [1, "x"]}, "'hash_ids' is not a list of whole numbers"),
        ({"hash_ids": [10**30]}, "'hash_ids' is not a list of whole numbers"),
        ({"hash_ids": [1, 2, 3, 4]}, "'hash_ids' holds more blocks of 64 tokens than 'in' has"),
    ],
)
def test_claude_code_mistakes(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    bad = session("bad", turn(0.0, 190, [1, 2]) | change)
    text = said(written(tmp_path, [TWO, bad]))
    assert words in text
    assert "in 1 row: 2" in text


def test_claude_code_slice() -> None:
    trace = read_trace(reference("traces", "kv-cache-tester", "claude_code_traces_0001-0064.jsonl.gz"))
    assert len(trace) + sum(trace.dropped.values()) == 4_232
    assert "61 sessions and 11 subagents as sessions of their own" in " ".join(trace.notes)
    assert trace.prefix is not None
    assert trace.prefix.known_blocks().sum() / trace.prefix.ids.size == pytest.approx(0.950, abs=5e-4)


# -- what shares names


def test_every_format_says_what_it_lacks(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    assert "as format bailian, key 'chat_id' is missing" in said(path, "bailian")
    assert "as format ragpulse, key 'session_id' is missing" in said(path, "ragpulse")
    assert "'session_id' and 'delay' are missing" in said(path, "aiperf")
    assert "as format claude_code, key 'id' is missing" in said(path, "claude_code")
    assert "'hash_ids' is an object, not a list" in said(written(tmp_path, PULSE), "mooncake")
