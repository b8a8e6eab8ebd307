"""A measured run as points to fit to: simulated with candidate scalars, compared figure by figure. It knows no fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.anchor import Floats, Ints, Values
from calibrate.scaled import PRICED, Scaled
from reports.words import requests as counted
from servecast.errors import ServecastError
from servecast.host_part import HostPart, with_host
from servecast.pools import costs
from servecast.run import simulate
from servecast.scenario import Scenario, load_scenario
from servecast.setup import Setup, set_up
from servecast.units import duration_text
from servecast.validation.checks import warnings_of
from servecast.validation.replay import Replay, replay_of
from sim.metrics import Distribution

if TYPE_CHECKING:
    from reports.measured import MeasuredRun

FLOOR, COMPOSITION = 0.02, 0.03
"""Errors that no scalar takes away: of any figure; and of kernels from step to step, which counts times a figure's
slope in the factor on kernels (the waiting time of an overloaded engine moves by several times as much)."""


CLIENTS_BIND = 0.8
"""With so large a share of the client's limit in the system on average, requests wait for answers, not for a rate."""


FEW, ENOUGH = 20, 40
"""Requests or steps that are compared at least, and of which halves are made."""


UNLIKE = 0.1
"""Tokens of the scenario's requests may differ by this share, or by chance, from those that were measured."""


METRICS = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "e2el_ms": "e2e_s"}
"""Ending of the summary's keys -> column of the requests."""


STATS = ("mean", "p50")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some requests of a run (positions in what is simulated, None: all) and what was measured of them: figures under
    the keys of `Result.summary`, milliseconds."""

    at: Ints | None
    measured: Mapping[str, float]


class Point:
    """A measured run beside its simulation: `fit` are the parts that are fitted to, `check` is what errors are of."""

    def __init__(self, name: str, run: MeasuredRun, replay: Replay, done: Callable[[], None]) -> None:
        self.name, self.setup = name, replay.setup
        self.notes = [said.rstrip(".") for said in (replay.said, *warnings_of(run, replay), *run.doubts)]
        self._done = done
        self._known: dict[tuple[float, ...], Mapping[str, Floats]] = {}
        self._measured: dict[str, Floats] = {}
        stated = {f"{stat}_{key}" for stat, key in product(STATS, METRICS)}
        self.check = Part(None, {k: v for k, v in run.summary.items() if k in stated and v > 0})
        self.fit = [self.check]
        if replay.rows is not None and run.requests is not None:
            frame = run.requests[replay.rows]
            columns = {key: frame[name].fill_null(np.nan).to_numpy() for key, name in METRICS.items()}
            self._measured = {key: np.where(column > 0, column, np.nan) for key, column in columns.items()}
            self.check, self.fit = self._part(every := np.arange(len(frame))), self._by_length(every)
        count = run.completed if replay.rows is None else len(replay.rows)
        if count is not None and count < FEW:
            raise ServecastError(f"{name}: only {counted(count)}; measure {FEW} or more")
        if not self.check.measured:
            raise ServecastError(f"{name}: states no TTFT, TPOT or E2E; nothing can be fitted to it")

    def halve(self) -> bool:
        """Fit to the first half in time only, and check with the second; False where there are too few requests."""
        if not self._measured or (count := len(self._measured["ttft_ms"])) < ENOUGH:
            return False
        self.fit, self.check = self._by_length(np.arange(count // 2)), self._part(np.arange(count // 2, count))
        return True

    def errors(self, values: Values) -> Floats:
        """log(predicted / measured) of every fitted part's TTFT and TPOT, or E2E in place of one that is not there: the
        mean of those of mean and p50, which are hardly two data."""
        columns = self._simulated(values)
        found = []
        for part in self.fit:
            off = _logs(_figures(columns, part.at), part.measured)
            both = all(any(key.endswith(metric) for key in off) for metric in ("ttft_ms", "tpot_ms"))
            for metric in list(METRICS)[: 2 if both else 3]:
                each = [value for key, value in off.items() if key.endswith(metric)]
                found += [(metric, part.at, float(np.mean(each)))] if each else []
        self._fitted = [(metric, at) for metric, at, _ in found]
        return np.array([off for _, _, off in found])

    def noise(self, base: Values, probe: Values) -> Floats:
        """Standard deviations of `errors`; `probe` has another factor on kernels than `base`."""
        slope = (self.errors(probe) - self.errors(base)) / log(probe["kernels"] / base["kernels"])
        columns, chance = self._simulated(base), []
        for metric, at in self._fitted:
            if at is None:  # other requests were measured than are simulated: both means are of draws
                own = columns[metric][~np.isnan(columns[metric])]
                chance.append(2 * (own.std() / own.mean()) ** 2 / len(own))
            else:
                ratio = np.log(columns[metric][at] / self._measured[metric][at])
                ratio = ratio[~np.isnan(ratio)]
                chance.append(ratio.var() / len(ratio) if len(ratio) else 0.0)
        return np.asarray(np.sqrt(FLOOR**2 + (COMPOSITION * slope) ** 2 + np.array(chance)))

    def compared(self, before: Values, after: Values) -> Iterator[Error]:
        """The errors of the part that is checked, metric by metric."""
        offs = [_logs(_figures(self._simulated(v), self.check.at), self.check.measured) for v in (before, after)]
        for metric in METRICS:
            keys = [f"{stat}_{metric}" for stat in STATS]
            if any(key in offs[0] for key in keys):
                yield Error(self.name, metric, *(tuple(share_of(off.get(key)) for key in keys) for off in offs))

    def _part(self, at: Ints) -> Part:
        return Part(at, _figures(self._measured, at))

    def _by_length(self, at: Ints) -> list[Part]:
        """Requests with short and with long prompts apart, where they differ: what a prompt's kernels take shows."""
        prompt = self.setup.requests.trace.prompt_tokens[at]
        long = prompt > np.median(prompt)
        if min(long.sum(), (~long).sum()) < FEW or prompt[long].mean() < 1.5 * prompt[~long].mean():
            return [self._part(at)]
        return [self._part(at[~long]), self._part(at[long])]

    def _simulated(self, values: Values) -> Mapping[str, Floats]:
        """Latencies of every request, seconds; NaN where there are none."""
        key = tuple(float(f"{values[name]:.10g}") for name in sorted(values))
        if key not in self._known:
            result = simulate(with_values(self.setup, values))
            if self._measured and result.finished < result.submitted:
                lost = result.submitted - result.finished
                raise ServecastError(
                    f"{self.name}: the scenario's engine refuses {counted(lost)} of the run; is its max_model_len, or "
                    "its memory for KV, that of the engine that was measured?"
                )
            self._known[key] = {name: result.column(column) for name, column in METRICS.items()}
            self._done()
        return self._known[key]


