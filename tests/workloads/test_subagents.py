"""Agents with sub-agents: what waits for what, what prompts begin with, and that traces hold it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.merge import merge
from workloads.readers import read_trace
from workloads.sessions import check_sessions, generate_sessions
from workloads.trace import Trace, Turns
from workloads.write import write_trace

SPEC: dict[str, Any] = {
    "kind": "sub-agents",
    "arrivals": {"kind": "poisson", "rate": 0.5},
    "steps": {"kind": "uniform", "low": 1, "high": 5},
    "children": {"kind": "uniform", "low": 1, "high": 4},
    "tool_time": {"kind": "exponential", "mean": "2s"},
    "task": {"kind": "uniform", "low": 100, "high": 900},
    "output": {"kind": "uniform", "low": 10, "high": 90},
    "brief": {"kind": "uniform", "low": 20, "high": 70},
    "child_output": {"kind": "uniform", "low": 30, "high": 300},
    "system_tokens": 500,
}


def agents(trace: Trace) -> dict[int, list[tuple[int, list[int]]]]:
    """Each agent's steps, in order, each with the sub-agents that it spawned: positions in the trace."""
    turns = trace.turns
    assert turns is not None
    assert turns.session is not None
    found: dict[int, list[tuple[int, list[int]]]] = {}
    step_of: dict[int, list[int]] = {}
    for i, (before, session) in enumerate(zip(turns.previous.tolist(), turns.session.tolist(), strict=True)):
        if before >= 0 and turns.session[before] != session:
            step_of[before].append(i)
            continue
        children: list[int] = []
        step_of[i] = children
        found.setdefault(session, []).append((i, children))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 12), st.sampled_from([None, 3000, 1600]), st.sampled_from([1, 16, 50]))
def test_prompts_grow_by_answers_and_share_what_was_said(seed: int, n: int, context: int | None, block: int) -> None:
    spec = {**SPEC, "block_tokens": block} | ({} if context is None else {"context": context})
    trace = generate_sessions(n, seed, spec)
    prompt, output = trace.prompt_tokens, trace.output_tokens
    assert trace.prefix is not None
    rows = [
        trace.prefix.ids[a:b].tolist() for a, b in zip(trace.prefix.offsets, trace.prefix.offsets[1:], strict=False)
    ]
    owner: dict[int, int] = {}
    for agent, steps in agents(trace).items():
        whole = rows[steps[-1][0]]
        assert not steps[-1][1], "the last step spawns nobody"
        for (step, children), after in zip(steps, [*steps[1:], None], strict=True):
            assert rows[step] == whole[: prompt[step] // block]
            assert not [i for i in rows[step][500 // block :] if owner.setdefault(i, agent) != agent]
            if after is not None:
                assert children
                assert prompt[after[0]] == prompt[step] + output[step] + output[children].sum()
            for child in children:
                shared = prompt[step] + output[step]
                assert rows[child] == whole[: shared // block]
                assert 20 <= prompt[child] - shared <= 70
                assert trace.arrival_s[child] >= trace.arrival_s[step]
                assert after is None or trace.arrival_s[after[0]] >= trace.arrival_s[child]
    if context is not None:
        assert (prompt + output).max() <= context
        free = generate_sessions(n, seed, {**SPEC, "block_tokens": block})
        assert sum(trace.dropped.values()) == len(free) - len(trace)
    more = generate_sessions(n + 3, seed, spec)
    mine, theirs = ([prompt_of(t, s) for s in list(agents(t).values())] for t in (trace, more))
    assert all(steps in theirs for steps in mine), "more sessions leave the first ones as they are"


def prompt_of(trace: Trace, steps: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    return [(int(trace.prompt_tokens[i]), sorted(trace.prompt_tokens[c].tolist())) for i, c in steps]


def test_a_step_waits_for_all_that_the_one_before_has_spawned() -> None:
    trace = generate_sessions(20, 3, SPEC)
    assert trace.turns is not None
    joins = trace.turns.joins()
    assert joins is not None
    pairs = set(zip(*(side.tolist() for side in joins), strict=True))
    expected = set()
    for steps in agents(trace).values():
        for (_, children), (after, _) in pairwise(steps):
            expected |= {(after, child) for child in children}
    assert pairs == expected


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_traces_hold_it(tmp_path: Path, ending: str) -> None:
    trace = generate_sessions(10, 5, SPEC)
    write_trace(trace, tmp_path / f"t{ending}")
    again = read_trace(tmp_path / f"t{ending}")
    assert trace.turns is not None
    assert again.turns is not None
    for name in ("previous", "think_s", "goes_on"):
        assert getattr(again.turns, name).tolist() == getattr(trace.turns, name).tolist()
    mine, theirs = trace.turns.joins(), again.turns.joins()
    assert mine is not None
    assert theirs is not None
    assert sorted(zip(*map(np.ndarray.tolist, mine), strict=True)) == sorted(
        zip(*map(np.ndarray.tolist, theirs), strict=True)
    )
    both = merge([("a", trace), ("b", again)])
    assert both.turns is not None
    joined = both.turns.joins()
    assert joined is not None
    assert len(joined[0]) == 2 * len(mine[0])
    part = trace.take(np.arange(0, len(trace), 2), "half")
    assert part.turns is not None, "what is left of it is still consistent"


def test_a_spawned_session_may_have_several_turns(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "arrival_s,input_tokens,output_tokens,session,parent,think_s\n"
        "0,100,10,main,,\n1,110,10,left,main,1\n1,120,10,right,main,1\n2,130,10,left,,1\n9,200,10,main,,2\n"
    )
    turns = read_trace(file).turns
    assert turns is not None
    assert turns.previous.tolist() == [-1, 0, 0, 1, 0]
    joins = turns.joins()
    assert joins is not None
    assert sorted(zip(*map(np.ndarray.tolist, joins), strict=True)) == [(4, 2), (4, 3)]
    file.write_text("arrival_s,input_tokens,output_tokens,session,parent\n0,100,10,left,main\n1,110,10,main,\n")
    with pytest.raises(ServecastError, match="'parent' names a session that has no row above"):
        read_trace(file)


def test_parents_without_sessions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_tokens,output_tokens,parent\n0,100,10,\n1,110,10,main\n")
    with pytest.raises(ServecastError, match=r"t\.csv: column 'parent' .* no column 'session'; add one"):
        read_trace(file)
    file.write_text("arrival_s,input_tokens,output_tokens,parent\n0,100,10,\n1,110,10,\n")
    assert read_trace(file).turns is None, "an empty column says nothing"


def test_mistakes_are_said() -> None:
    (said,) = check_sessions({**SPEC, "childen": 3}, "s")
    assert said.startswith("s.childen: unknown parameter; sub-agents takes arrivals, steps, children, tool_time")
    assert check_sessions({**SPEC, "children": {"kind": "fixed", "turns": 0}}, "s")
    with pytest.raises(ServecastError, match="context: no first step fits 100 tokens"):
        generate_sessions(3, 1, {**SPEC, "context": 100})
    wrong = Turns(np.array([-1, 0, 0]), np.zeros(3), np.array([0, 0, 0]))
    assert wrong.problems(3) == ["turns: two requests follow the same one; a session has one next turn"]
    assert not Turns(np.array([-1, 0, 0]), np.zeros(3), np.array([0, 1, 2])).problems(3)
