"""Ready-made workloads by name, each with the source of its figures: `mixes.yaml`. It knows only how to make them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, nearest, one_of
from workloads.arrivals import ARRIVALS
from workloads.generate import generate
from workloads.kinds import check_kind
from workloads.sessions import generate_sessions
from workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class Mix:
    """A ready-made workload. workload: what a scenario would say: `arrivals` and `lengths`, or `sessions`."""

    name: str
    what: str
    source: str
    workload: dict[str, Any]

    @property
    def sessions(self) -> bool:
        """Whether its numbers and rates are of sessions, not of requests."""
        return "sessions" in self.workload


def load_mixes() -> dict[str, Mix]:
    """All mixes by name."""
    return {name: Mix(name, entry["what"], entry["source"], entry["workload"]) for name, entry in _file().items()}


def load_mix(name: str, rate: float | None = None) -> Mix:
    """The mix, with `rate` (requests, for sessions new sessions, per second) in place of its own. The workload is the
    caller's to change. Raises ServecastError for an unknown name, or a rate where none has a meaning.
    """
    mixes = load_mixes()
    if name not in mixes:
        raise ServecastError(f"mix: unknown mix {name!r}{nearest(name, mixes)}; known: {one_of(mixes)}")
    workload = copy.deepcopy(mixes[name].workload)
    if rate is not None:
        arrivals = workload.get("sessions", workload)["arrivals"]
        if "rate" not in arrivals:
            raise ServecastError(f"mix: {name} arrives {arrivals['kind']}, so a rate has no meaning; leave it out")
        arrivals["rate"] = rate
        if problems := check_kind(ARRIVALS, arrivals, "mix"):
            raise ServecastError(*problems)
    return replace(mixes[name], workload=workload)


def generate_mix(name: str, n: int, seed: int, rate: float | None = None) -> Trace:
    """n requests (for `rag` and `agent`: n sessions) of the mix. Where its figures come from is in the notes."""
    mix = load_mix(name, rate)
    if mix.sessions:
        trace = generate_sessions(n, seed, mix.workload["sessions"])
    else:
        lengths = mix.workload["lengths"]
        trace = generate(n, seed, mix.workload["arrivals"], (lengths["prompt"], lengths["output"]))
    return replace(trace, source=f"mix {name}, {trace.source}", notes=(f"{mix.what}. {mix.source}", *trace.notes))


@cache
def _file() -> dict[str, Any]:
    import yaml  # here, so that importing this costs nothing at command line start

    mixes: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return mixes
