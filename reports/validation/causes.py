"""What may explain a forecast's error: changes that were tried, each with the error that it leaves.

It knows what was found, and not how a change is simulated: `servecast/validation/causes.py` does that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.1
LEAST = 0.005
"""A change is told of when it takes away this share of the mean error (of its logarithm), and this much of it."""
CAUTION = (
    "A change that fits is no proof: causes look alike in a few figures, and two of them can cancel out. Look the "
    "setting up where it can be seen (the engine's log, its own metrics) before you change it here."
)


@dataclass(frozen=True, slots=True)
class Cause:
    """A change, in words that follow "with", and as the `--set` that makes it (none where no key does).

    mean_error: as `reports.validation.mean_error`, with the change. errors: signed, by key of the summary.
    """

    words: str
    sets: tuple[str, ...]
    mean_error: float
    errors: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Causes:
    """All that was tried, the best first.

    mean_error: without a change, over the same requests. over: which requests, in words; empty for all of them.
    refused: what could not be tried, with the reason. why_none: why nothing was tried; empty where something was.
    """

    mean_error: float | None
    tried: tuple[Cause, ...] = ()
    refused: tuple[str, ...] = ()
    over: str = ""
    why_none: str = ""

    @property
    def likely(self) -> tuple[Cause, ...]:
        """Those that reduce the mean error noticeably, the best first."""
        if self.mean_error is None:
            return ()
        limit = min(self.mean_error - LEAST, math.expm1((1 - LEAST_SHARE) * math.log1p(self.mean_error)))
        return tuple(cause for cause in self.tried if cause.mean_error <= limit)
