"""What all parts of a scenario have in common: how they are checked, and that `null` takes a key back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from calibrate.models import load_model
from servecast.errors import ServecastError, nearest, one_of
from servecast.mistakes import MistakeError
from servecast.units import Duration
from workloads.kinds import Registry, check_kind


class Part(BaseModel):
    """A mapping of a scenario: unknown keys are refused, nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        """`key: null` (also `--set key=null`) takes a key back; a required one is then missing."""
        if not isinstance(value, dict):
            return value
        return {key: v for key, v in value.items() if v is not None or key not in cls.model_fields}


def known(load: Callable[[str], object]) -> AfterValidator:
    """A check that `load` accepts the word."""

    def check(word: str) -> str:
        try:
            load(word)
        except ServecastError as error:
            raise MistakeError(
                f": {re.sub('^(gpu|model|mix|link|connector): ', '', p)}" for p in error.problems
            ) from None
        return word

    return AfterValidator(check)


def is_path(model: str) -> bool:
    """Whether a `model` is a path to a config.json (or a folder with one) rather than a catalogue name."""
    return "/" in model or model.endswith(".json")


def _name_or_path(model: str) -> None:
    if not is_path(model):
        load_model(model)


known_model = known(_name_or_path)
"""A check of a model's name; what is a path is read later."""


def named(what: str, names: Iterable[str]) -> AfterValidator:
    """A check that the word is among `names`."""

    def check(word: str) -> None:
        if word not in names:
            raise ServecastError(f"unknown {what} {word!r}{nearest(word, names)}; known: {one_of(names)}")

    return known(check)


def checked(problems_of: Callable[[Any], list[str]]) -> AfterValidator:
    """A check whose problems continue the value's key path (`.kind: unknown ...`)."""

    def check(value: Any) -> Any:
        if problems := problems_of(value):
            raise MistakeError(problems)
        return value

    return AfterValidator(check)


def kind_of(registry: Registry[Any]) -> AfterValidator:
    """A check of a `{kind: ..., parameters}` mapping."""
    return checked(lambda spec: check_kind(registry, spec, ""))


Count = Annotated[int, Field(ge=1)]
Time = Annotated[Duration, Field(ge=0, lt=3600)]
Limit = Annotated[Duration, Field(gt=0)]
