"""Checks and calls what a scenario names by kind, like `{kind: lognormal, mean: 1024, cv: 1.0}`.

A registry maps kinds to functions `f(n, rng, *, parameters)`. The parameters a kind has, their types and their ranges
are the function's own keyword-only annotations (`workloads.parameters`), so a new kind is one function and one registry
line. It knows none of the kinds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, nearest, one_of
from workloads.parameters import Check

T = TypeVar("T", bound=np.generic)
Registry = dict[str, Callable[..., NDArray[T]]]
Spec = Mapping[str, Any]


def check_kind(registry: Registry[Any], spec: object, where: str) -> list[str]:
    """Every problem of a user's spec, each beginning with `where` (the key path); empty when it can be called."""
    problems = check_parameters(registry, spec, where)
    if not problems:
        assert isinstance(spec, Mapping)
        try:  # rules between parameters are the function's own; drawing nothing asks for them
            call_kind(registry, spec, 0, np.random.Generator(np.random.PCG64(0)))
        except ServecastError as error:
            problems = [f"{where}: {problem}" for problem in error.problems]
    return problems


def call_kind(registry: Registry[T], spec: Spec, n: int, rng: np.random.Generator) -> NDArray[T]:
    """n values of the kind; the spec has passed `check_kind`."""
    return registry[spec["kind"]](n, rng, **parameters(registry, spec))


def check_parameters(registry: Mapping[str, Callable[..., Any]], spec: object, where: str) -> list[str]:
    """Every problem of the kind's name and of each parameter on its own."""
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

    known = _parameters(registry[kind])
    takes = f"{kind} takes {one_of(known) or 'no parameters'}"
    problems = []
    unknown = [str(key) for key in spec if key != "kind" and key not in known]
    absent = [name for name in known if name not in spec]
    problems += [f"{where}.{key}: unknown parameter{nearest(key, absent or known)}; {takes}" for key in unknown]
    problems += [f"{where}.{name}: missing; {takes}" for name in absent if known[name].required]
    for name, parameter in known.items():
        if name in spec and (parameter.required or spec[name] is not None):
            problems += parameter.check.problems(spec[name], f"{where}.{name}")
    return problems


def parameters(registry: Mapping[str, Callable[..., Any]], spec: Spec) -> dict[str, Any]:
    """The keyword arguments that a checked spec gives; None means that the parameter's default holds."""
    known = _parameters(registry[spec["kind"]])
    given = {name: v for name, v in spec.items() if name != "kind" and v is not None}
    return {name: known[name].check.convert(v) for name, v in given.items()}


@dataclass(frozen=True, slots=True)
class KindOf:
    """The check of a parameter that is itself a `{kind: ...}` of a registry: the function is given the spec."""

    registry: Registry[Any]

    def problems(self, value: object, where: str) -> list[str]:
        return check_kind(self.registry, value, where)

    def convert(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class _Parameter:
    check: Check
    required: bool


def _parameters(function: Callable[..., Any]) -> dict[str, _Parameter]:
    """The keyword-only parameters. An optional one (`Tokens | None = None`) is annotated inside the union."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            hint = hints[name]
            checks = [m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ())]
            found[name] = _Parameter(checks[0], parameter.default is parameter.empty)
    return found
