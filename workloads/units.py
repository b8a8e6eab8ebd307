"""Durations as people write them: a number with its unit. Inside, everything is seconds."""

from __future__ import annotations

import math
import re

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> float:
    """`500ms`, `1.5s`, `10min`, `2h` in seconds. The unit is required: a bare number could mean ms or s."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]+)\s*", value) if isinstance(value, str) else None
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number) or match[2] not in SECONDS:
        bare = isinstance(value, int | float) and not isinstance(value, bool)
        example = f"; write {value}s or {value}ms" if bare else ""
        raise ValueError(f"{value!r} is not a duration such as 500ms, 1.5s, 10min or 2h{example}")
    if number < 0:
        raise ValueError(f"{value!r} is negative")
    return number * SECONDS[match[2]]
