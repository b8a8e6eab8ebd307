"""Reads recorded steps in the form of two tables, `steps_X.csv` and `requests_X.csv`, and what a `summary.json` beside
them says of the engine.

The engine was synchronous. Chunks do not say whose they are, nor is it known who was preempted, when requests ended or
what was in the prefix cache.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.observe.steps import FACTS, REQUEST_COLUMNS, ObservedRun, observed
from calibrate.rows import read_rows
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl

STEPS: dict[str, type[int] | type[float] | type[str]] = {
    "t_sched": float, "t_exec": float, "t_out": float, "t_end": float, "gen_reqs": int, "gen_kv": int, "running": int,
    "waiting": int, "free_blocks": int, "chunks": str,
}  # fmt: skip
REQUESTS: dict[str, type[int] | type[float] | type[str]] = {
    "input_tokens": int, "output_tokens": int, "sent_s": float, "send_to_scheduler_ms": float,
}  # fmt: skip


def read_tables(path: Path) -> ObservedRun:
    """The run of `steps_X.csv`; see `read_steps`."""
    if not path.name.startswith("steps_"):
        raise ServecastError(f"{path}: a table of steps is called steps_X.csv, with requests_X.csv beside it")
    problems: list[str] = []
    steps = read_rows(path, STEPS, problems, nullable=("chunks",))
    beside = path.with_name(path.name.replace("steps_", "requests_", 1))
    requests = read_rows(beside, REQUESTS, problems, nullable=("sent_s", "send_to_scheduler_ms"))
    facts = _facts(path.parent / "summary.json", problems)
    chunks = None if steps is None else _chunks(steps, problems)
    if steps is not None:
        back = [column for column in ("t_sched", "t_end") if not steps[column].is_sorted()]
        problems += [f"{path}: {column} decreases from one row to the next" for column in back]
    if problems or steps is None or requests is None or chunks is None:
        raise ServecastError(*problems)
    unknown = [None] * len(steps)
    columns: dict[str, Any] = {
        "step": range(len(steps)), "updates": range(len(steps)), "begin_s": steps["t_sched"],
        "planned_s": steps["t_exec"], "update_s": steps["t_out"], "end_s": steps["t_end"], "decodes": steps["gen_reqs"],
        "kv_tokens": steps["gen_kv"], "preempted": unknown, "prefix_hits": unknown, "draft_tokens": [0] * len(steps),
    }  # fmt: skip
    columns |= {name: steps[name] for name in ("running", "waiting", "free_blocks")} | chunks
    never = requests["send_to_scheduler_ms"].is_null() | requests["sent_s"].is_null()
    notes = (f"{never.sum():,} requests never reached the scheduler",) if never.any() else ()
    return observed(path, facts, columns, _requests(requests.filter(~never), steps["t_sched"].to_list()), notes)


def _requests(rows: pl.DataFrame, plans_s: list[float]) -> dict[str, list[Any]]:
    """Columns of the requests; a plan sees whoever arrived by its begin."""
    table: dict[str, list[Any]] = {name: [None] * len(rows) for name in REQUEST_COLUMNS}
    reached = (rows["sent_s"] + rows["send_to_scheduler_ms"] / 1e3).to_list()
    order = sorted(range(len(rows)), key=reached.__getitem__)
    table["request"] = list(range(len(rows)))
    table["reached_s"] = [reached[i] for i in order]
    table["plan"] = [bisect_left(plans_s, at) for at in table["reached_s"]]
    table["prompt_tokens"] = [rows["input_tokens"][i] for i in order]
    table["max_tokens"] = table["output_tokens"] = [rows["output_tokens"][i] for i in order]
    table["priority"], table["kinds"] = [0] * len(rows), [""] * len(rows)
    table["status"] = ["length_capped"] * len(rows)
    return table


def _chunks(steps: pl.DataFrame, problems: list[str]) -> dict[str, list[list[int | None]]]:
    """The chunk columns from `tokens@already_cached` words."""
    tokens: list[list[int | None]] = []
    cached: list[list[int | None]] = []
    for row, file, text in steps.select("row", "file", "chunks").iter_rows():
        words = (text or "").split()
        found = [re.fullmatch(r"([1-9]\d{0,14})@(\d{1,15})", word, re.ASCII) for word in words]
        for word, match in zip(words, found, strict=True):
            if match is None:
                problems.append(f"{file}, row {row}: chunk {word!r}; expected tokens@already_cached, such as 128@0")
        tokens.append([int(match[1]) for match in found if match])
        cached.append([int(match[2]) for match in found if match])
    return {"chunk_request": [[None] * len(t) for t in tokens], "chunk_tokens": tokens, "chunk_cached": cached}


def _facts(path: Path, problems: list[str]) -> dict[str, Any]:
    """What is known of the engine; without a summary, nothing."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["scheduler_config"]
        found = {name: config[name] for name in FACTS if type(config.get(name)) is FACTS[name]}
        return found | ({"scheduling_policy": config["policy"]} if type(config.get("policy")) is str else {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problems.append(f"{path}: has no scheduler_config that can be read")
        return {}
