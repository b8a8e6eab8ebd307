"""servecast: forecast how an LLM serving deployment will behave.

    import servecast
    scenario = servecast.load_scenario("scenarios/quickstart.yaml", ["cluster.replicas=2"])
    result = servecast.simulate(scenario)
    result.summary()["p99_ttft_ms"]; result.requests; result.steps; result.save("runs/quickstart")

Names are imported when they are first used, so that importing the package, and with it the command line, is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servecast.errors import ServecastError

if TYPE_CHECKING:
    from servecast.comparing.compare import compare
    from servecast.diagnosing.diagnose import diagnose
    from servecast.drawing import figures
    from servecast.explaining.explain import explain
    from servecast.exporting import export
    from servecast.intervals import Intervals, predict_intervals
    from servecast.planning.plan import plan
    from servecast.run import Result, simulate
    from servecast.scenario import Scenario, load_scenario
    from servecast.serve_lines import differing, serve_line
    from servecast.setup import set_up
    from servecast.sweeping.sweep import sweep
    from servecast.validation.validate import validate

__all__ = [
    "Intervals", "Result", "Scenario", "ServecastError", "compare", "diagnose", "differing", "explain", "export",
    "figures", "load_scenario", "plan", "predict_intervals", "serve_line", "set_up", "simulate", "sweep", "validate",
]  # fmt: skip

_HOMES = {
    "export": "exporting",
    "Intervals": "intervals",
    "compare": "comparing.compare",
    "diagnose": "diagnosing.diagnose",
    "explain": "explaining.explain",
    "figures": "drawing",
    "plan": "planning.plan",
    "predict_intervals": "intervals",
    "Result": "run",
    "simulate": "run",
    "Scenario": "scenario",
    "load_scenario": "scenario",
    "differing": "serve_lines",
    "serve_line": "serve_lines",
    "set_up": "setup",
    "sweep": "sweeping.sweep",
    "validate": "validation.validate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'servecast' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"servecast.{_HOMES[name]}"), name)
