"""A scenario given as a mapping, simulated. It knows no data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import servecast
from servecast.run import Result
from servecast.scenario import Scenario


def run(scenario: Mapping[str, Any]) -> Result:
    """The result of a scenario; ServecastError where it cannot be run."""
    return servecast.simulate(Scenario.model_validate({"name": "accuracy", **scenario}))


def closed_loop(clients: int, requests: int, prompt: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a load generator with `clients` requests in flight."""
    return {
        "num_requests": requests,
        "closed_loop": {"concurrency": clients},
        "lengths": {"prompt": dict(prompt), "output": dict(output)},
    }
