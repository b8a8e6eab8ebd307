"""Chats, agents and RAG: prompts that repeat what was said, blocks that are really shared, and ready-made mixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.generate import stream
from workloads.kinds import call_kind, check_kind
from workloads.lengths import LENGTHS
from workloads.mixes import generate_mix, load_mix, load_mixes
from workloads.people import THINK, TURNS
from workloads.rag import draw_distinct
from workloads.sessions import check_sessions, generate_sessions
from workloads.trace import Trace

POISSON = {"kind": "poisson", "rate": 0.5}


def lognormal(mean: float) -> dict[str, Any]:
    return {"kind": "lognormal", "mean": mean, "cv": 1.0}


CHAT = {
    "kind": "chat",
    "arrivals": POISSON,
    "turns": {"kind": "geometric", "mean": 4},
    "think": {"kind": "lognormal", "mean": "20s", "cv": 1},
    "message": lognormal(60),
    "answer": lognormal(200),
    "system_tokens": 300,
    "tool_schema_tokens": 110,
}
AGENT = {
    "kind": "agent",
    "arrivals": POISSON,
    "steps": {"kind": "uniform", "low": 1, "high": 9},
    "tool_time": {"kind": "exponential", "mean": "3s"},
    "task": {"kind": "fixed", "tokens": 1000},
    "tool_result": {"kind": "fixed", "tokens": 200},
    "output": {"kind": "fixed", "tokens": 50},
    "system_tokens": 400,
    "tools": 10,
    "tokens_per_tool": 50,
}
RAG = {
    "kind": "rag",
    "arrivals": POISSON,
    "chunks": 5,
    "chunk": {"kind": "uniform", "low": 60, "high": 300},
    "corpus": 200,
    "question": lognormal(30),
    "answer": lognormal(100),
    "system_tokens": 100,
}


def sessions(trace: Trace) -> list[list[int]]:
    """The positions of each session's requests, in order."""
    assert trace.turns is not None
    found: dict[int, list[int]] = {}
    of: dict[int, int] = {}
    for i, before in enumerate(trace.turns.previous.tolist()):
        of[i] = i if before < 0 else of[before]
        found.setdefault(of[i], []).append(i)
    return list(found.values())


def blocks(trace: Trace, i: int) -> list[int]:
    assert trace.prefix is not None
    return trace.prefix.ids[trace.prefix.offsets[i] : trace.prefix.offsets[i + 1]].tolist()


@pytest.mark.parametrize(
    ("registry", "spec", "mean"),
    [
        (THINK, {"kind": "fixed", "time": "0s"}, 0),
        (THINK, {"kind": "exponential", "mean": "1.5min"}, 90),
        (THINK, {"kind": "lognormal", "mean": "10s", "cv": 2}, 10),
        (TURNS, {"kind": "fixed", "turns": 3}, 3),
        (TURNS, {"kind": "uniform", "low": 1, "high": 9}, 5),
        (TURNS, {"kind": "geometric", "mean": 6.5}, 6.5),
        (TURNS, {"kind": "empirical", "values": [1, 9], "weights": [3, 1]}, 3),
    ],
)
def test_turns_and_think_times_have_their_means(registry: Any, spec: dict[str, Any], mean: float) -> None:
    assert check_kind(registry, spec, "x") == []
    drawn = call_kind(registry, spec, 200_000, stream(1, "x"))
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= (1 if registry is TURNS else 0)


def test_a_chats_prompt_is_what_was_said_before_and_a_message() -> None:
    trace = generate_sessions(300, 1, CHAT)
    assert trace.turns is not None
    found = sessions(trace)
    assert len(found) == 300
    assert len(trace) / 300 == pytest.approx(4, rel=0.15)
    messages = []
    for turns in found:
        said = 410
        for j, i in enumerate(turns):
            messages.append(int(trace.prompt_tokens[i]) - said)
            said = int(trace.prompt_tokens[i] + trace.output_tokens[i])
            think = trace.arrival_s[i] - trace.arrival_s[turns[j - 1]] if j else 0
            assert trace.turns.think_s[i] == pytest.approx(think, abs=1e-6)
    assert min(messages) >= 1
    assert np.mean(messages) == pytest.approx(60, rel=0.1)
    starts = [trace.arrival_s[turns[0]] for turns in found]
    assert np.allclose(starts, call_kind(ARRIVALS, POISSON, 300, stream(1, "arrivals")))


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 512])
def test_only_full_blocks_of_shared_content_are_shared(block_tokens: int) -> None:
    trace = generate_sessions(40, 2, {**CHAT, "block_tokens": block_tokens})
    everyones = 410 // block_tokens
    owner: dict[int, int] = {}
    for s, turns in enumerate(sessions(trace)):
        before: list[int] = []
        for i in turns:
            mine = blocks(trace, i)
            assert len(mine) == trace.prompt_tokens[i] // block_tokens
            assert mine[: len(before)] == before
            assert mine[:everyones] == list(range(everyones))
            assert all(owner.setdefault(block, s) == s for block in mine[everyones:])
            before = mine
    assert set(owner).isdisjoint(range(everyones))


