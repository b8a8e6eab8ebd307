"""Requests that belong together: chats and agents, whose every turn repeats what was said before; and RAG.

One function a kind of session and one line in `SESSIONS`; its keyword-only parameters are checked like those of arrival
processes. n is a number of sessions. The trace says which request follows which answer, after which time (`Turns`), and
what every prompt begins with (`Prefix`): blocks that hold only the system prompt and tools are the same for all, later
ones are those of the session. A last, partly filled block is left out. It knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.generate import stream
from workloads.kinds import KindOf, Spec, call_kind, check_parameters, parameters
from workloads.lengths import LENGTHS
from workloads.parameters import BlockTokens, CountOrNone, Fraction, Tokens, TokensOrNone
from workloads.people import THINK, TURNS
from workloads.rag import ArrivalsOf, LengthsOf, rag, rag_problems
from workloads.said import said_blocks
from workloads.subagents import sub_agents
from workloads.trace import Ints, Trace, Turns

ThinkOf = Annotated[Spec, KindOf(THINK)]
TurnsOf = Annotated[Spec, KindOf(TURNS)]


def chat(
    n: int,
    seed: int,
    *,
    arrivals: ArrivalsOf,
    turns: TurnsOf,
    think: ThinkOf,
    message: LengthsOf,
    answer: LengthsOf,
    system_tokens: TokensOrNone = 0,
    tool_schema_tokens: TokensOrNone = 0,
    history_kept: Fraction = 1.0,
    context: Tokens | None = None,
    block_tokens: BlockTokens = 16,
) -> Trace:
    """n chats, which begin as `arrivals` says. Each turn's prompt is the system prompt, the tool schema, all earlier
    messages and answers, and a new message; it comes `think` after the answer before.

    history_kept: the share of the history's tokens that is left when clients compress it (a summary, say). The history
    is then written anew in each turn, so that prompts get shorter but share only what stands before it.
    context: a session ends before the turn whose prompt and answer would need more tokens than this.
    """
    count = call_kind(TURNS, turns, n, stream(seed, "turns"))
    total = int(count.sum())
    message_tokens = call_kind(LENGTHS, message, total, stream(seed, "message"))
    shared = {"system prompt": system_tokens, "tool schema": tool_schema_tokens}
    source = f"generated: {n:,} chats, {arrivals['kind']} arrivals, seed {seed}"
    return _conversations(
        source, seed, arrivals, think, count, message_tokens, answer, shared, history_kept, context, block_tokens
    )


def agent(
    n: int,
    seed: int,
    *,
    arrivals: ArrivalsOf,
    steps: TurnsOf,
    tool_time: ThinkOf,
    task: LengthsOf,
    tool_result: LengthsOf,
    output: LengthsOf,
    system_tokens: TokensOrNone = 0,
    tools: CountOrNone = 0,
    tokens_per_tool: TokensOrNone = 0,
    history_kept: Fraction = 1.0,
    context: Tokens | None = None,
    block_tokens: BlockTokens = 16,
) -> Trace:
    """n agents at work, which begin as `arrivals` says. The first step's prompt is the system prompt, the schemas of
    `tools` tools and the task; each later one has everything before, the model's output (a tool call) and the tool's
    result, and comes tool_time after that output. history_kept, context: as for `chat`.
    """
    count = call_kind(TURNS, steps, n, stream(seed, "turns"))
    first = np.zeros(int(count.sum()), dtype=bool)
    first[np.cumsum(count) - count] = True
    message_tokens = np.empty(first.size, dtype=np.int64)
    message_tokens[first] = call_kind(LENGTHS, task, n, stream(seed, "task"))
    message_tokens[~first] = call_kind(LENGTHS, tool_result, first.size - n, stream(seed, "tool result"))
    shared = {"system prompt": system_tokens, f"{tools} tools": tools * tokens_per_tool}
    source = f"generated: {n:,} agents, {arrivals['kind']} arrivals, seed {seed}"
    return _conversations(
        source, seed, arrivals, tool_time, count, message_tokens, output, shared, history_kept, context, block_tokens
    )


SESSIONS: dict[str, Callable[..., Trace]] = {
    "chat": chat,
    "rag": rag,
    "agent": agent,
    "sub-agents": sub_agents,
}


def check_sessions(spec: object, where: str) -> list[str]:
    """Every problem of a `{kind: chat, ...}` spec, each beginning with `where` (the key path)."""
    problems = check_parameters(SESSIONS, spec, where)
    if not problems and isinstance(spec, Mapping) and spec["kind"] == "rag":
        problems += rag_problems(spec, where)
    return problems


def generate_sessions(n: int, seed: int, spec: Spec) -> Trace:
    """n sessions of the kind that the spec names. The first k of n sessions are the same for every n. Raises
    ServecastError with every problem.
    """
    problems = check_sessions(spec, "sessions")
    if n < 1:
        problems.append(f"num_sessions: {n} is below 1")
    if problems:
        raise ServecastError(*problems)
    return SESSIONS[spec["kind"]](n, seed, **parameters(SESSIONS, spec))


def _conversations(
    source: str,
    seed: int,
    arrivals: Spec,
    think: Spec,
    count: Ints,
    message: Ints,
    answer: Spec,
    shared: dict[str, int],
    history_kept: float,
    context: int | None,
    block_tokens: int,
) -> Trace:
    """Sessions of count[s] turns; message: tokens of every turn, session after session. shared: what all sessions begin
    with, and its tokens."""
    total, common = message.size, sum(shared.values())
    session = np.repeat(np.arange(count.size), count)
    first = np.cumsum(count) - count
    output = call_kind(LENGTHS, answer, total, stream(seed, "answer"))
    think_s = call_kind(THINK, think, total, stream(seed, "think"))
    think_s[first] = 0.0
    said = np.cumsum(message + output) - message - output
    history = said - said[first][session]
    kept_history = history if history_kept == 1 else np.ceil(history * history_kept).astype(np.int64)
    prompt = common + kept_history + message
    waited = np.cumsum(think_s)
    begins = call_kind(ARRIVALS, arrivals, count.size, stream(seed, "arrivals"))
    arrival_s = begins[session] + waited - waited[first][session]

    # A turn that needs more than the context ends its session, and so do the turns after it.
    too_long = np.zeros(total, dtype=np.int64) if context is None else (prompt + output > context).astype(np.int64)
    over = np.cumsum(too_long)
    fits = over - (over - too_long)[first][session] == 0
    if not fits.any():
        raise ServecastError(f"context: no first turn fits {context} tokens; raise it, or shorten the prompts")
    previous = np.where(np.arange(total) == first[session], -1, np.arange(total) - 1)

    order = np.flatnonzero(fits)
    order = order[np.argsort(arrival_s[order], kind="stable")]  # stable: a turn stays behind the one it follows
    position = np.full(total + 1, -1, dtype=np.int64)  # its last entry is where -1 points
    position[order] = np.arange(order.size)
    prompt, history, kept_history = prompt[order], history[order], kept_history[order]
    owner = session[order] if history_kept == 1 else np.arange(order.size)
    return Trace(
        arrival_s[order],
        prompt,
        output[order],
        output[order],
        source=source,
        prefix=said_blocks(prompt, owner, common, block_tokens),
        turns=Turns(position[previous[order]], think_s[order]),
        dropped={"turns beyond the context": total - order.size} if order.size < total else {},
        notes=(
            _parts(prompt, shared, kept_history, history_kept),
            "arrival times of later turns leave out how long answers take; a replay as sessions does not use them",
        ),
    )


def _parts(prompt: Ints, shared: dict[str, int], history: Ints, history_kept: float) -> str:
    """What the prompts consist of, for people."""
    total, past = int(prompt.sum()), int(history.sum())
    parts = [f"{tokens * prompt.size / total:.1%} {name}" for name, tokens in shared.items() if tokens]
    common = sum(shared.values()) * prompt.size
    if history_kept == 1:
        repeated = f"{past / total:.1%} history, the same as in the turn before" if past else ""
    else:
        repeated = f"{past / total:.1%} compressed history ({history_kept:.0%} is kept), written anew in each turn"
    same = f"{', '.join(parts)} (the same in every session)" if parts else ""
    new = f"{(total - common - past) / total:.1%} new messages"
    return f"{total:,} prompt tokens: {'; '.join(part for part in (same, repeated, new) if part)}"
