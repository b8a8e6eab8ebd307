"""What may make a forecast and a measured run two different things: another model, another GPU, another load.

Names are spelled differently by everybody, so a difference is a warning and no mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.hardware import gpu_ids, load_gpu
from reports.validation.compared import itl_is_known
from reports.words import percent, quantity
from reports.words import requests as counted

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from servecast.setup import Setup
    from servecast.validation.replay import Replay

QUANTIZED = frozenset(("fp8", "fp4", "nvfp4", "mxfp4", "awq", "gptq", "int4", "int8", "w4a16", "w8a8", "4bit", "8bit"))
SAME = 0.05
"""Lengths and rates that differ by less are taken to be the same: they are drawn."""
FEW = 100


def warnings_of(run: MeasuredRun, replay: Replay) -> list[str]:
    """Everything to know before the errors are read, each a sentence without its stop."""
    found = [*_model(run, replay.setup), *_gpu(run, replay.setup)]
    if replay.rows is None or replay.setup.requests.concurrency is not None:
        found += _sending(run, replay.setup)
    if replay.rows is None:
        found += _load(run, replay.setup)
    elif len(replay.rows) < FEW:
        found.append(f"of {counted(len(replay.rows))}, p99 is hardly more than the slowest one")
    if not itl_is_known(run):
        found.append("several tokens share a chunk in the file: its ITL is no time between tokens, and is left out")
    return [*found, *replay.notes]


def _model(run: MeasuredRun, setup: Setup) -> Iterator[str]:
    if run.model is None:
        return
    theirs, ours = _words(run.model), _words(setup.pool.model.name)
    if not (theirs <= ours or ours <= theirs):
        yield f"the file says that {run.model} was served; the scenario's model is {setup.pool.model.name}"
        return
    weights = set(re.split(r"[^a-z0-9]+", run.model.lower())) & QUANTIZED
    if weights and not setup.pool.model.quantized:
        yield f"by its name {run.model} is quantised ({', '.join(sorted(weights))}), and the scenario's weights are not"


def _words(name: str) -> set[str]:
    """The words and numbers of a model's name, without who publishes it and how its weights are stored."""
    parts = re.split(r"[-_\s:]+", name.lower().replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = " ".join(part for part in parts if part not in QUANTIZED)
    return set(re.findall(r"[a-z]+|\d+(?:\.\d+)?", plain))


def _gpu(run: MeasuredRun, setup: Setup) -> Iterator[str]:
    """Result files say no GPU, but people name files and folders after it."""
    path = Path(run.source.partition(": ")[0])
    named = [gpu for part in path.parts[-2:] for gpu in gpu_ids() if gpu != "cpu" and _plain(gpu) in _joined(part)]
    if named and not any(_plain(gpu) == _plain(setup.pool.gpu.id) for gpu in named):
        longest = load_gpu(max(named, key=len)).name
        yield f"the file's name speaks of {longest}; the scenario runs on {setup.pool.gpu.name}"


def _plain(gpu_id: str) -> str:
    return re.sub(r"-(sxm|pcie|nvl).*", "", gpu_id).replace("-", "")


def _joined(text: str) -> set[str]:
    """The words of a name, and those that two or three neighbours make together."""
    words = re.split(r"[^a-z0-9]+", text.lower())
    return {"".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words))}


def _sending(run: MeasuredRun, setup: Setup) -> Iterator[str]:
    """How the measured requests were sent, against how the scenario sends them."""
    clients = setup.requests.concurrency
    if run.concurrency is not None and clients != round(run.concurrency):
        theirs = "do not wait for each other (workload.closed_loop)"
        theirs = theirs if clients is None else f"come from {clients:,} clients"
        yield f"the file says that at most {run.concurrency:,.0f} requests ran at a time; the scenario's {theirs}"
    if run.rate is None:
        return
    if clients is not None:
        yield f"the file says a rate of {quantity(run.rate)} requests/s; the scenario's clients send as answers come"
    elif (ours := _rate(setup)) and abs(ours / run.rate - 1) > max(SAME, 3 / len(setup.requests.trace) ** 0.5):
        yield f"the file says a rate of {quantity(run.rate)} requests/s; the scenario sends {quantity(ours)}"


def _rate(setup: Setup) -> float | None:
    """Requests per second; None where they come all at once."""
    arrival_s = setup.requests.trace.arrival_s
    return len(arrival_s) / float(arrival_s[-1]) if arrival_s[-1] > 0 else None


def _load(run: MeasuredRun, setup: Setup) -> Iterator[str]:
    """Counts and lengths of the scenario's own requests against those that were measured."""
    trace, count = setup.requests.trace, run.completed
    if count is None:
        return
    if count != len(trace):
        fewer = "fewer" if count < len(trace) else "more"
        yield f"{counted(count)} were measured, {fewer} than the scenario's {len(trace):,} (workload.num_requests)"
    for what, total, tokens in (
        ("prompts", "total_input_tokens", trace.prompt_tokens),
        ("answers", "total_output_tokens", trace.output_tokens),
    ):
        measured, ours = run.summary.get(total, 0.0) / max(count, 1), float(tokens.mean())
        if measured > 0 and abs(ours / measured - 1) > SAME:
            longer = "longer" if ours > measured else "shorter"
            yield (
                f"the scenario's {what} are {percent(abs(ours / measured - 1))} {longer} on average than those "
                f"measured ({quantity(ours)} against {quantity(measured)} tokens)"
            )
