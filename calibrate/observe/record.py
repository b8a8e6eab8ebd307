"""Reads the record that `observer.py` writes, line by line; the format is described there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from calibrate.observe.observer import FORMAT
from calibrate.observe.steps import FACTS, ObservedRun, observed
from servecast.errors import ServecastError

MOST_PROBLEMS = 20
"""More than these are counted: a file that is damaged throughout would fill the screen."""
_LARGEST = 2**53

Check = Callable[[object], bool]


def _whole(value: object) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST


def _count(value: object) -> bool:
    return _whole(value) and value >= 0  # type: ignore[operator]


def _number(value: object) -> bool:
    return _whole(value) or (type(value) is float and isfinite(value))


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _chunk(value: object) -> bool:
    return type(value) is list and len(value) == 3 and all(map(_count, value)) and value[1] > 0


_COUNT = (_count, "a count")
_TIME = (_number, "seconds")
_TEXT = (lambda value: type(value) is str, "text")
LINES: dict[str, dict[str, tuple[Check, str]]] = {
    "q": {"request": _COUNT, "plan": _COUNT, "reached_s": _TIME, "prompt_tokens": _COUNT, "max_tokens": _COUNT,
          "noted_s": _TIME, "priority": (_whole, "a whole number"), "kinds": _TEXT},
    "s": {"step": _COUNT, "updates": _COUNT, "begin_s": _TIME, "planned_s": _TIME, "update_s": _TIME, "end_s": _TIME,
          "chunks": (_list_of(_chunk), "a list of [request, new tokens, tokens in KV]"), "decodes": _COUNT,
          "kv_tokens": _COUNT, "running": _COUNT, "waiting": _COUNT, "free_blocks": _COUNT,
          "preempted": (_list_of(_count), "a list of requests"), "prefix_hits": _COUNT, "draft_tokens": _COUNT},
    "f": {"request": _COUNT, "end_plan": _COUNT, "updates": _COUNT, "finished_s": _TIME, "output_tokens": _COUNT,
          "status": _TEXT},
    "e": {"at_s": _TIME, "why": _TEXT},
}  # fmt: skip
"""Letter -> what stands after it, in order, with what each must be."""


def read_record(path: Path) -> ObservedRun:
    """The run of a record; see `read_steps`."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ServecastError(f"{path}: is not text; expected a record of servecast's observer") from None
    facts = _facts(path, lines[0])
    reader = _Reader(path)
    for number, line in enumerate(lines[1:], 2):
        if line or number < len(lines):  # what follows the last line break was cut off, if it is anything
            reader.read(number, line, cut=number == len(lines))
    reader.raise_problems()
    if reader.ended is None and len(reader.finished) < len(reader.columns["q"]["request"]):
        reader.notes.append("the engine was killed at work, or still runs: what was written is used")
    elif reader.ended not in (None, "shutdown", "exit"):
        reader.notes.append(f"the observer stopped before the engine did: {reader.ended}")
    steps = dict(reader.columns["s"])
    chunks = steps.pop("chunks")
    for i, name in enumerate(("chunk_request", "chunk_tokens", "chunk_cached")):
        steps[name] = [[chunk[i] for chunk in step] for step in chunks]
    return observed(path, facts, steps, reader.requests(), tuple(reader.notes))


def _parse(line: str) -> Any:
    """The JSON of a line; None where it is none."""

    def no_number(word: str) -> None:
        raise ValueError(word)

    try:
        return json.loads(line, parse_constant=no_number)
    except (ValueError, RecursionError):
        return None


