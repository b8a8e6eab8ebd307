"""What a scenario says of replicas that fail, start and stop, and of what a gateway turns away."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from servecast.mistakes import MistakeError
from servecast.parts import Count, Part, Time
from servecast.units import Duration

Moment = Annotated[Duration, Field(ge=0, lt=1e9)]
Long = Annotated[Duration, Field(ge=1, lt=1e9)]


class FailuresPart(Part):
    """Each replica of the pool fails after `mtbf` on average, and serves again after `repair`; unset: never."""

    mtbf: Long
    repair: Moment | None = None


class AutoscalePart(Part):
    """The pool has from `min` to `max` replicas, so that `metric` is at `target`: `outstanding` or `waiting` requests a
    replica, the share of the `kv` cache in use, or the share of the requests over in the last `window` that met their
    SLO (`slo`; a limit on gaps left out). Looked at `every` so often; nothing happens within `tolerance` of the target,
    nor until it has asked for more for `up_after`, or for fewer for `down_after`."""

    min: Count
    max: Annotated[int, Field(ge=1, le=100_000)]
    metric: Literal["outstanding", "waiting", "kv", "slo"] = "outstanding"
    target: Annotated[float, Field(gt=0, lt=1e9)]
    every: Annotated[Duration, Field(ge=0.1, lt=3600)] = 15.0
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    up_after: Time = 0.0
    down_after: Annotated[Duration, Field(ge=0, le=86400)] = 300.0
    window: Annotated[Duration, Field(gt=0, le=86400)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> AutoscalePart:
        problems = []
        if self.min > self.max:
            problems.append(f".min: {self.min} is more than max, {self.max}")
        if self.metric in ("kv", "slo") and self.target > 1:
            problems.append(f".target: {self.target:g} is no share; the target of {self.metric} is from 0 to 1")
        if self.metric == "slo" and self.window is None:
            problems.append(".window: missing; over how long attainment is looked at, for example 2min")
        if self.metric != "slo" and self.window is not None:
            problems.append(f".window: {self.metric} is looked at as it is; leave window out, or set metric: slo")
        if problems:
            raise MistakeError(problems)
        return self


class EventPart(Part):
    """At a time the replica at a place of its pool (0 is the first) fails (`fail`), and serves again after `repair`
    (unset: never), or is drained (`drain`); or so many more are started (`start`). `pool` is the pool's name, where
    there are several."""

    at: Moment
    pool: str | None = None
    fail: Annotated[int, Field(ge=0)] | None = None
    drain: Annotated[int, Field(ge=0)] | None = None
    start: Annotated[int, Field(ge=1, le=100_000)] | None = None
    repair: Moment | None = None

    @model_validator(mode="after")
    def _one(self) -> EventPart:
        problems = []
        if len(self.kinds) != 1:
            found = " and ".join(self.kinds) or "none"
            problems.append(f": one of fail, drain and start says what happens; here is {found}")
        if self.repair is not None and self.fail is None:
            problems.append(".repair: only what fails is repaired; leave it out")
        if problems:
            raise MistakeError(problems)
        return self

    @property
    def kinds(self) -> list[str]:
        """Which of the three it is."""
        return [kind for kind in ("fail", "drain", "start") if getattr(self, kind) is not None]


class LimitsPart(Part):
    """What the gateway turns away: requests while so many are `outstanding`, in all or for each replica that takes
    requests, and those with longer prompts."""

    outstanding: Count | None = None
    outstanding_per_replica: Count | None = None
    prompt_tokens: Count | None = None

    @model_validator(mode="after")
    def _some(self) -> LimitsPart:
        if not self.model_fields_set:
            raise MistakeError([f": empty; give {', '.join(LimitsPart.model_fields)}, or leave limits out"])
        return self