def test_compressed_history_makes_shorter_prompts_that_share_less() -> None:
    whole, half, none = (generate_sessions(100, 1, {**CHAT, "history_kept": kept}) for kept in (1.0, 0.5, 0.0))
    assert whole.prompt_tokens.sum() > half.prompt_tokens.sum() > none.prompt_tokens.sum()
    assert whole.output_tokens.tolist() == half.output_tokens.tolist() == none.output_tokens.tolist()
    assert whole.prefix is not None
    assert half.prefix is not None
    shared = 410 // 16
    assert half.prefix.known_blocks()[1:].tolist() == [shared] * (len(half) - 1)
    assert (whole.prefix.known_blocks() > shared).any()
    history = whole.prompt_tokens - none.prompt_tokens
    assert (half.prompt_tokens - none.prompt_tokens == -(-history // 2)).all()
    assert "compressed history (50% is kept), written anew" in half.notes[0]
    assert "history, the same as in the turn before" in whole.notes[0]


def test_notes_say_what_the_prompts_consist_of() -> None:
    trace = generate_sessions(50, 1, {**AGENT, "steps": {"kind": "fixed", "turns": 3}})
    assert trace.prompt_tokens[[s[0] for s in sessions(trace)]].tolist() == [1900] * 50
    total = 1900 + 2150 + 2400
    assert trace.prompt_tokens.sum() == 50 * total
    said = (
        f"{50 * total:,} prompt tokens: {1200 / total:.1%} system prompt, {1500 / total:.1%} 10 tools (the same in "
        f"every session); {2350 / total:.1%} history, the same as in the turn before; {1400 / total:.1%} new messages"
    )
    assert trace.notes[0] == said


def test_fewer_tools_change_the_prompts_and_nothing_else() -> None:
    many, few = generate_sessions(50, 1, AGENT), generate_sessions(50, 1, {**AGENT, "tools": 2})
    assert set((many.prompt_tokens - few.prompt_tokens).tolist()) == {400}
    assert many.arrival_s.tobytes() == few.arrival_s.tobytes()
    assert many.output_tokens.tobytes() == few.output_tokens.tobytes()


def test_a_context_ends_sessions_and_counts_what_is_left_out() -> None:
    free, tight = generate_sessions(200, 1, CHAT), generate_sessions(200, 1, {**CHAT, "context": 1500})
    assert (tight.prompt_tokens + tight.output_tokens).max() <= 1500
    assert tight.dropped == {"turns beyond the context": len(free) - len(tight)}
    firsts = Counter(len(s) for s in sessions(tight))
    assert sum(firsts.values()) == 200 - sum(
        free.prompt_tokens[s[0]] + free.output_tokens[s[0]] > 1500 for s in sessions(free)
    )
    with pytest.raises(ServecastError, match="context: no first turn fits 100 tokens"):
        generate_sessions(5, 1, {**CHAT, "context": 100})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**40),
    st.integers(1, 12),
    st.integers(0, 12),
    st.sampled_from([CHAT, {**CHAT, "history_kept": 0.3}, AGENT, RAG, {**RAG, "order": "sorted"}]),
    st.sampled_from([POISSON, {"kind": "all-at-once"}, {"kind": "gamma", "rate": 2, "cv": 3}]),
)
def test_sessions_are_the_same_again_and_for_more_of_them(
    seed: int, n: int, more: int, spec: dict[str, Any], arrivals: dict[str, Any]
) -> None:
    spec = {**spec, "arrivals": arrivals}
    short, again, long = (generate_sessions(size, seed, spec) for size in (n, n, n + more))
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert getattr(short, name).tobytes() == getattr(again, name).tobytes()
    assert short.prefix is not None
    assert again.prefix is not None
    assert short.prefix.ids.tobytes() == again.prefix.ids.tobytes()
    assert len(short.prefix) == len(short)
    assert (np.diff(short.prefix.offsets) == short.prompt_tokens // 16).all()
    few = Counter(
        zip(short.arrival_s.tolist(), short.prompt_tokens.tolist(), short.output_tokens.tolist(), strict=True)
    )
    many = Counter(zip(long.arrival_s.tolist(), long.prompt_tokens.tolist(), long.output_tokens.tolist(), strict=True))
    assert not few - many


def test_rag_prompts_share_what_stands_in_the_same_order() -> None:
    """Against a naive model: a block's content is every token before its end, and a chunk's tokens are its own."""
    for order in ("relevance", "sorted"):
        trace = generate_sessions(300, 1, {**RAG, "order": order, "zipf": 2.0})
        size = call_kind(LENGTHS, RAG["chunk"], 200, stream(1, "corpus"))  # type: ignore[arg-type]
        popularity = np.arange(1, 201.0) ** -2.0
        drawn = draw_distinct(300, 5, popularity, stream(1, "retrieval"), stream(1, "more retrieval"))
        content: dict[tuple[Any, ...], int] = {}
        for i, chunks in enumerate(np.sort(drawn, axis=1) if order == "sorted" else drawn):
            parts = [("system", 100), *((int(c), int(size[c])) for c in chunks)]
            end = np.cumsum([tokens for _, tokens in parts])
            asked = int(trace.prompt_tokens[i] - end[-1])
            assert asked >= 1
            mine = blocks(trace, i)
            for j, block in enumerate(mine):
                needed = int(np.searchsorted(end, (j + 1) * 16))  # the part in which the block ends
                key = (j, *(name for name, _ in parts[: needed + 1]), *([("asked", i)] if needed == len(parts) else []))
                assert content.setdefault(key, block) == block
        assert len(set(content.values())) == len(content)


def test_sorted_chunks_share_more_and_the_notes_say_so() -> None:
    spec = {**RAG, "zipf": 1.5, "corpus": 1000}
    by_relevance, by_place = (generate_sessions(500, 1, {**spec, "order": order}) for order in ("relevance", "sorted"))
    assert by_relevance.prompt_tokens.tolist() == by_place.prompt_tokens.tolist()
    shares = []
    for trace in (by_relevance, by_place):
        assert trace.prefix is not None
        known = int(trace.prefix.known_blocks().sum()) * 16
        shares.append(known / trace.prompt_tokens.sum())
        assert f"at most {shares[-1]:.1%} of all prompt tokens can be found in a cache" in trace.notes[1]
    assert shares[1] > 1.2 * shares[0]


def test_fewer_chunks_keep_the_first_ones_questions_and_answers() -> None:
    many, few = generate_sessions(100, 1, RAG), generate_sessions(100, 1, {**RAG, "chunks": 2})
    assert many.output_tokens.tolist() == few.output_tokens.tolist()
    assert (many.prompt_tokens > few.prompt_tokens).all()


@pytest.mark.parametrize("zipf", [0.0, 1.0, 5.0])
def test_chunks_are_distinct_and_drawn_like_balls_from_an_urn(zipf: float) -> None:
    weights = np.arange(1, 13.0) ** -zipf
    drawn = draw_distinct(20_000, 4, weights, stream(1, "a"), stream(1, "b"))
    assert (np.diff(np.sort(drawn, axis=1), axis=1) > 0).all()
    share = np.bincount(drawn[:, 0], minlength=12) / 20_000
    assert share == pytest.approx(weights / weights.sum(), abs=0.015)
    # the second, given that the first was position 0
    second = np.bincount(drawn[drawn[:, 0] == 0, 1], minlength=12)
    assert second / second.sum() == pytest.approx(np.where(np.arange(12) > 0, weights, 0) / weights[1:].sum(), abs=0.06)
    assert (np.sort(draw_distinct(50, 12, weights, stream(1, "a"), stream(1, "b"))) == np.arange(12)).all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, "s: None is not a mapping with a kind; write for example {kind: chat, ...}; kinds: chat, rag, agent"),
        ({"kind": "chats"}, "unknown kind 'chats' (did you mean 'chat'?)"),
        ({"kind": "chat"}, "s.turns: missing; chat takes arrivals, turns, think"),
        ({**CHAT, "turn": 3}, "s.turn: unknown parameter"),
        ({**CHAT, "turns": 3}, "s.turns: 3 is not a mapping with a kind; write for example {kind: fixed, ...}"),
        ({**CHAT, "turns": {"kind": "uniform", "low": 3, "high": 2}}, "s.turns: low 3 is above high 2"),
        ({**CHAT, "turns": {"kind": "geometric", "mean": 0.5}}, "s.turns.mean: 0.5 is not a number from 1"),
        ({**CHAT, "think": {"kind": "exponential", "mean": 3}}, "s.think.mean: 3 is not a duration"),
        ({**CHAT, "think": {"kind": "fixed", "time": "-1s"}}, "s.think.time: '-1s' is negative"),
        ({**CHAT, "message": {"kind": "fixed", "tokens": 0}}, "s.message.tokens: 0 is not a whole number of tokens"),
        ({**CHAT, "arrivals": {"kind": "poisson"}}, "s.arrivals.rate: missing"),
        ({**CHAT, "system_tokens": -1}, "s.system_tokens: -1 is not a whole number of tokens from 0"),
        ({**CHAT, "history_kept": 1.5}, "s.history_kept: 1.5 is not a number from 0 to 1"),
        ({**CHAT, "block_tokens": 0}, "s.block_tokens: 0 is not"),
        ({**AGENT, "tools": 1.5}, "s.tools: 1.5 is not a whole number from 0"),
        ({**RAG, "chunks": 201}, "s.chunks: 201 different chunks cannot come from a corpus of 200"),
        ({**RAG, "order": "random"}, "s.order: unknown word 'random'; known: relevance, sorted"),
        ({**RAG, "zipf": -1}, "s.zipf: -1 is not a number from 0 to 5"),
    ],
)
def test_misspelt_sessions(spec: Any, said: str) -> None:
    assert said in "\n".join(check_sessions(spec, "s"))


