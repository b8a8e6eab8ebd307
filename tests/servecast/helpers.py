"""Scenario files made from the quickstart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError
from servecast.scenario import Scenario, load_scenario
from servecast.setup import Setup, set_up

QUICKSTART = Path(str(files("scenarios") / "quickstart.yaml"))
SMALL = {"workload.num_requests": 40}


def fixed(prompt: int, output: int) -> dict[str, Any]:
    """Lengths that are always the same."""
    return {"prompt": {"kind": "fixed", "tokens": prompt}, "output": {"kind": "fixed", "tokens": output}}


def small(**changes: Any) -> Scenario:
    """The quickstart with 40 requests; `workload__lengths=...` changes `workload.lengths`."""
    return load_scenario(QUICKSTART, SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def problems(path: Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> list[str]:
    """What is wrong with a scenario file, as the command line would say it; empty when it can run."""
    try:
        set_up(load_scenario(path, overrides))
    except ServecastError as error:
        found = list(error.problems)
    else:
        return []
    assert found
    assert all(isinstance(problem, str) and problem.strip() for problem in found)
    return found


def setup_of(path: Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> Setup:
    """The scenario with everything resolved."""
    return set_up(load_scenario(path, overrides))
