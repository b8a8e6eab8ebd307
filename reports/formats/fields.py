"""JSON objects read key by key: every mistake is kept, with where it stands, what was found and what is allowed.

It knows no format; who calls says which keys hold what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from servecast.errors import one_of
from workloads.trace import MAX_TOKENS

MOST = 1e15
"""Larger numbers stand for nothing that is measured here (but for time stamps in ns, which say their own limit)."""
NUMBER = f"a finite number of up to {MOST:g} was expected"
COUNT = f"a whole number from 0 to {MAX_TOKENS} was expected"
TEXT = "text was expected"
_SHOWN = 10


class Fields:
    """One JSON object. `where` starts every message; mistakes are appended to `problems`; null counts as absent."""

    def __init__(self, where: str, found: Mapping[str, Any], problems: list[str]) -> None:
        self.where, self.found, self.problems = where, found, problems
        self.used: set[str] = set()

    def number(self, key: str, *, least: float = -MOST, most: float = MOST, need: bool = False) -> float | None:
        """The number under `key`, None where it is absent (a mistake where it is needed) or wrong (always one)."""
        value = self._get(key, need)
        if is_number(value, most) and value >= least:
            return float(value)
        if value is not None:
            self._wrong(key, value, NUMBER if least < 0 else f"a number from {least:g} to {most:g} was expected")
        return None

    def count(self, key: str, *, need: bool = False, most: int = MAX_TOKENS) -> int | None:
        """The whole number from 0 to `most` under `key`; a float without a fraction is one."""
        value = self._get(key, need)
        if is_count(value, most):
            return int(value)
        if value is not None:
            self._wrong(key, value, f"a whole number from 0 to {most} was expected")
        return None

    def text(self, key: str) -> str | None:
        """The text under `key`, fit to be printed; None where it is absent or empty."""
        value = self._get(key, False)
        if isinstance(value, str):
            return clean(value) or None
        if value is not None:
            self._wrong(key, value, TEXT)
        return None

    def fields(self, key: str, *, need: bool = False) -> Fields:
        """The object under `key`; an empty one where it is absent or wrong."""
        value = self._get(key, need)
        if value is not None and not isinstance(value, dict):
            self._wrong(key, value, "an object was expected")
        found = value if isinstance(value, dict) else {}
        return Fields(f"{self.where}: {key}", found, self.problems)

    def array(self, key: str, good: Callable[[Any], bool], rule: str, *, need: bool = False) -> list[Any] | None:
        """The list under `key`, all of whose elements are `good`; None where it is absent or one is not."""
        value = self._get(key, need)
        if not isinstance(value, list):
            if value is not None:
                self._wrong(key, value, "a list was expected")
            return None
        if bad := [i for i, element in enumerate(value) if not good(element)]:
            more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
            self._wrong(f"{key}[{bad[0]}]", value[bad[0]], rule + more)
            return None
        return value

    def unused(self) -> list[str]:
        """A note that names the keys that were not asked for, if there are any."""
        left = [clean(key)[:40] for key in self.found if key not in self.used]
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        return [f"keys not used: {one_of(left[:_SHOWN])}{more}"] if left else []

    def problem(self, sentence: str) -> None:
        """A mistake that is not that of a single key."""
        self.problems.append(f"{self.where}: {sentence}")

    def _get(self, key: str, need: bool) -> Any:
        self.used.add(key)
        value = self.found.get(key)
        if value is None and need:
            self.problem(f"{key} is missing; the tool always writes it")
        return value

    def _wrong(self, key: str, value: Any, rule: str) -> None:
        self.problem(f"{key} is {shown(value)}; {rule}")


def is_number(value: Any, most: float = MOST) -> bool:
    """A finite number of a size that can be; comparing as Python does, so that no integer is too large for it."""
    return type(value) in (int, float) and -most <= value <= most


def is_count(value: Any, most: int = MAX_TOKENS) -> bool:
    """A whole number from 0."""
    return is_number(value, most) and 0 <= value == int(value)


def is_text(value: Any) -> bool:
    """Text, or null."""
    return value is None or isinstance(value, str)


def is_gaps(value: Any) -> bool:
    """A list of numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def dig(found: Any, *path: str | int) -> Any:
    """What lies under these keys and indices of nested objects and lists; None where there is nothing."""
    for key in path:
        if isinstance(key, str):
            found = found.get(key) if isinstance(found, dict) else None
        else:
            found = found[key] if isinstance(found, list) and len(found) > key else None
    return found


def named(*candidates: Any) -> str | None:
    """The first of them that is text."""
    return next((clean(value) for value in candidates if isinstance(value, str) and value), None)


def positive(*candidates: Any) -> float | None:
    """The first of them that is a number above 0."""
    return next((float(value) for value in candidates if is_number(value) and value > 0), None)


def clean(text: str) -> str:
    """Text as it can be printed and stored: JSON can spell half a surrogate pair."""
    return text.encode(errors="replace").decode()


def shown(value: Any) -> str:
    """A value in a message, cut short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