def test_every_problem_at_once() -> None:
    with pytest.raises(ServecastError) as error:
        generate_sessions(0, 1, {**CHAT, "turns": {"kind": "fixd"}, "think": 3, "answer": {"kind": "fixed"}})
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "sessions.turns.kind",
        "sessions.think",
        "sessions.answer.tokens",
        "num_sessions",
    ]


def test_too_much_is_refused_before_memory_runs_out() -> None:
    huge = {"kind": "fixed", "tokens": 10**9}
    with pytest.raises(ServecastError, match="blocks of 1 tokens; at most 200,000,000 are kept"):
        generate_sessions(2, 1, {**CHAT, "message": huge, "block_tokens": 1})
    with pytest.raises(ServecastError, match="blocks of 16 tokens; at most"):
        generate_sessions(5, 1, {**RAG, "question": huge})
    with pytest.raises(ServecastError, match="chunks; at most 100,000,000 are drawn"):
        generate_sessions(10**8, 1, RAG)


@pytest.mark.parametrize("name", list(load_mixes()))
def test_mixes_are_made_and_say_where_they_come_from(name: str) -> None:
    mix = load_mix(name)
    trace = generate_mix(name, 60, 1)
    assert len(trace) == 60 or (mix.sessions and len(trace) >= 60)
    assert trace.source.startswith(f"mix {name}, generated")
    assert mix.source in trace.notes[0]
    assert "assumed" in mix.source or "means of" in mix.source
    assert trace.prompt_tokens.tobytes() == generate_mix(name, 60, 1).prompt_tokens.tobytes()
    if name != "batch":
        slow, fast = generate_mix(name, 60, 1, rate=0.1), generate_mix(name, 60, 1, rate=10.0)
        assert slow.arrival_s[-1] > fast.arrival_s[-1]


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("chat", 100, 2000),
        ("code", 2048, 5000),
        ("summary", 50_000, 500),
        ("legal", 10_000, 1000),
        ("batch", 2590, 290),
    ],
)
def test_mixes_have_the_lengths_of_their_names(name: str, prompt: int, output: int) -> None:
    trace = generate_mix(name, 20_000, 1)
    assert trace.prompt_tokens.mean() == pytest.approx(prompt, rel=0.03)
    assert trace.output_tokens.mean() == pytest.approx(output, rel=0.03)


def test_rag_and_agent_mixes_are_as_described() -> None:
    rag = generate_mix("rag", 300, 1)
    assert rag.prompt_tokens.min() > 21_400
    agent = generate_mix("agent", 20, 1)
    assert agent.turns is not None
    assert agent.prompt_tokens.min() > 13_000
    assert (agent.prompt_tokens + agent.output_tokens).max() <= 131_072


def test_unknown_mixes_and_rates() -> None:
    with pytest.raises(ServecastError, match="unknown mix 'chatt' \\(did you mean 'chat'\\?\\); known: chat, code"):
        generate_mix("chatt", 1, 1)
    with pytest.raises(ServecastError, match="batch arrives all-at-once, so a rate has no meaning"):
        generate_mix("batch", 1, 1, rate=3)
    with pytest.raises(ServecastError, match=r"mix\.rate: -1 is not"):
        generate_mix("chat", 1, 1, rate=-1)
    load_mix("chat", 3.0).workload["arrivals"]["kind"] = "changed"
    assert load_mix("chat").workload["arrivals"] == {"kind": "poisson", "rate": 1}
