"""What is varied: `key=v1,v2` and `key=lo:hi:steps` as axes, and axes as points. It knows nothing of what keys mean."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from servecast.errors import ServecastError
from servecast.yamlfile import parse_value, plain

Sampler = Literal["latin-hypercube", "sobol"]
Point = dict[str, Any]
"""Key path -> the value that it is set to."""

MAX_POINTS = 1_000_000
"""More than these is a slip of the pen."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER}):({_NUMBER})(?::({_NUMBER}))?")
_WAYS = (
    "key=value,value,... or key=lo:hi:steps, for example engine.max_num_seqs=64,128 or workload.arrivals.rate=2:20:10"
)


@dataclass(frozen=True, slots=True)
class Span:
    """All numbers from `low` to `high`: `whole` ones only, spread evenly over their logarithms, where it says so."""

    low: float
    high: float
    log: bool
    whole: bool

    def at(self, share: float) -> float:
        """The number that `share` (from 0, below 1) of the span lies below; whole ones are equally likely."""
        low, high = self.low, self.high + self.whole
        found = low * (high / low) ** share if self.log else low + (high - low) * share
        return min(math.floor(found), int(self.high)) if self.whole else float(f"{found:.12g}")

    def steps(self, count: int) -> list[float]:
        """So many numbers, the ends among them."""
        shares = [i / (count - 1) for i in range(count)]
        low, high = self.low, self.high
        found = [low * (high / low) ** s if self.log else low + (high - low) * s for s in shares]
        return [round(x) if self.whole else float(f"{x:.12g}") for x in found]


@dataclass(frozen=True, slots=True)
class Axis:
    """Keys that are set together, one `settings` entry after the other: a value for each key. Of a `span`, from which
    values are drawn, the settings are its ends."""

    keys: tuple[str, ...]
    settings: tuple[tuple[Any, ...], ...]
    span: Span | None = None

    @property
    def name(self) -> str:
        """As it is written."""
        return "+".join(self.keys)

    @property
    def text(self) -> str:
        """Its settings, for a person."""
        if self.span is not None:
            of = ("whole numbers" if self.span.whole else "numbers") + (
                ", by their logarithms" if self.span.log else ""
            )
            return f"{self.span.low:g} to {self.span.high:g} ({of})"
        return ", ".join(" + ".join(map(label, setting)) for setting in self.settings)


