"""Claude Code sessions as kv-cache-tester records them: JSON of one session a line, one session a file, or a folder.

A session: `id,block_size,hash_id_scope,tool_tokens,system_tokens,requests`; a request: `t` (seconds from the session's
start, whole), `in`, `out`, `hash_ids` (full blocks only), `think_time` (from the end of the answer before), `api_time`.
Sessions begin at 0 (spread_s: at random times). Ids restart in each session: they are made unique here, so sessions
share nothing unless shared_prefix lets those with equal tool schema and system prompt share these blocks. A subagent's
requests are a session of their own: its `t` is when it ended, `duration_ms` how long it ran, the times inside count
from its start, and the main session's next think time covers it. Source: github.com/callanjfox/kv-cache-tester.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servecast.errors import ServecastError
from workloads.chains import follow, hand_on
from workloads.prefix import Prefix
from workloads.readers.clean import in_order
from workloads.readers.columns import SHOWN
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.readers.starts import starts
from workloads.trace import MAX_TIME_S, MAX_TOKENS, Ints, Trace, Turns

OPTIONS: tuple[str, ...] = ("spread_s", "shared_prefix")
BLOCK_TOKENS = 64
MAX_ID = 2**40


def lacks(file: TraceFile) -> list[str]:
    """What the first session lacks to be of this format, in words; empty when it is."""
    problems = missing(file, "id", "requests")
    if not problems and not isinstance(file.first["requests"], list):
        problems.append("'requests' is not a list")
    return problems


class _Sessions:
    """What is read, request by request. Positions of lists are requests in file order."""

    def __init__(self) -> None:
        self.start: list[int] = []  # which session's start counts
        self.key: list[int] = []  # which chain of turns it belongs to
        self.t_s: list[float] = []
        self.think_s: list[float] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.ids: list[Ints] = []
        self.block_tokens: int | None = None
        self.next_id = 0
        self.shared: dict[tuple[int, int, int], int] = {}
        self.sessions = self.chains = self.subagents = self.empty = 0
        self.guessed = self.shared_blocks = 0
        self.wrong: dict[str, tuple[int, list[str]]] = {}

    def mistake(self, what: str, row: str) -> None:
        count, shown = self.wrong.get(what, (0, []))
        self.wrong[what] = (count + 1, [*shown, row] if len(shown) < SHOWN else shown)


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file or folder. Raises ServecastError by row (session) and key."""
    found = _Sessions()
    for row, session in file.sessions():
        if isinstance(session, str):
            found.mistake(session, row)
        else:
            _add(found, session, row, options)
    if found.wrong:
        wrong = found.wrong.items()
        raise ServecastError(*(said for what, (count, shown) in wrong for said in file.mistakes(what, shown, count)))
    if not found.t_s:
        raise ServecastError(f"{file.path}: no requests: {found.sessions:,} sessions without any")
    return _trace(file, found, options)


def _trace(file: TraceFile, found: _Sessions, options: ReadOptions) -> Trace:
    prompt, output = np.array(found.prompt), np.array(found.output)
    key, begin = np.array(found.key), starts(found.sessions, options)
    reasons = {"prompt_tokens is 0": prompt == 0, "output_tokens is 0": (prompt > 0) & (output == 0)}
    kept = (prompt > 0) & (output > 0)
    dropped = {reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()}
    if not kept.any():
        raise ServecastError(f"{file.path}: no requests are left; each of {kept.size:,} has 0 prompt or output tokens")
    think_s = hand_on(np.array(found.think_s), key, kept)
    t_s = begin[np.array(found.start)] + np.array(found.t_s)
    rows, _ = in_order(t_s, kept)  # sessions stand one after the other in the file: sorting is expected
    previous = follow(key[rows])
    offsets = np.concatenate([[0], np.cumsum([ids.size for ids in found.ids])])
    prefix = Prefix(offsets, np.concatenate(found.ids), found.block_tokens or BLOCK_TOKENS).rows(rows)
    return Trace(
        arrival_s=t_s[rows] - t_s[rows[0]],
        prompt_tokens=prompt[rows],
        output_tokens=output[rows],
        max_tokens=output[rows],
        source=str(file.path),
        prefix=prefix,
        turns=Turns(previous, np.where(previous >= 0, think_s[rows], 0.0)),
        dropped=dropped,
        notes=tuple(_notes(found, options)),
    )


def _notes(found: _Sessions, options: ReadOptions) -> list[str]:
    where = "all begin at 0 s, as each file or line counts from its own start (spread: random times)"
    if options.spread_s:
        where = f"spread over {options.spread_s:g} s (seed {options.seed})"
    also = f" and {found.subagents:,} subagents as sessions of their own" if found.subagents else ""
    notes = [f"{found.sessions:,} sessions{also}; they {where}"]
    if found.empty:
        notes.append(f"{found.empty:,} of the sessions have no requests; they are left out")
    if options.shared_prefix:
        notes.append(
            f"sessions share {found.shared_blocks:,} blocks of tool schemas and system prompts where these have equal "
            "lengths"
        )
    else:
        notes.append("sessions share no blocks with each other (shared_prefix: tool schemas and system prompts)")
    if found.guessed:
        notes.append(f"{found.guessed:,} requests have no think_time; it was taken from the times between requests")
    return notes


