"""Checks and calls what a scenario names by kind, like `{kind: lognormal, mean: 1024, cv: 1.0}`.

A registry maps kinds to functions `f(n, rng, *, parameters)`. The parameters a kind has, their types and their ranges
are the function's own keyword-only annotations, so a new kind is one function and one registry line. It knows none of
the kinds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, nearest, one_of
from workloads.trace import MAX_TOKENS

T = TypeVar("T", bound=np.generic)
Registry = dict[str, Callable[..., NDArray[T]]]
Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Number:
    """What a parameter may be: a number from `least` (or above it, when `least` is excluded) to `most`."""

    what: str
    least: float
    most: float
    open: bool = False
    whole: bool = False

    def problem(self, value: object) -> str:
        """What is wrong with the value and what is allowed, or an empty string."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            low = value > self.least if self.open else value >= self.least
            if low and value <= self.most and not (self.whole and value != int(value)):  # NaN fails both comparisons
                return ""
        bound = "above" if self.open else "from"
        return f"{value!r} is not {self.what} {bound} {self.least:.12g} {'up ' * self.open}to {self.most:.12g}"


PerSecond = Annotated[float, Number("a number of requests per second", 1e-6, 1e9)]
Positive = Annotated[float, Number("a number", 0, 100, open=True)]
Fraction = Annotated[float, Number("a number", 0, 1)]
Tokens = Annotated[int, Number("a whole number of tokens", 1, MAX_TOKENS, whole=True)]
TokensMean = Annotated[float, Number("a number of tokens", 1, MAX_TOKENS)]


def check_kind(registry: Registry[Any], spec: object, where: str) -> list[str]:
    """Every problem of a user's spec, each beginning with `where` (the key path); empty when it can be called."""
    example = f"for example {{kind: {next(iter(registry))}, ...}}"
    if not isinstance(spec, Mapping):
        return [f"{where}: {spec!r} is not a mapping with a kind; write {example}; kinds: {one_of(registry)}"]
    if "kind" not in spec:
        wrong = [str(key) for key in spec if nearest(str(key), ["kind"])]
        hint = f" (is {wrong[0]!r} meant?)" if wrong else ""
        return [f"{where}: 'kind' is missing{hint}; write {example}; kinds: {one_of(registry)}"]
    kind = spec["kind"]
    if not isinstance(kind, str) or kind not in registry:
        return [f"{where}.kind: unknown kind {kind!r}{nearest(str(kind), registry)}; kinds: {one_of(registry)}"]

    parameters = _parameters(registry[kind])
    takes = f"{kind} takes {one_of(parameters) or 'no parameters'}"
    problems = []
    unknown = [str(key) for key in spec if key != "kind" and key not in parameters]
    absent = [name for name in parameters if name not in spec]
    problems += [f"{where}.{key}: unknown parameter{nearest(key, absent or parameters)}; {takes}" for key in unknown]
    problems += [f"{where}.{name}: missing; {takes}" for name in absent if parameters[name].required]
    for name, parameter in parameters.items():
        given = name in spec and (parameter.required or spec[name] is not None)
        if given and (problem := parameter.number.problem(spec[name])):
            problems.append(f"{where}.{name}: {problem}")
    if not problems:
        try:  # rules between parameters are the function's own; drawing nothing asks for them
            call_kind(registry, spec, 0, np.random.Generator(np.random.PCG64(0)))
        except ServecastError as error:
            problems = [f"{where}: {problem}" for problem in error.problems]
    return problems


def call_kind(registry: Registry[T], spec: Spec, n: int, rng: np.random.Generator) -> NDArray[T]:
    """n values of the kind; the spec has passed `check_kind`."""
    function = registry[spec["kind"]]
    parameters = _parameters(function)
    given = {name: v for name, v in spec.items() if name != "kind" and v is not None}  # None: its default
    return function(n, rng, **{name: int(v) if parameters[name].number.whole else v for name, v in given.items()})


@dataclass(frozen=True, slots=True)
class _Parameter:
    number: Number
    required: bool


def _parameters(function: Callable[..., Any]) -> dict[str, _Parameter]:
    """The keyword-only parameters. An optional one (`Tokens | None = None`) is annotated inside the union."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            hint = hints[name]
            numbers = [m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ())]
            found[name] = _Parameter(numbers[0], parameter.default is parameter.empty)
    return found
