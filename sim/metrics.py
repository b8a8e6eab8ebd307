"""What every metric means: the one place that defines them. Columns in, numbers out.

Definitions (those of `vllm bench serve` where it has the metric):

- TTFT: first token - arrival. E2E: last token - arrival. Arrival is when the client first sends the request, and tokens
  come when the client has them: the network there and back is in both, and so is what earlier tries took.
- Queue time: start of the request's first step - arrival of its last try at the gateway.
- TPOT: (E2E - TTFT) / (output tokens - 1), per request; undefined for one output token, and then left out.
- A request for several samples of one prompt is one request: TTFT to the first token of any, E2E to the last of all,
  output tokens those of all together, prompt tokens counted once; in its TPOT the output tokens are those of one.
- ITL: time between two consecutive tokens of a request; one value a token after the first.
- Throughput: finished requests, and their tokens, over `duration`: from time 0 to the last token.
- Gap: time between two consecutive messages of a request's stream: tokens, unless the server streams less often.
- Goodput: finished requests that meet every limit of the SLO, per second; an undefined TPOT meets a TPOT limit, and a
  request meets a limit on gaps if none of its gaps is longer.
- Percentiles interpolate linearly (numpy's default). Standard deviations are of the population.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)

MANY_STEPS = 2_000_000
"""Above this many logged steps, runs of steps are cut into that many pieces in all for the ITL distribution; each piece
stands for its steps with their mean duration."""

SAME_S = 1e-9
"""Seconds by which a gap may be over a limit and still meet it: the rounding of times."""

GROWTH_LIMIT = 0.03
"""Share of arrivals that pile up, above which a run counts as saturated."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values with integer weights, sorted: as if each value stood there `weight` times."""

    values: Floats
    cumulative: Floats  # weights up to and including each value

    @classmethod
    def of(cls, values: Floats, weights: Floats | None = None) -> Distribution:
        """Sort `values` [n]; `weights` [n] default to 1."""
        if weights is None:
            return cls(np.sort(values), np.arange(1.0, len(values) + 1))
        order = np.argsort(values, kind="stable")
        cumulative = weights[order]
        return cls(values[order], np.cumsum(cumulative, out=cumulative))

    @property
    def count(self) -> int:
        """How many values."""
        return int(self.cumulative[-1]) if len(self.cumulative) else 0

    def percentile(self, q: float) -> float:
        """The q-th percentile, interpolated linearly between neighbouring values."""
        position = q / 100 * (self.count - 1)
        low = np.floor(position)
        i, j = np.searchsorted(self.cumulative, [low, min(low + 1, self.count - 1)], side="right")
        a, b = float(self.values[i]), float(self.values[j])
        return a + (b - a) * float(position - low)

    def summary(self, name: str, scale: float = 1.0) -> dict[str, float | None]:
        """`mean_`, `median_`, `std_`, `p50_`, `p90_`, `p99_` + name, times `scale`; None where there is no value."""
        out: dict[str, float | None] = {f"{key}_{name}": None for key in ("mean", "median", "std")}
        out |= {f"p{q}_{name}": None for q in PERCENTILES}
        if self.count:
            weights = self.cumulative.copy()
            weights[1:] -= self.cumulative[:-1]
            mean = float(np.average(self.values, weights=weights))
            out[f"mean_{name}"] = mean * scale
            out[f"std_{name}"] = float(np.sqrt(np.average((self.values - mean) ** 2, weights=weights))) * scale
            out |= {f"p{q}_{name}": self.percentile(q) * scale for q in PERCENTILES}
            out[f"median_{name}"] = out[f"p50_{name}"]
        return out


def arrived_s(requests: Mapping[str, Floats]) -> Floats:
    """When the last try of each request got to the gateway."""
    return requests["arrival_s"] + requests["retried_s"] + requests["network_s"] / 2


def queue_s(requests: Mapping[str, Floats]) -> Floats:
    """Wait for the first step, per finished request."""
    return requests["scheduled_s"] - arrived_s(requests)


def ttft_s(requests: Mapping[str, Floats]) -> Floats:
    """Time to first token, per finished request."""
    return requests["first_token_s"] - requests["arrival_s"] + requests["network_s"] / 2


def e2e_s(requests: Mapping[str, Floats]) -> Floats:
    """Arrival to last token, per finished request."""
    return requests["finish_s"] - requests["arrival_s"] + requests["network_s"] / 2


def tpot_s(requests: Mapping[str, Floats]) -> Floats:
    """Time per output token after the first, per finished request; NaN where there was only one."""
    gaps = requests["output_tokens"] / requests["samples"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gaps > 0, (requests["finish_s"] - requests["first_token_s"]) / gaps, np.nan)


def itl(steps: Sequence[Mapping[str, Floats]], long_gaps: Mapping[str, Floats]) -> Distribution:
    """Time between consecutive tokens, over all requests, from the step log (in pieces): rows, and the log of the gaps
    that span several steps."""
    total = sum(int(log["steps"][log["gaps"] > 0].sum()) for log in steps)
    parts = [_gaps(log, total) for log in steps]
    values = np.concatenate([*(value for value, _ in parts), long_gaps["end_s"] - long_gaps["since_s"]])
    weights = np.concatenate([*(weight for _, weight in parts), long_gaps["tokens"]])
    del parts  # a long log fills memory here
    return Distribution.of(values, weights)


