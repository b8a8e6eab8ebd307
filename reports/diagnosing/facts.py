"""What a diagnosis has found: symptoms, causes that were tried, and those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from reports.words import quantity, seconds

LATENCIES = ("ttft", "tpot", "e2e", "queue", "itl")
MORE_IS_BETTER = ("throughput", "goodput", "hit rate")
SHOWN = 0.7
"""A simulation shows a symptom where it has this much of it at least: forecasts of TTFT are off by 5 to 33 % in the
median (docs/accuracy.md)."""

Price = Literal["", "bits", "gpus", "bound"]


@dataclass(frozen=True, slots=True)
class Symptom:
    """A figure that is not as it should be: `stat` ("mean", or a percentile in percent) of a latency in seconds, of
    class `group` (all, where empty); a rate in `unit`; or a share. `observed` on the real server, `limit`: what is
    allowed; `simulated`: what the simulation has. `source` says who told."""

    metric: str
    stat: float | str = ""
    group: str = ""
    observed: float | None = None
    limit: float | None = None
    unit: str = ""
    source: str = ""
    simulated: float | None = None

    def seen(self, observed: float) -> Symptom:
        """The same with what was observed."""
        return replace(self, observed=observed)

    @property
    def name(self) -> str:
        """As people write it."""
        of = f"{self.group}: " if self.group else ""
        stat = f"p{self.stat:g} " if isinstance(self.stat, float) else f"{self.stat} " if self.stat else ""
        return f"{of}{stat}{self.metric}"

    def said(self, value: float | None) -> str:
        """A value of it, for people."""
        if value is None:
            return "none"
        if self.metric in LATENCIES:
            return seconds(value)
        if self.metric == "throughput":
            return f"{quantity(value)} {self.unit or 'tokens/s'}"
        return f"{100 * value:.3g} %"

    def badness(self, value: float) -> float:
        """How bad a value is: larger is worse, 0 is perfect."""
        if self.metric == "throughput":
            return 1 / value if value > 0 else float("inf")
        return 1 - value if self.metric in MORE_IS_BETTER else value

    def fine(self, value: float | None) -> bool:
        """Whether a value is within the limit."""
        return value is None or self.limit is None or value <= self.limit

    @property
    def shown(self) -> bool:
        """Whether the simulation shows it."""
        if self.simulated is None:
            return False
        if self.observed is None:
            return not self.fine(self.simulated) or (self.limit is None and self.badness(self.simulated) > 0)
        return self.badness(self.simulated) >= SHOWN * self.badness(self.observed) and self.badness(self.simulated) > 0

    def gone(self, before: float | None, after: float | None) -> float | None:
        """How much of it a change takes away: 1 all, as far as the limit asks, 0 nothing; -1 where it doubles (and no
        less), or no request has the figure any more. None where it was not there before."""
        floor = 0.0 if self.limit is None else self.badness(self.limit)
        worst = 0.0 if before is None else self.badness(before) - floor
        if worst <= 0:
            return None
        left = float("inf") if after is None else max(self.badness(after), floor) - floor
        return 1 - left / worst if left < 2 * worst else -1.0


@dataclass(frozen=True, slots=True)
class Tried:
    """A cause that was taken away by `change` (`sets`: as keys of the scenario, `flags`: on the server's command line,
    where it is written so).

    `gone`: the share of the symptoms that goes with it, the mean over them and over the seeds that show them, plus or
    minus `half` (95 %; None: one run, which says nothing). `effects`: of each symptom (before, after), under the first
    seed. `price`: what it costs beside a setting: fewer bits, more GPUs, or that it is a bound that nobody reaches.
    `worse`: other figures (name, before, after) that it harms. `score`: what it is ranked by. `check`: where to look on
    the real server."""

    cause: str
    words: str
    pool: str
    why: str
    change: str
    sets: tuple[str, ...]
    flags: tuple[str, ...]
    price: Price
    gone: float
    half: float | None
    effects: tuple[tuple[float | None, float | None], ...]
    worse: tuple[tuple[str, str, str], ...]
    score: float
    likely: bool
    check: str


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A cause whose precondition is absent, with the number that says so; or that cannot be tried (`tried` False)."""

    cause: str
    words: str
    pool: str
    why: str
    possible: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What was found. `verdict`: healthy (nothing is wrong in the simulation, and nobody says so), outside (the
    simulation does not show what is wrong), found, or unexplained (no cause takes any of it away).

    `tried` in order, the most likely first. `figures`: the simulated run, in words; `undecided`: it is too short to
    tell whether work piles up; `asked`: whose latencies are held against an SLO ("" where there is none). Where the
    simulation does not show the symptoms: `instead`, what it shows; `like`, what would make it show them; `compare`,
    what to look at on the real server. `requests` of each run, of `of` in all; `runs`: simulations in all; `seeds`;
    `one_course`: why nothing is said of chance, else empty."""

    title: str
    setup: str
    verdict: Literal["healthy", "outside", "found", "unexplained"]
    symptoms: tuple[Symptom, ...]
    tried: tuple[Tried, ...]
    ruled_out: tuple[RuledOut, ...]
    figures: tuple[tuple[str, str], ...]
    undecided: bool
    asked: Literal["", "simulated", "measured"]
    instead: tuple[str, ...]
    like: tuple[str, ...]
    compare: tuple[str, ...]
    notices: tuple[str, ...]
    requests: int
    of: int
    runs: int
    seeds: tuple[int, ...]
    one_course: str
    engine: str
    version: str

    @property
    def likely(self) -> tuple[Tried, ...]:
        """The causes that take something away, beyond chance."""
        return tuple(cause for cause in self.tried if cause.likely)

    @property
    def foremost(self) -> tuple[Tried, ...]:
        """Of these the first, and those that take half as much away at least."""
        return tuple(cause for cause in self.likely if cause.gone >= self.likely[0].gone / 2)


def plain(found: Diagnosed) -> Mapping[str, Any]:
    """All of it as JSON values: seconds and shares."""
    plain = asdict(found)
    for shown, symptom in zip(plain["symptoms"], found.symptoms, strict=True):
        shown |= {"name": symptom.name, "shown": symptom.shown}
    return plain
