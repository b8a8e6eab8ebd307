"""Values out of the plain JSON that a fitted model was written to; mistakes are said with their key. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from servecast.errors import ServecastError

T = TypeVar("T")


def field(data: Any, key: str, where: str, read: Callable[[Any, str], T]) -> T:
    """`read(data[key], "where.key")`; `ServecastError` where `data` is no mapping or has no such key."""
    if not isinstance(data, dict):
        raise ServecastError(f"{where}: found {short(data)}; expected a mapping with the key {key!r}")
    if key not in data:
        raise ServecastError(f"{where}: the key {key!r} is missing")
    return read(data[key], f"{where}.{key}")


def number(value: Any, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ServecastError(f"{where}: found {short(value)}; expected a number")
    return float(value)


def positive(value: Any, where: str) -> float:
    """A finite number above zero."""
    if (found := number(value, where)) <= 0:
        raise ServecastError(f"{where}: found {short(value)}; expected more than 0")
    return found


def whole(value: Any, where: str) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ServecastError(f"{where}: found {short(value)}; expected a whole number of at least 1")
    return value


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ServecastError(f"{where}: found {short(value)}; expected text")
    return value


def many(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    """Reads a list of what `read` reads."""

    def read_all(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ServecastError(f"{where}: found {short(value)}; expected a list")
        return tuple(read(each, f"{where}[{i}]") for i, each in enumerate(value))

    return read_all


def mapping(read: Callable[[Any, str], T]) -> Callable[[Any, str], dict[str, T]]:
    """Reads a mapping from words to what `read` reads."""

    def read_all(value: Any, where: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ServecastError(f"{where}: found {short(value)}; expected a mapping")
        return {str(key): read(each, f"{where}.{key}") for key, each in value.items()}

    return read_all


def rounded(value: float, digits: int = 4) -> float:
    """`value` to so many significant digits, as a whole number where it is one."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 2**53 else found


def short(value: Any) -> str:
    """A value for a message."""
    shown = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
