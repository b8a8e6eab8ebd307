"""The priorities that a gateway gives to requests, for engines whose queue goes by priority (the least goes first).

Shortest job first by a prediction, and earliest deadline first, are no policies of the engines: who sends the requests
says it in their `priority` field.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from servecast.errors import ServecastError
from servecast.scenario import Scenario
from workloads.generate import stream
from workloads.trace import Ints, Trace

MOST = 2**31 - 1
"""The largest priority."""


def priorities(scenario: Scenario, trace: Trace, slo: Mapping[str, Mapping[str, float]], waits: bool) -> Ints | None:
    """int64[n], or None where all are equal: as `workload.priority` says, else those of the classes.

    `slo`: the limits of classes that have their own. `waits`: some requests follow answers, so that nobody knows now
    when they arrive. Raises ServecastError for deadlines without arrivals, or without a limit on TTFT.
    """
    part = scenario.workload.priority
    if part is None:
        of_class = np.array([c.priority for c in scenario.workload.classes or []], dtype=np.int64)
        return of_class[trace.classes[0]] if trace.classes is not None and of_class.any() else None
    if part.by == "predicted-output":
        error = stream(scenario.seed, "prediction").normal(0.0, part.sigma, len(trace))
        predicted = np.rint(trace.output_tokens * np.exp(error))
        return np.clip(predicted, 1, MOST).astype(np.int64)
    if waits:
        raise ServecastError("workload.priority: a deadline needs arrival times; here requests follow answers")
    names = () if trace.classes is None else trace.classes[1]
    everybody = scenario.slo.limits().get("ttft")
    limits = [slo.get(name, {}).get("ttft", everybody) for name in names] or [everybody]
    if None in limits:
        raise ServecastError("workload.priority: a deadline is the arrival plus slo.ttft, which is not given for all")
    ttft_s = np.array(limits, dtype=float)[trace.classes[0] if trace.classes is not None else np.zeros(len(trace), int)]
    due: Ints = np.clip(np.rint((trace.arrival_s + ttft_s) * 1e3), 0, MOST).astype(np.int64)
    return due
