"""When sessions begin that carry no start of their own."""

from __future__ import annotations

import numpy as np

from workloads.readers.options import ReadOptions
from workloads.trace import Floats


def starts(count: int, options: ReadOptions) -> Floats:
    """float64[count] seconds: all 0, or uniform in [0, spread_s) from the seed."""
    from workloads.generate import stream

    if not options.spread_s:
        return np.zeros(count)
    return stream(options.seed, "session starts").uniform(0.0, options.spread_s, count)