def _add(found: _Sessions, session: Mapping[str, Any], row: str, options: ReadOptions) -> None:
    requests, size = session.get("requests"), session.get("block_size", BLOCK_TOKENS)
    if not isinstance(requests, list):
        return found.mistake("no Claude Code session: 'requests' is no list", row)
    if not _whole(size, 1, 2**20) or found.block_tokens not in (None, size):
        return found.mistake(f"'block_size' is {size!r}, where one size of 1 or more is needed for all sessions", row)
    found.block_tokens = size
    lead = _lead(found, session, requests, size) if options.shared_prefix else {}
    first_id, largest = found.next_id, -1
    agents: list[list[tuple[float, Mapping[str, Any]]]] = [[]]
    for entry in requests:
        if not isinstance(entry, dict):
            return found.mistake("a request is no object", row)
        if isinstance(entry.get("requests"), list):
            end, length = entry.get("t", 0), entry.get("duration_ms", 0)
            if not _time(end) or not _time(length) or not all(isinstance(r, dict) for r in entry["requests"]):
                return found.mistake("a subagent has a 't', 'duration_ms' or request that is not understood", row)
            agents.append([(max(0.0, end - length / 1e3), r) for r in entry["requests"]])
        else:
            agents[0].append((0.0, entry))
    for number, agent in enumerate(agents):
        last = end_s = 0.0
        for offset_s, request in agent:
            if problem := _problem(request, size):
                return found.mistake(problem, row)
            # A request's own time is whole seconds and may stand a little before the one above: turns keep their order.
            last = max(last, offset_s + request["t"])
            think = request.get("think_time")
            if think is None:
                found.guessed += 1
                think = max(0.0, last - end_s)
            end_s = last + (request.get("api_time") or 0.0)
            ids = request.get("hash_ids") or []
            local = np.array(ids, dtype=np.int64)
            largest = max(largest, int(local.max(initial=-1)))
            block_ids = local + first_id
            if lead:
                block_ids[: len(lead)] = [lead.get(i, i + first_id) for i in ids[: len(lead)]]
            found.ids.append(block_ids)
            found.start.append(found.sessions)
            found.key.append(found.chains)
            found.t_s.append(last)
            found.think_s.append(think)
            found.prompt.append(request["in"])
            found.output.append(request["out"])
        found.chains += 1
        found.subagents += number > 0
    found.next_id = max(found.next_id, first_id + largest + 1)
    found.sessions += 1
    found.empty += not any(agents)


def _lead(found: _Sessions, session: Mapping[str, Any], requests: list[Any], size: int) -> dict[int, int]:
    """Local ids of the session's tool and system blocks -> ids that sessions with equally long ones share."""
    tools, system = session.get("tool_tokens", 0), session.get("system_tokens", 0)
    first = next((r for r in requests if isinstance(r, dict) and isinstance(r.get("hash_ids"), list)), {})
    if not (_whole(tools, 0, MAX_TOKENS) and _whole(system, 0, MAX_TOKENS) and _ids(first.get("hash_ids", []))):
        return {}
    lead = {}
    for place, local in enumerate(first.get("hash_ids", [])[: (tools + system) // size]):
        both = (tools, -1 if place < tools // size else system, place)
        if both not in found.shared:
            found.shared[both] = found.next_id
            found.next_id += 1
        lead[local] = found.shared[both]
    found.shared_blocks = len(found.shared)
    return lead


def _problem(request: Mapping[str, Any], size: int) -> str:
    """What is wrong with a request, in words, or an empty string."""
    for name in ("in", "out"):
        if not _whole(request.get(name), 0, MAX_TOKENS):
            return f"{name!r} is not a whole number from 0 to {MAX_TOKENS}"
    if not _time(request.get("t")):
        return f"'t' is not a number of seconds from 0 to {MAX_TIME_S:g}"
    for name in ("think_time", "api_time"):
        if request.get(name) is not None and not _time(request[name]):
            return f"{name!r} is not a number of seconds from 0 to {MAX_TIME_S:g}"
    ids = request.get("hash_ids")
    if not isinstance(ids, list | None) or not _ids(ids or []):
        return f"'hash_ids' is not a list of whole numbers from 0 to {MAX_ID}"
    if len(ids or ()) > -(-request["in"] // size):
        return f"'hash_ids' holds more blocks of {size} tokens than 'in' has"
    return ""


def _ids(ids: list[Any]) -> bool:
    try:
        array = np.array(ids)
    except ValueError:  # lists in lists
        return False
    return not ids or (array.ndim == 1 and array.dtype.kind == "i" and array.min() >= 0 and array.max() <= MAX_ID)


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_TIME_S  # type: ignore[operator]
