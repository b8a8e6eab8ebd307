"""When requests arrive, when no trace says it: one function a process and one line in `ARRIVALS`.

A function takes n, a random generator and keyword-only parameters, whose types and ranges are their annotations
(`workloads.kinds` reads them, so a scenario's parameters are checked before the call). It returns float64[n] seconds,
ascending, from time 0, the start of the workload. It knows nothing of token lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workloads.kinds import PerSecond, Registry
from workloads.trace import Floats


def poisson(n: int, rng: np.random.Generator, *, rate: PerSecond) -> Floats:
    """Independent exponential gaps. The first gap is drawn too, so the first arrival is after 0."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def constant(n: int, rng: np.random.Generator, *, rate: PerSecond) -> Floats:
    """One request every 1/rate seconds, the first at 0."""
    return np.arange(n) / rate


def all_at_once(n: int, rng: np.random.Generator) -> Floats:
    """Everything at time 0: an offline batch."""
    return np.zeros(n)


ARRIVALS: Registry[Any] = {
    "poisson": poisson,
    "constant": constant,
    "all-at-once": all_at_once,
}