def _gaps(steps: Mapping[str, Floats], total: int) -> tuple[Floats, Floats]:
    """(seconds, how many) of the token gaps in some rows of a step log that counts `total` steps with gaps in all."""
    gaps = steps["gaps"]
    rows = np.flatnonzero(gaps > 0)
    count = steps["steps"][rows].astype(np.int64)
    first, length = steps["first_step_s"][rows], steps["end_s"][rows] - steps["start_s"][rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(count > 1, 2 * (length - count * first) / (count * (count - 1)), 0.0)
    pieces = np.maximum(1, count * MANY_STEPS // total) if total > MANY_STEPS else count
    row = np.repeat(np.arange(len(rows)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin, end = piece * count[row] // pieces[row], (piece + 1) * count[row] // pieces[row]
    return first[row] + slope[row] * (begin + end - 1) / 2, gaps[rows][row] * (end - begin)


def meets(
    requests: Mapping[str, Floats], slo: Mapping[str, float], longest_gap_s: Floats | None = None
) -> npt.NDArray[np.bool_]:
    """Per finished request, whether it meets every limit of `slo` (`ttft`, `tpot`, `e2e`, and `gap` if they are given,
    in seconds, inclusive)."""
    good = np.ones(len(requests["id"]), dtype=bool)
    measures = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
    for name, limit in slo.items():
        if name == "gap":
            assert longest_gap_s is not None
            good &= ~(longest_gap_s > limit + SAME_S)
        else:
            good &= ~(measures[name](requests) > limit)  # NaN (no TPOT) is not over the limit
    return good


def in_system(requests: Mapping[str, Floats], until: str) -> tuple[Floats, Floats]:
    """(times, number of requests that have arrived and not reached `until` from each time on), both [2n].

    Where one leaves at the very time when another one arrives, the one that leaves goes first.
    """
    left = requests[until]
    times = np.concatenate([left, requests["arrival_s"]])
    order = np.argsort(times, kind="stable")
    times, leaves = times[order], order < len(left)
    del order  # of many millions, too
    return times, np.cumsum(1.0 - 2.0 * leaves)


def time_average(times: Floats, values: Floats, start: float, end: float) -> float:
    """Mean over [start, end] of the step function that takes `values[i]` from `times[i]` on (0 before the first)."""
    edges = np.concatenate([[start], np.clip(times, start, end), [end]])
    return float(np.dot(np.concatenate([[0.0], values]), np.diff(edges))) / (end - start)


@dataclass(frozen=True, slots=True)
class Saturation:
    """Whether work piled up. `saturated` is None where that cannot be said; `why` says how it was judged. `undecided`:
    it could have, and a longer run would tell."""

    saturated: bool | None
    why: str
    undecided: bool = False


def saturation(requests: Mapping[str, Floats]) -> Saturation:
    """Did arrivals outrun the replicas? `requests` are the accepted ones, `left_queue_s` when each was begun,
    `left_s` when it was over (inf: not yet).

    Judged on the requests in the system while requests were still arriving.

    The time from the first to the last arrival is cut into quarters. From the second to the last quarter, the mean
    number of requests in the system (waiting or running) grows by a share of the requests that arrived meanwhile: in
    a system that keeps up that share is about 0, at a load of 1 + x times what it can serve about x / (1 + x). More
    than 3 %, and more than chance explains (three times the square root of the number in the system), is saturated.
    On single- and 30-server queues with lognormal service (CV 1) and 2,000 requests this says saturated in none of 60
    runs at a load of 0.9, in 10 % at 0.95, in 75 % at 1.06, 90 % at 1.1 and all at 1.3; with 10,000 requests in none at
    0.98, and in 95 % at 1.06; with 500 it is wrong in up to 20 % at 0.9.
    Requests that need more than half of the window for themselves make it too short to tell.
    """
    arrivals = np.sort(requests["arrival_s"])
    if len(arrivals) < 2 or arrivals[0] == arrivals[-1]:
        return Saturation(None, "not applicable: all requests arrive at once")
    start, end = float(arrivals[0]), float(arrivals[-1])
    edges = np.linspace(start, end, 5)
    early = requests["arrival_s"] <= edges[1]
    left, begun = requests["left_s"][early], requests["left_queue_s"][early]
    served = left[begun < left] - begun[begun < left]
    if served.size and float(np.median(served)) > (end - start) / 2:
        return Saturation(
            None,
            "undecided: the first requests take longer than half of the time in which requests arrive",
            undecided=True,
        )
    times, count = in_system(requests, "left_s")
    before, after = (time_average(times, count, float(edges[i]), float(edges[i + 1])) for i in (1, 3))
    middles = (edges[1:] + edges[:-1]) / 2
    arrived = int(np.searchsorted(arrivals, middles[3]) - np.searchsorted(arrivals, middles[1]))
    growth = after - before
    saturated = growth > GROWTH_LIMIT * arrived and growth > 3 * np.sqrt(before + 1)
    return Saturation(
        bool(saturated),
        f"requests in the system went from {before:.1f} (second quarter of the arrivals) to {after:.1f} (last quarter) "
        f"while {arrived} arrived: {'work piles up' if saturated else 'the replicas keep up'}",
    )
