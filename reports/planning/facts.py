"""What a plan found, in plain figures and words: `servecast/planning/facts.py` makes them, reports show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HOURS_A_MONTH = 730


@dataclass(frozen=True, slots=True)
class Figure:
    """A required figure: what is required, what comes out (None: no request has it), in seconds or as a share."""

    required: str
    metric: str
    limit: float
    value: float | None
    shown: str
    met: bool


@dataclass(frozen=True, slots=True)
class Option:
    """A configuration: `what` it is, with so many replicas (or units), GPUs, and dollars per hour for the `charged`
    GPUs, of which the idle ones hold `free` replicas more; `status` as `servecast.planning.examine` says it, and `why`.
    `figures` of the run with that many; `tried`: replicas -> whether they meet everything."""

    what: str
    gpu: str
    status: str
    replicas: int
    gpus: int
    charged: int
    free: int
    dollars_per_hour: float | None
    why: str
    figures: tuple[Figure, ...] = ()
    tried: Mapping[int, bool] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of the answer under a changed load: in words, whether all is met, and what is missed by most."""

    what: str
    factor: float
    met: bool
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation: dollars per hour, and the first required latency (seconds) where all else is met."""

    dollars_per_hour: float
    value: float
    what: str
    met: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """The cheapest that was found under another limit (seconds) of the first required latency, `required`: `what`,
    with spare replicas, and dollars per hour; empty and None where nothing that was tried meets it. `same`: the
    answer itself."""

    required: str
    limit: float
    what: str
    dollars_per_hour: float | None
    same: bool


@dataclass(frozen=True, slots=True)
class Month:
    """A month, the first is 1: the traffic as a `factor` on today's, and the fleet that it takes, spare replicas
    included; None where that is more than there may be."""

    number: int
    factor: float
    replicas: int | None
    gpus: int | None
    dollars: float | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many replicas, spare ones included, from month `since` on. `carries`: the largest factor on today's traffic
    that was found to be met; `proven`: a few percent more is not."""

    replicas: int
    gpus: int
    charged: int
    dollars: float
    since: int
    carries: float
    proven: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """The answer under traffic that is `1 + rate` times as much every month. `dollars` over all months, None where one
    takes more GPUs than there may be. `over_budget`: the first month that takes more than the budget."""

    rate: float
    months: tuple[Month, ...]
    fleets: tuple[Fleet, ...]
    dollars: float | None
    over_budget: int | None
    simulations: int


@dataclass(frozen=True, slots=True)
class Hour:
    """A part of the day, from `start_s` on for `length_s` seconds: its traffic as a `factor` on the peak's, and the
    fleet that it takes, spare replicas included (None: more than there may be)."""

    start_s: float
    length_s: float
    factor: float
    replicas: int | None
    gpus: int | None


@dataclass(frozen=True, slots=True)
class Day:
    """The answer with replicas that come and go. `rate` of the peak in requests per second. GPU-hours that are paid for
    and dollars, of one day (`period_s`), against a fleet that has as many all the time as the busiest hour; None where
    an hour takes more GPUs than there may be. `starts` a day, of `start_s` seconds each, which are paid for too; None
    where nobody knows how long. `checked`: the figures of the workload's own day, simulated with that fleet, `met`
    where all is met; empty where it has no such day."""

    period_s: float
    rate: float | None
    hours: tuple[Hour, ...]
    gpu_hours: float | None
    dollars: float | None
    static_gpus: int | None
    static_dollars: float | None
    starts: int
    start_s: float | None
    checked: tuple[Figure, ...]
    met: bool
    why: str
    simulations: int


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan. `answer` is None where nothing meets the requirements, and `closest` then misses by least.

    `spare` replicas are in the answer's GPUs and price. `verified`: the figures of each run on a fresh seed with
    `verified_requests` requests, of which the percentiles ask for `enough_requests`, or, where no seed changes the
    requests (`one_course`), of the run itself; `raised`: replicas that these runs added. `headroom`: the factor on
    the traffic up to which all is met, None beyond what was tried; `breaks`: what fails there. `draws` of the error
    of prices, of which `draws_met` meet everything. `limit`: that of the `points`, in seconds. `rate`: requests per
    second, None of closed loops.
    """

    title: str
    traffic: str
    rate: float | None
    required: tuple[str, ...]
    answer: Option | None
    spare: int
    raised: int
    starts: tuple[str, ...]
    verified: tuple[tuple[Figure, ...], ...]
    verified_requests: int
    enough_requests: int
    one_course: bool
    headroom: float | None
    breaks: str
    changes: tuple[Change, ...]
    draws: int
    draws_met: int
    runner_up: Option | None
    closest: Option | None
    options: tuple[Option, ...]
    same: int
    simulations: int
    points: tuple[Point, ...]
    limit: float | None
    limits: tuple[Limit, ...]
    growth: Growth | None
    day: Day | None
    prices: Mapping[str, float]
    price_source: str
    notes: tuple[str, ...]
    scenario: str
    version: str

    @property
    def counts(self) -> dict[str, int]:
        """Status -> configurations."""
        found: dict[str, int] = {}
        for option in self.options:
            found[option.status] = found.get(option.status, 0) + 1
        return found

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"counts": self.counts}
