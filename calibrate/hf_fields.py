"""Reads fields of a Hugging Face config.json and keeps every problem with them, each with its field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST = 2**40  # no size of a model is near it


@dataclass(slots=True)
class Fields:
    """The fields of `file`. Readers return a stand-in after a problem, so that the rest can be read too."""

    file: Path
    values: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        return self.values.get(name)

    def wrong(self, name: str, expected: str) -> None:
        """Note that `name` is not what was expected."""
        self.problems.append(f"{self.file}: {name} is {self.get(name)!r}; expected {expected}")

    def size(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`; `default`, if any, where it is missing or null."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{self.file}: {name} is missing; expected a whole number of at least {least}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.wrong(name, f"a whole number of at least {least}")
        elif value > most:
            self.wrong(name, f"at most {most:,}")
        else:
            return value
        return max(least, 1)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; `default` where it is missing."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
        return bool(value)

    def layers(self, name: str, chosen: Callable[[Any], bool], default: Callable[[int], bool], layers: int) -> int:
        """How many of `layers` layers a list with one entry a layer chooses, or `default` by index where the list is
        missing, null or empty."""
        value = self.get(name)
        if not value:
            return sum(default(i) for i in range(layers))
        if not isinstance(value, list) or len(value) < layers:
            self.wrong(name, f"a list of {layers} entries, one a layer")
            return 0
        return sum(chosen(entry) for entry in value[:layers])
