"""What is wrong with axes before anything runs: keys that no scenario has, and values that none of the points can take.

Combinations that cannot be are no mistake: they are left out, and counted, when their turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from servecast.errors import ServecastError
from servecast.sweeping.axes import Axis, Point
from servecast.sweeping.runs import Base

MOST = 100
"""Settings of an axis that are tried; of more, which only ranges have, every k-th."""


def check_axes(base: Base, axes: tuple[Axis, ...]) -> None:
    """Raises ServecastError with every key and value that is wrong whatever the other axes are set to."""
    base.file({})  # what is wrong with the file itself
    wrong: dict[str, None] = {}
    others: dict[str, None] = {}
    works = False
    for axis in axes:
        for setting in axis.settings[:: max(1, len(axis.settings) // MOST)]:
            found = _problems(base, axes, axis, setting)
            works |= not found
            for problem in found:
                (wrong if _of(problem, axis.keys) else others)[problem] = None
    keys = [key for axis in axes for key in axis.keys]
    if wrong or not works:
        raise ServecastError(*(_varied(problem, keys) for problem in (wrong if works else wrong | others)))


def _problems(base: Base, axes: tuple[Axis, ...], axis: Axis, setting: tuple[Any, ...]) -> tuple[str, ...]:
    """What is wrong with one setting of `axis` in the first point that has it; nothing if another point can have it."""
    first: tuple[str, ...] = ()
    for point in _beside(axes, axis, setting):
        try:
            base.scenario(point)
        except ServecastError as error:
            first = first or error.problems
        else:
            return ()
    return first


def _beside(axes: tuple[Axis, ...], axis: Axis, setting: tuple[Any, ...]) -> Iterator[Point]:
    """Points with that setting: the first of all other axes, then each other setting of one of them."""

    def point(changed: Axis | None, to: tuple[Any, ...]) -> Point:
        chosen = [setting if a is axis else to if a is changed else a.settings[0] for a in axes]
        return {
            key: value
            for a, values in zip(axes, chosen, strict=True)
            for key, value in zip(a.keys, values, strict=True)
        }

    yield point(None, ())
    for other in axes:
        if other is not axis:
            for to in other.settings[1:MOST]:
                yield point(other, to)


def _of(problem: str, keys: Iterable[str]) -> bool:
    """Whether the problem is one of these keys, or of a key within or around them that they made."""
    found = re.match(r"--set ([^:\s]+)", problem)
    return found is not None and any(
        f"{a}.".startswith(f"{b}.") for k in keys for a, b in ((k, found[1]), (found[1], k))
    )


def _varied(problem: str, keys: Iterable[str]) -> str:
    """The problem as one of the option that it comes from."""
    return f"--vary {problem.removeprefix('--set ')}" if _of(problem, keys) else problem
