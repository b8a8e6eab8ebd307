"""Durations and sizes in scenarios: written as a number with its unit, seconds and bytes inside."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from workloads.units import parse_duration


def duration_text(seconds: float) -> str:
    """Seconds as a scenario writes them."""
    return f"{seconds:.12g}s"


Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(duration_text)]
"""Seconds, written with a unit."""

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40} | {
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12
}  # fmt: skip


def parse_size(value: object) -> int:
    """`14.99GiB`, `800 MiB`, `16 GB` in bytes. The unit is required: GiB and GB differ by 7 %."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number) or number < 0 or match[2] not in SIZES:
        raise ValueError(f"{value!r} is not a size such as 14.99GiB, 800MiB or 16GB")
    return round(number * SIZES[match[2]])


def size_text(size_bytes: int) -> str:
    """Bytes as a scenario writes them."""
    unit = next((name for name in ("TiB", "GiB", "MiB") if size_bytes and size_bytes % SIZES[name] == 0), "B")
    return f"{size_bytes // SIZES[unit]}{unit}"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(size_text)]
"""Bytes, written with a unit."""


def parse_rate(value: object) -> float:
    """`25GB/s`, `800 MB/s`, `2GiB/s` in bytes/s. Network rates in bits are refused: eight times is easily missed."""
    text = value.strip() if isinstance(value, str) else ""
    try:
        rate = parse_size(text.removesuffix("/s")) if text.endswith("/s") else 0
    except ValueError:
        rate = 0
    if not rate:
        raise ValueError(f"{value!r} is not a rate such as 25GB/s or 800MB/s (bytes, not bits)")
    return float(rate)


def rate_text(bytes_per_s: float) -> str:
    """Bytes/s as a scenario writes them."""
    return f"{bytes_per_s:.12g}B/s"


Rate = Annotated[float, BeforeValidator(parse_rate), PlainSerializer(rate_text)]
"""Bytes a second, written with a unit."""