def label(value: object) -> str:
    """A value as people write it, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {label(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(label, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def axes_of(vary: Iterable[str] | Mapping[str, Any], *, sampled: bool = False) -> tuple[Axis, ...]:
    """The axes that texts (`key=values`) or a mapping (key -> list of values, or the text of a range) describe.

    Several keys are set together by joining them with +, each of whose values is a list with one for each. A range
    without steps is for `sampled` axes only. Raises ServecastError with every problem.
    """
    problems: list[str] = []
    found = []
    if isinstance(vary, Mapping):
        pairs = [(str(key), value) for key, value in vary.items()]
    else:
        pairs = []
        for text in [vary] if isinstance(vary, str) else vary:
            key, equals, values = text.partition("=")
            if not equals or not key.strip():
                problems.append(f"--vary {text}: write {_WAYS}")
            else:
                pairs.append((key.strip(), values))
    for key, values in pairs:
        try:
            found.append(_axis(key, values, sampled))
        except ServecastError as error:
            problems += error.problems
    if not pairs and not problems:
        problems.append(f"nothing is varied; give --vary {_WAYS}")
    problems += _clashes([key for axis in found for key in axis.keys])
    if problems:
        raise ServecastError(*problems)
    return tuple(found)


def grid(axes: Iterable[Axis]) -> Iterator[Point]:
    """Every combination, the last axis changing fastest. Raises ServecastError where there are far too many."""
    axes = tuple(axes)
    if (count := math.prod(len(axis.settings) for axis in axes)) > MAX_POINTS:
        raise ServecastError(
            f"--vary: the axes have {count:,} combinations, more than {MAX_POINTS:,}; take fewer values, or --sample"
        )
    return (_point(axes, settings) for settings in product(*(axis.settings for axis in axes)))


def sample(axes: Iterable[Axis], count: int, sampler: Sampler = "latin-hypercube") -> Iterator[Point]:
    """`count` points that fill the space of all combinations evenly; the same ones every time. A point may come twice
    where an axis has few values."""
    from scipy.stats import qmc

    axes = tuple(axes)
    if sampler not in get_args(Sampler):
        raise ServecastError(f"--sampler: {sampler!r} is none of {', '.join(get_args(Sampler))}")
    if not 1 <= count <= MAX_POINTS:
        raise ServecastError(f"--sample: {count:,} is not a number of points from 1 to {MAX_POINTS:,}")
    make = qmc.Sobol if sampler == "sobol" else qmc.LatinHypercube
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Sobol's points are most even where they are a power of 2
        shares = make(len(axes), seed=0).random(count)
    return (_point(axes, map(_setting, axes, row)) for row in shares.tolist())


def _setting(axis: Axis, share: float) -> tuple[Any, ...]:
    if axis.span is not None:
        return (axis.span.at(share),)
    return axis.settings[int(share * len(axis.settings))]


def _point(axes: tuple[Axis, ...], settings: Iterable[tuple[Any, ...]]) -> Point:
    return {
        key: value
        for axis, values in zip(axes, settings, strict=True)
        for key, value in zip(axis.keys, values, strict=True)
    }


def _axis(name: str, values: Any, sampled: bool) -> Axis:
    where = f"--vary {name}"
    keys = tuple(key.strip() for key in name.split("+"))
    if not all(word for key in keys for word in key.split(".")):
        raise ServecastError(f"{where}: an empty word in the key; write it like engine.max_num_seqs")
    if isinstance(values, str):
        if len(keys) == 1 and (found := _RANGE.fullmatch(values.strip())):
            return _range(where, keys, found, sampled)
        values = _listed(where, values)
    values = [plain(value) for value in values]
    if not values:
        raise ServecastError(f"{where}: no values; write {_WAYS}")
    if len(keys) == 1:
        settings = tuple((value,) for value in values)
    else:
        wrong = [value for value in values if not isinstance(value, list) or len(value) != len(keys)]
        if wrong:
            raise ServecastError(
                f"{where}: {label(wrong[0])} is not a list of {len(keys)}, one for each key; write [a,b],[c,d]"
            )
        settings = tuple(map(tuple, values))
    texts = [" + ".join(map(label, setting)) for setting in settings]
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        raise ServecastError(f"{where}: {', '.join(twice)} stands there twice; keep one")
    return Axis(keys, settings)


def _listed(where: str, text: str) -> list[Any]:
    """Values with commas between them."""
    if any(_RANGE.fullmatch(part.strip()) for part in text.split(",")):
        raise ServecastError(f"{where}: {text}: a range stands alone; write all values out, or one range")
    try:
        found = parse_value(f"[{text}\n]", where)
    except ServecastError as error:
        said = error.problems[0].removeprefix(where).lstrip(":12 ")
        raise ServecastError(f"{where}: {text}: {said}; quote a value if it is text") from None
    assert isinstance(found, list)
    return found


def _range(where: str, keys: tuple[str, ...], found: re.Match[str], sampled: bool) -> Axis:
    log, *ends, steps = found.groups()
    low, high = map(float, ends)
    where = f"{where}={found.group()}"
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ServecastError(f"{where}: {ends[0]} to {ends[1]} are not numbers that a computer can hold")
    if low >= high:
        raise ServecastError(f"{where}: {ends[0]} is not below {ends[1]}; write low:high:steps")
    if log and low <= 0:
        raise ServecastError(f"{where}: {ends[0]} has no logarithm; begin above 0, or leave log: out")
    span = Span(low, high, bool(log), whole)
    if steps is None:
        if not sampled:
            raise ServecastError(f"{where}: how many steps? Write {found.group()}:5, or draw values with --sample")
        settings = [int(low), int(high)] if whole else [low, high]
        return Axis(keys, tuple((value,) for value in settings), span)
    if not re.fullmatch(r"\d+", steps) or not 2 <= int(steps) <= MAX_POINTS:
        raise ServecastError(f"{where}: {steps} is not a number of steps, 2 or more")
    values = span.steps(int(steps)) if int(steps) <= high - low + 1 or not whole else []
    if len(set(values)) < int(steps):
        raise ServecastError(
            f"{where}: there are fewer than {steps} whole numbers that far apart; take fewer steps, or write "
            f"{low:.1f}:{high:.1f}:{steps} for numbers between them"
        )
    return Axis(keys, tuple((value,) for value in values))


def _clashes(keys: list[str]) -> Iterator[str]:
    """Keys that would undo each other."""
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        yield f"--vary {key}: varied twice; write all its values in one --vary"
    for i, key in enumerate(keys):
        for later in keys[i + 1 :]:
            if key.startswith(f"{later}."):
                yield f"--vary {later}: replaces {key}, varied before it; vary {later} first, or a key within it"
