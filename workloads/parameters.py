"""What a parameter of an arrival process, a length distribution or a session may be, and how a value is checked.

A parameter's annotation, `Annotated[type, check]`, carries its check; `workloads.kinds` reads them. A check tells every
problem of a user's value, each with its key path, and turns a good value into what the function takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from servecast.errors import nearest, one_of
from workloads.trace import MAX_TOKENS
from workloads.units import parse_duration

_SHOWN = 5
"""Wrong items of a list that are named; the rest are counted."""


class Check(Protocol):
    """What is asked of a user's value."""

    def problems(self, value: object, where: str) -> list[str]:
        """Everything that is wrong with the value, each beginning with `where`; empty when `convert` takes it."""

    def convert(self, value: Any) -> Any:
        """The checked value as the function takes it."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `least` to `most`."""

    what: str
    least: float
    most: float
    whole: bool = False

    def problems(self, value: object, where: str) -> list[str]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            inside = self.least <= value <= self.most  # never of NaN
            if inside and not (self.whole and value != int(value)):
                return []
        return [f"{where}: {value!r} is not {self.what} from {self.least:.12g} to {self.most:.12g}"]

    def convert(self, value: Any) -> Any:
        return int(value) if self.whole else value


@dataclass(frozen=True, slots=True)
class Time:
    """A duration with its unit, such as 10min, given to the function as seconds."""

    most: float
    zero: bool = False

    def problems(self, value: object, where: str) -> list[str]:
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            return [f"{where}: {error}"]
        if seconds == 0 and not self.zero:
            return [f"{where}: {value!r} is no time; give a duration above 0"]
        return [f"{where}: {value!r} is above {self.most:.12g}s"] if seconds > self.most else []

    def convert(self, value: Any) -> float:
        return parse_duration(value)


@dataclass(frozen=True, slots=True)
class Yes:
    """true or false."""

    def problems(self, value: object, where: str) -> list[str]:
        return [] if isinstance(value, bool) else [f"{where}: {value!r} is neither true nor false"]

    def convert(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]

    def problems(self, value: object, where: str) -> list[str]:
        if isinstance(value, str) and value in self.words:
            return []
        return [f"{where}: unknown word {value!r}{nearest(str(value), self.words)}; known: {one_of(self.words)}"]

    def convert(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Row:
    """A list of fixed length, each item with its own check, such as a [duration, rate] pair."""

    what: str
    items: tuple[Check, ...]

    def problems(self, value: object, where: str) -> list[str]:
        if not isinstance(value, list | tuple) or len(value) != len(self.items):
            return [f"{where}: {value!r} is not {self.what}"]
        checked = zip(self.items, value, strict=True)
        return [problem for i, (item, v) in enumerate(checked) for problem in item.problems(v, f"{where}.{i}")]

    def convert(self, value: Any) -> tuple[Any, ...]:
        return tuple(item.convert(v) for item, v in zip(self.items, value, strict=True))


@dataclass(frozen=True, slots=True)
class Many:
    """A list of one or more items under one check."""

    what: str
    item: Check

    def problems(self, value: object, where: str) -> list[str]:
        if not isinstance(value, list | tuple) or not value:
            return [f"{where}: {value!r} is not a list of {self.what}"]
        found = [problem for i, v in enumerate(value) for problem in self.item.problems(v, f"{where}.{i}")]
        return found[:_SHOWN] + [f"{where}: {len(found) - _SHOWN:,} more like these"] * (len(found) > _SHOWN)

    def convert(self, value: Sequence[Any]) -> list[Any]:
        return [self.item.convert(v) for v in value]


_TOKENS = Number("a whole number of tokens", 1, MAX_TOKENS, whole=True)
_WEIGHT = Number("a number", 0, 1e18)
_LONGEST_S = 1e9  # 32 years

PerSecond = Annotated[float, Number("a number of requests per second", 1e-6, 1e9)]
Cv = Annotated[float, Number("a number", 0.01, 100)]
Peak = Annotated[float, Number("a number", 1, 20)]
Fraction = Annotated[float, Number("a number", 0, 1)]
Tokens = Annotated[int, _TOKENS]
TokensOrNone = Annotated[int, Number("a whole number of tokens", 0, MAX_TOKENS, whole=True)]
TokensMean = Annotated[float, Number("a number of tokens", 1, MAX_TOKENS)]
Count = Annotated[int, Number("a whole number", 1, 1_000_000, whole=True)]
CountOrNone = Annotated[int, Number("a whole number", 0, 1_000_000, whole=True)]
CountMean = Annotated[float, Number("a number", 1, 1_000_000)]
BlockTokens = Annotated[int, Number("a whole number of tokens", 1, 65_536, whole=True)]
Duration = Annotated[float, Time(_LONGEST_S)]
DurationOrNone = Annotated[float, Time(_LONGEST_S, zero=True)]
Flag = Annotated[bool, Yes()]
TokensList = Annotated[list[int], Many("whole numbers of tokens", _TOKENS)]
CountList = Annotated[list[int], Many("whole numbers", Number("a whole number", 1, 1_000_000, whole=True))]
Weights = Annotated[list[float], Many("numbers", _WEIGHT)]
RateSteps = Annotated[
    list[tuple[float, float]],
    Many(
        "[duration, rate] pairs, such as [[10min, 5], [1min, 50]]",
        Row(
            "a [duration, rate] pair, such as [10min, 5]",
            (Time(_LONGEST_S), Number("a number of requests per second", 0, 1e9)),
        ),
    ),
]
