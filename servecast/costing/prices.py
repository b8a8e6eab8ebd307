"""Prices of GPUs by the hour, as named sets: those that come with the package, and a file of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from calibrate.hardware import load_gpu
from servecast.errors import ServecastError, nearest, one_of
from servecast.mistakes import say
from servecast.parts import Part, known
from servecast.yamlfile import load_yaml

DEFAULT = "runpod"
"""The set that holds where a scenario names none."""
_BUNDLED = Path(__file__).with_name("prices.yaml")

Dollars = Annotated[float, Field(gt=0, lt=1e9), BeforeValidator(lambda v: float(v) if type(v) is int else v)]
GpuId = Annotated[str, known(load_gpu)]


def _day(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value


class PriceSet(Part):
    """Prices of one seller on one day. `prices`: GPU id -> US dollars per GPU and hour; `what`: how it is rented."""

    name: str
    currency: Literal["USD"] = "USD"
    what: Literal["on-demand", "reserved", "spot", "own"] = "own"
    source: str = ""
    date: Annotated[str, BeforeValidator(_day), Field(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    note: str = ""
    prices: dict[GpuId, Dollars] = Field(min_length=1)

    @property
    def said(self) -> str:
        """Whose prices, in a few words: `runpod, on-demand, 2026-09-25`."""
        return ", ".join(filter(None, (self.name, self.what, self.date)))


@cache
def price_sets() -> Mapping[str, PriceSet]:
    """The bundled sets by name."""
    return _read(_BUNDLED)


def own_set(path: Path, name: str | None = None) -> PriceSet:
    """The set of a user's file, or the one called `name` where it holds several. Raises ServecastError with every
    problem of the file."""
    if not path.is_file():
        raise ServecastError(f"{path}: no such file; the bundled sets are {one_of(price_sets())}")
    sets = _read(path)
    if name is None and len(sets) == 1:
        return next(iter(sets.values()))
    if name not in sets:
        found = f"it has no set {name!r}{nearest(name, sets)}" if name else "it holds several sets"
        raise ServecastError(f"{path}: {found}; write {path.name}:NAME with one of {one_of(sets)}")
    return sets[name]


def split_path(word: str) -> tuple[str, str | None] | None:
    """("mine.yaml", the set's name or None) of what names a file; None of what names a bundled set."""
    match = re.fullmatch(r"(.+\.ya?ml)(?::([\w.-]+))?", word)
    return (match[1], match[2]) if match else (word, None) if "/" in word else None


def priced(prices: PriceSet, gpus: Iterable[str]) -> dict[str, float]:
    """GPU id -> dollars per GPU and hour. Raises ServecastError for those that the set does not have."""
    wanted = list(dict.fromkeys(gpus))
    if missing := [without(prices, gpu) for gpu in wanted if gpu not in prices.prices]:
        raise ServecastError(*missing)
    return {gpu: prices.prices[gpu] for gpu in wanted}


def without(prices: PriceSet, gpu: str) -> str:
    """That a set has no price for a GPU, and what has one."""
    others = [name for name, each in price_sets().items() if gpu in each.prices]
    has = f"these sets do: {one_of(others)}" if others else "nor does any bundled set"
    return f"{prices.name} has no price for {gpu}; {has}. Or give yours: cost: {{prices: {{{gpu}: DOLLARS}}}}"


def _read(path: Path) -> dict[str, PriceSet]:
    file, sets, problems = load_yaml(path), dict[str, PriceSet](), list[str]()
    for name, data in file.data.items():
        try:
            sets[name] = PriceSet.model_validate({"name": name} | data if isinstance(data, dict) else data)
        except ValidationError as error:
            keys = [key for key in PriceSet.model_fields if key != "name"]
            for one in error.errors():
                loc = ".".join(str(part) for part in (name, *one["loc"]) if part != "[key]")
                problems += map(file.at, say(one, loc, keys))
    if problems:
        raise ServecastError(*problems)
    return sets