def _facts(path: Path, line: str) -> Mapping[str, Any]:
    head = _parse(line)
    if not isinstance(head, dict) or type(head.get("servecast_steps")) is not int:
        raise ServecastError(
            f"{path}, line 1: is not the beginning of a record of servecast's observer; "
            "`servecast calibrate observe` says how to make one"
        )
    if head["servecast_steps"] > FORMAT:
        raise ServecastError(
            f"{path}, line 1: format {head['servecast_steps']}, written by a newer observer; this servecast reads "
            f"format {FORMAT}: update it, or use the observer that it writes"
        )
    known = {name: head[name] for name in FACTS if head.get(name) is not None}
    wrong = [
        f"{path}, line 1: {name} is {_shown(value)}; expected {FACTS[name].__name__}"
        for name, value in known.items()
        if not (_number(value) if FACTS[name] is float else type(value) is FACTS[name])
    ]
    if wrong:
        raise ServecastError(*wrong)
    return known


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Reader:
    """Columns of the lines so far, and what is wrong with them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, dict[str, list[Any]]] = {k: {name: [] for name in parts} for k, parts in LINES.items()}
        self.problems: list[str] = []
        self.more = 0
        self.notes: list[str] = []
        self.ended: str | None = None
        self.finished: set[int] = set()

    def read(self, number: int, line: str, cut: bool = False) -> None:
        """Line `number`; `cut`: the last one, which may have been cut off."""
        parsed = _parse(line)
        if cut and parsed is None:
            self.notes.append(f"the record is cut off in line {number}; the lines before it are used")
            return
        wrong = self._wrong(parsed)
        if not wrong:
            letter, *values = parsed
            for column, value in zip(self.columns[letter].values(), values, strict=True):
                column.append(value)
            if letter == "e":
                self.ended = values[1]
        elif len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{self.path}, line {number}: {wrong}")
        else:
            self.more += 1

    def _wrong(self, parsed: Any) -> str:
        """What is wrong with a line, or an empty string."""
        if not isinstance(parsed, list) or not parsed or not isinstance(parsed[0], str) or parsed[0] not in LINES:
            return "is no line of a record"
        parts, values = LINES[parsed[0]], parsed[1:]
        if len(values) != len(parts):
            return f"has {len(values)} values after {parsed[0]!r}; expected {len(parts)}"
        for (name, (check, expected)), value in zip(parts.items(), values, strict=True):
            if not check(value):
                return f"{name} is {_shown(value)}; expected {expected}"
        return str(getattr(self, f"_wrong_{parsed[0]}")(dict(zip(parts, values, strict=True))))

    def _wrong_q(self, line: dict[str, Any]) -> str:
        expected = len(self.columns["q"]["request"])
        return "" if line["request"] == expected else f"request {line['request']}, {expected} is due; are lines gone?"

    def _wrong_s(self, line: dict[str, Any]) -> str:
        steps, requests = self.columns["s"], len(self.columns["q"]["request"])
        if line["step"] != len(steps["step"]):
            return f"step {line['step']}, {len(steps['step'])} is due; are lines gone?"
        if not (steps["updates"] or [0])[-1] <= line["updates"] <= line["step"]:
            return f"updates is {line['updates']}; expected no less than before, and no more than the step"
        if not line["begin_s"] <= line["planned_s"] <= line["update_s"] <= line["end_s"]:
            return "its times are not in order"
        if steps["step"] and (line["begin_s"] < steps["begin_s"][-1] or line["end_s"] < steps["end_s"][-1]):
            return "begins or ends before the step before it does"
        named = [chunk[0] for chunk in line["chunks"]] + line["preempted"]
        strange = [request for request in named if request >= requests]
        return f"names request {strange[0]}, which has not arrived" if strange else ""

    def _wrong_f(self, line: dict[str, Any]) -> str:
        if line["request"] >= len(self.columns["q"]["request"]):
            return f"request {line['request']} is over before it has arrived"
        if line["request"] in self.finished:
            return f"request {line['request']} is over twice"
        self.finished.add(line["request"])
        return ""

    def _wrong_e(self, line: dict[str, Any]) -> str:
        return ""

    def raise_problems(self) -> None:
        """Raise what was found."""
        if self.problems:
            more = (f"{self.path}: {self.more:,} more lines like these",) if self.more else ()
            raise ServecastError(*self.problems, *more)

    def requests(self) -> dict[str, list[Any]]:
        """The columns of the requests table."""
        arrived, over = self.columns["q"], self.columns["f"]
        place = {request: i for i, request in enumerate(over["request"])}
        rows = [place.get(request) for request in arrived["request"]]
        ends = ("end_plan", "finished_s", "output_tokens", "status")
        return arrived | {name: [None if i is None else over[name][i] for i in rows] for name in ends}
