"""What is compared: files, or one file with what is varied; which are the same, and which have the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError
from servecast.setup import Setup, set_up
from servecast.sweeping.axes import Point, axes_of, grid, label
from servecast.sweeping.checks import check_axes
from servecast.sweeping.runs import Base

MOST = 12
"""More than these is a sweep."""
LONGEST = 40


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of those that are compared."""

    label: str
    base: Base
    point: Point

    def set_up(self, seed: int) -> Setup:
        """Everything resolved, under that seed. Raises ServecastError."""
        return set_up(self.base.scenario(self.point | {"seed": seed}))


def candidates(
    scenarios: Sequence[str | Path],
    vary: Iterable[str] | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, object],
) -> list[Candidate]:
    """Each file, or each point of what is varied in the only one. Raises ServecastError with every problem."""
    bases, problems = [], list[str]()
    for path in scenarios:
        try:
            bases.append(Base.of(path, overrides))
            bases[-1].file({})
        except ServecastError as error:
            problems += error.problems
    if len(scenarios) > 1 and vary:
        problems.append("--vary: goes with one scenario, whose values are compared; several files are compared as is")
    if len(scenarios) == 1 and not vary:
        problems.append(
            f"{scenarios[0]}: nothing to compare it with; give a second file, or --vary KEY=VALUE,VALUE, as in "
            "--vary engine.max_num_seqs=64,128"
        )
    if problems or not bases:
        raise ServecastError(*dict.fromkeys(problems or ["give two scenario files, or one and --vary KEY=VALUE,VALUE"]))
    if vary:
        axes = axes_of(vary)
        points = list(grid(axes))
        check_axes(bases[0], axes)
        if any("seed" in point for point in points):
            raise ServecastError("--vary seed: every scenario is run under the same seeds; say how many with --seeds")
        labels = _told_apart(map(_point_label, points))
        found = [Candidate(name, bases[0], point) for name, point in zip(labels, points, strict=True)]
    else:
        found = [Candidate(name, base, {}) for name, base in zip(_names(scenarios), bases, strict=True)]
    if not 2 <= len(found) <= MOST:
        raise ServecastError(
            f"{len(found)} scenarios: compare from 2 to {MOST}; `servecast sweep` takes more"
            if len(found) > MOST
            else f"--vary: {found[0].label} is the only value; give two or more"
        )
    return found


def _point_label(point: Point) -> str:
    """The keys' last words and the values; where that is long, what is text stands without its key."""
    named = [(f"{key.rpartition('.')[2]} {label(value)}", value) for key, value in point.items()]
    said = ", ".join(text for text, _ in named)
    if len(said) > LONGEST:
        said = ", ".join(value if isinstance(value, str) else text for text, value in named)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}..."


def _names(paths: Sequence[str | Path]) -> list[str]:
    """Short, and each another one."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else _told_apart(map(str, paths))


def _told_apart(texts: Iterable[str]) -> list[str]:
    """Numbered where they are the same."""
    texts = list(texts)
    return [text if texts.count(text) == 1 else f"{text} ({i + 1})" for i, text in enumerate(texts)]


def fingerprint(setup: Setup) -> str:
    """Of what is asked for and when: equal where two scenarios get the same requests. What engines and gateways make of
    them (caps, priorities) is not in it."""
    from joblib import hash as hashed

    r, t = setup.requests, setup.requests.trace
    turns = None if t.turns is None or not r.follow else (t.turns.previous, t.turns.think_s, t.turns.joins())
    arrivals = t.arrival_s if r.concurrency is None else r.concurrency
    classes = None if t.classes is None else (t.classes[0], list(t.classes[1]))
    found = [arrivals, r.think_s, t.prompt_tokens, t.output_tokens, t.prefix, turns, classes, t.patience_s, t.samples]
    if r.first_token_s is not None or r.retries is not None:
        found += [r.first_token_s, r.retries, r.backoff_s]
    return str(hashed(tuple(found)))


def limits(setup: Setup) -> Any:
    """What goodput counts."""
    return setup.scenario.slo.limits(), setup.requests.slo


def changes(first: Setup, other: Setup) -> tuple[tuple[str, str, str], ...]:
    """(key, value, other's value) of all that differs between the resolved scenarios, their names and seeds aside."""
    old, new = (_known(setup.resolved()) for setup in (first, other))
    return tuple(_unlike("", old, new))


def _known(resolved: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resolved.items() if key not in ("name", "seed")}


def _unlike(key: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old != new:
        old, new = ({str(i): value for i, value in enumerate(each)} for each in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _unlike(f"{key}.{name}".lstrip("."), old.get(name), new.get(name))
    elif old != new:
        yield key, _said(old), _said(new)


def _said(value: Any) -> str:
    text = "unset" if value is None else label(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
