"""What a validation says to people, as plain text: how far off, in which figure, and what may explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from reports.validation.causes import CAUTION
from reports.validation.compared import STATS
from reports.words import METRICS, NONE, latency_unit, percent, quantity, requests, seconds

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from reports.validation.causes import Cause, Causes
    from reports.validation.compared import Validation

SIDES = ("forecast", "measured", "error")
NOTHING = "Nothing that we vary explains it."
MEAN_ERROR = (
    "the factor by which the latencies (mean, p50, p90, p99 of each that was measured) and the output throughput are "
    "off on average, less 1; logarithms are averaged, so twice as much and half as much count alike"
)
TOOLS = {"vllm": "vllm bench serve", "sglang": "sglang bench_serving", "aiperf_records": "aiperf", "vllm_cpu": "csv"}
"""Format -> the tool, where they are called differently."""


def signed(error: float | None) -> str:
    """`+4.2 %`; whole percents from 10 on, a factor where it is more than fivefold."""
    if error is None:
        return NONE
    if abs(error) < 5e-4:
        return "0 %"
    if error >= 4:
        return f"x {quantity(1 + error)}"
    return f"{100 * error:+.{0 if abs(error) >= 0.0995 else 1}f} %".replace("-", "−")


def share(error: float) -> str:
    """An error without its sign: `14 %`, `3.2 %`."""
    return f"{100 * error:,.{0 if error >= 0.0995 else 1}f} %"


def mean_error(error: float, beside: float = 0.0) -> str:
    """A mean error: `14 %`, and from twice as much on `a factor of 2.3`; alike where one of two is that large."""
    return share(error) if max(error, beside) < 1 else f"a factor of {quantity(1 + error)}"


def title(validation: Validation) -> str:
    """The scenario's name and what it is compared with."""
    return f"{validation.result.manifest.get('name') or 'servecast run'}: forecast and measurement"


def measured_by(run: MeasuredRun) -> str:
    """Who measured, what ran, and the file, in one line."""
    facts = [
        f"{TOOLS.get(run.tool, run.tool)} {run.version}".strip(),
        run.model,
        None if run.completed is None else f"{requests(run.completed)} completed",
        None if run.duration_s is None else f"in {seconds(run.duration_s)}",
        None if run.rate is None else f"rate {quantity(run.rate)}/s",
        None if run.concurrency is None else f"at most {run.concurrency:,.0f} at a time",
    ]
    return f"{', '.join(fact for fact in facts if fact).replace('completed, in', 'completed in')}: {run.source}"


def verdict(v: Validation) -> str:
    """The answer in a sentence."""
    if v.mean_error is None:
        return "Nothing of what was measured can be compared."
    for stat, kind in (("mean", "means"), ("p50", "medians")):
        known = {name: v.errors[f"{stat}_{key}"] for name, key in METRICS.items() if f"{stat}_{key}" in v.errors}
        if "TPOT" in known:
            known.pop("ITL", None)  # it says the same
        if known:
            listed = ", ".join(f"{name} {signed(error)}" for name, error in known.items())
            return f"Off by {mean_error(v.mean_error)} on average; {kind}: {listed}."
    return f"Off by {mean_error(v.mean_error)} on average."


def rows(v: Validation) -> list[tuple[str, str, list[tuple[str, list[str]]]]]:
    """(metric, unit, [(side, mean to p99)]) of every latency that a side has, both sides in one unit."""
    out = []
    for name, key in METRICS.items():
        keys = [f"{stat}_{key}" for stat in STATS]
        known = [side[k] for side in (v.predicted, v.measured) for k in keys if k in side]
        if not known or not any(k in v.measured for k in keys):
            continue
        scale, unit = latency_unit(max(known))
        sides = [
            (said, [quantity(side[k] * scale) if k in side else NONE for k in keys])
            for said, side in zip(SIDES, (v.predicted, v.measured), strict=False)
        ]
        out.append((name, unit, [*sides, ("error", [signed(v.errors.get(k)) for k in keys])]))
    return out


def others(v: Validation) -> list[tuple[str, str, str, float | None]]:
    """(what and in which unit, forecast, measured, error) of everything that is no latency."""
    spelt: dict[str, tuple[str, Callable[[float], str]]] = {
        "request_throughput": ("Requests/s", quantity),
        "output_throughput": ("Output tokens/s", quantity),
        "duration": ("Duration", seconds),
        "kv_mean_fraction": ("KV cache, mean", percent),
        "kv_peak_fraction": ("KV cache, peak", percent),
    }
    return [
        (name, say(v.predicted[key]), say(v.measured[key]), v.errors.get(key))
        for key, (name, say) in spelt.items()
        if key in v.predicted and key in v.measured
    ]


def per_request(v: Validation) -> list[tuple[str, str, str, str]]:
    """(metric, requests, mean absolute error, correlation) of the requests that both sides have."""
    return [
        (
            {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}[metric],
            f"{found['count']:,.0f}",
            share(found["mape"]),
            f"{math.floor(1e3 * found['correlation']) / 1e3:.3f}" if "correlation" in found else NONE,
        )
        for metric, found in v.per_request.items()
    ]


def causes(found: Causes) -> tuple[str, list[Cause]]:
    """What is to be said of the causes, and those to list below it."""
    if found.mean_error is None or found.why_none:
        return (f"No cause was looked for: {found.why_none}.", [])
    tried = f"{len(found.tried)} changes were simulated on {found.over or 'the same requests'}"
    if found.likely:
        return f"{tried}, one at a time. What would make the mean error smaller:", list(found.likely)
    now = mean_error(found.mean_error)
    best = f"; the best leaves {mean_error(found.tried[0].mean_error, found.mean_error)}" if found.tried else ""
    return f"{NOTHING} {tried}, one at a time; none makes the mean error noticeably smaller than {now}{best}.", []


def cause(one: Cause, found: Causes) -> str:
    """A change and what it does to the error, in a sentence."""
    assert found.mean_error is not None
    before, after = mean_error(found.mean_error), mean_error(one.mean_error, found.mean_error)
    return f"With {one.words} the mean error falls from {before} to {after}."


def sets(one: Cause) -> str:
    """How to try a change; empty where no key makes it."""
    return " ".join(f"--set {text}" for text in one.sets)


def caution(shown: Iterable[Cause]) -> str:
    """What to beware of, where causes are shown."""
    return CAUTION if any(True for _ in shown) else ""