def with_values(setup: Setup, values: Values) -> Setup:
    """The setup at these host times (seconds) and this factor on kernels, instead of the scenario's."""
    times = {name: duration_text(value) for name, value in values.items() if name != "kernels"}
    engine = with_host(setup.pool.engine, HostPart.model_validate(times))
    factor = values["kernels"] / factor_of(setup)
    prices = Scaled(setup.pool.prices, dict.fromkeys(PRICED, factor))
    found = costs(setup.pool.model, setup.pool.layout, engine, prices)
    return setup.with_pool(engine=engine, **found._asdict())


def point_replay(path: Path, run: MeasuredRun) -> tuple[MeasuredRun, Replay]:
    """The run, and the scenario under its load: recorded requests, or the scenario's at the stated rate or clients."""
    import polars as pl

    clients = _clients(run)
    setup = set_up(load_scenario(path, _load(load_scenario(path), run, clients)))
    if run.requests is not None and clients is not None and setup.requests.concurrency == clients:
        # they were sent when answers came: at the recorded times they would pile up behind a slower candidate
        run = replace(run, requests=run.requests.sort("sent_s").with_columns(sent_s=pl.lit(None, pl.Float64)))
    replay = replay_of(run, setup)
    if replay.rows is None:
        _check_lengths(run, setup)
    return run, replay


def _load(scenario: Scenario, run: MeasuredRun, clients: int | None) -> dict[str, object]:
    """Overrides of a generated workload: the rate, or the clients that bind, and the requests of the run."""
    workload = scenario.workload
    if workload.kind not in ("arrivals", "closed_loop"):
        return {}
    count = None if run.completed is None else run.completed + (run.failed or 0)
    out: dict[str, object] = {} if count is None else {"workload.num_requests": max(count, 1)}
    if clients is not None:
        think = {} if workload.closed_loop is None else {"think": workload.closed_loop.think}
        return out | {"workload.closed_loop": {"concurrency": clients} | think, "workload.arrivals": None}
    if run.rate is None:
        return out
    own = workload.arrivals if workload.arrivals and "rate" in workload.arrivals else {"kind": "poisson"}
    return out | {"workload.arrivals": {**own, "rate": run.rate}, "workload.closed_loop": None}


def _clients(run: MeasuredRun) -> int | None:
    """How many clients waited for their answers, as far as the file says; None where a rate decided."""
    if run.concurrency is None:
        return None
    count, told = run.completed, run.summary
    lasting = told.get("mean_e2el_ms", told.get("mean_tpot_ms", 0) * told.get("mean_output_tokens_per_request", 0))
    if run.rate is not None and lasting and count is not None and run.duration_s:
        inside = 1e-3 * lasting * count / run.duration_s  # Little's law
        if inside < CLIENTS_BIND * min(run.concurrency, count):
            return None
    return round(run.concurrency)


def _check_lengths(run: MeasuredRun, setup: Setup) -> None:
    """Aggregates are compared with the scenario's requests, which must be such as were measured."""
    trace = setup.requests.trace
    both = (("prompts", "input", trace.prompt_tokens), ("answers", "output", trace.output_tokens))
    problems = []
    for what, key, ours in both:
        theirs = run.summary.get(f"total_{key}_tokens", 0.0) / (run.completed or 1)
        chance = 3 * float(ours.std() / ours.mean()) / len(ours) ** 0.5
        if theirs > 0 and abs(float(ours.mean()) / theirs - 1) > max(UNLIKE, chance):
            problems.append(
                f"{run.source}: its {what} have {theirs:,.0f} tokens on average, the scenario's {ours.mean():,.0f}; "
                "describe the measured workload in the scenario, or save the run with its requests"
            )
    if problems:
        raise ServecastError(*problems)


def _figures(columns: Mapping[str, Floats], at: Ints | None) -> dict[str, float]:
    """Mean and p50 of what is there, as in `Result.summary`."""
    out: dict[str, float] = {}
    for metric, values in columns.items():
        some = values if at is None else values[at]
        summary = Distribution.of(some[~np.isnan(some)]).summary(metric, 1e3)
        out |= {key: v for stat in STATS if (v := summary[key := f"{stat}_{metric}"]) is not None and v > 0}
    return out


def _logs(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    return {key: log(predicted[key] / value) for key, value in measured.items() if key in predicted}


@dataclass(frozen=True, slots=True)
class Error:
    """How far figures are off before and after: shares of the measured values, one for each of `Anchored.heads`."""

    of: str
    what: str
    before: tuple[float | None, ...]
    after: tuple[float | None, ...]


def factor_of(setup: Setup) -> float:
    return setup.scenario.host.kernels or 1.0


def share_of(off: float | None) -> float | None:
    return None if off is None else exp(off) - 1
