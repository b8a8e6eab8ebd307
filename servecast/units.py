"""Durations in scenarios: written as a number with its unit, seconds inside."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from workloads.units import parse_duration


def duration_text(seconds: float) -> str:
    """Seconds as a scenario writes them."""
    return f"{seconds:.12g}s"


Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(duration_text)]
"""Seconds, written with a unit."""
