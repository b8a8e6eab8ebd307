"""What is wrong, as people say it (`p99 ttft = 4s`, `gpu idle = 40 %`), and how much of it a simulated run shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from reports.diagnosing.facts import Symptom
from servecast.diagnosing.evidence import busy_gpus
from servecast.errors import ServecastError, nearest, one_of
from servecast.planning.slo import COLUMNS, Requirement, parse_requirements

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from servecast.run import Result
    from servecast.setup import Setup

LATENCIES = (*COLUMNS, "itl")
WORDS = {
    "throughput": "throughput", "output throughput": "throughput", "goodput": "goodput",
    "gpu idle": "gpu idle", "idle": "gpu idle", "kv cache": "kv cache", "kv cache full": "kv cache",
    "preemptions": "preemptions", "hit rate": "hit rate", "prefix hit rate": "hit rate", "rejected": "rejected",
}  # fmt: skip
"""Figures other than latencies, as they may be written -> what they are called here."""
EXAMPLES = (
    "for example p99 ttft = 4s, mean tpot = 60ms, throughput = 900 tokens/s, goodput = 70 %, gpu idle = 40 %, "
    "kv cache = 99 %, preemptions = 5 % (of the requests), hit rate = 3 %, rejected = 2 %, or chat: p99 ttft = 2s"
)
RATES = {"tokens/s": "tokens/s", "tok/s": "tokens/s", "requests/s": "requests/s", "req/s": "requests/s"}
GOOD = 0.99
"""The share of the requests that should meet their SLO where nobody says more, and so the percentile that is looked
at."""
FILED = ("p99_ttft_ms", "mean_tpot_ms", "mean_ttft_ms")
"""Figures of a measured run that are taken for symptoms where nobody names any: the first TTFT, and TPOT."""


def parse_symptoms(texts: Iterable[str], setup: Setup, run: MeasuredRun | None) -> tuple[Symptom, ...]:
    """Symptoms, several of one text separated by commas. One without a number takes it from the measured `run`, where
    that has it. Raises ServecastError with everything that is wrong."""
    classes = setup.requests.trace.classes
    groups, found, problems = () if classes is None else classes[1], list[Symptom](), list[str]()
    for text in (part for whole in texts for part in whole.split(",")):
        try:
            found.append(_parse(text, groups, run))
        except ValueError as error:
            problems.append(f"--symptom {text.strip()!r}: {error}")
    if problems:
        raise ServecastError(*problems)
    return tuple(dict.fromkeys(found))


def _parse(text: str, groups: Iterable[str], run: MeasuredRun | None) -> Symptom:
    group, colon, rest = text.rpartition(":")
    said, equals, value = re.match(r"(?s)([^<>=≤≥]*)(<=|>=|=+|[<>≤≥])?(.*)", rest).groups()  # type: ignore[union-attr]
    said, value = " ".join(said.lower().split()), value.strip()
    if not said:
        raise ValueError(f"not a symptom; {EXAMPLES}")
    if equals in ("<", "<=", "≤"):
        raise ValueError(f"a symptom is what is seen, not what is wished for; write {said} = {value or 'its value'}")
    if said in WORDS:
        if colon:
            raise ValueError(f"{said} is known of the whole run only; leave {group.strip()!r} out")
        metric = WORDS[said]
        if not equals:
            return Symptom(metric, source="--symptom")
        observed, unit = _rate(value) if metric == "throughput" else (_share(value, metric), "")
        return Symptom(metric, observed=observed, unit=unit, source="--symptom")
    word = {"e2el": "e2e", "latency": "e2e"}.get(said.split()[-1], said.split()[-1])
    if word not in LATENCIES:
        known = (*LATENCIES, *dict.fromkeys(WORDS.values()))
        raise ValueError(f"{said!r} is not a figure{nearest(word, known)}; known: {one_of(known)}")
    try:
        (asked,) = parse_requirements([f"{group}{colon} {said} < {value if equals else '1s'}"], groups)
    except ServecastError as error:
        raise ValueError(error.problems[0].partition("': ")[2].replace(" <", " =")) from None
    symptom = Symptom(asked.metric, asked.stat, asked.group, asked.limit if equals else None, source="--symptom")
    filed = None if equals or run is None else run.summary.get(_key(symptom))
    return symptom if filed is None else symptom.seen(filed / 1e3)


def _rate(value: str) -> tuple[float, str]:
    match = re.fullmatch(r"([0-9.,]+)\s*(\S+)", value)
    number = _number(match[1].replace(",", "")) if match else None
    if match is None or match[2] not in RATES or number is None or number <= 0:
        raise ValueError(f"{value!r} is not a rate; write throughput = 900 tokens/s or throughput = 3 requests/s")
    return number, RATES[match[2]]


def _share(value: str, metric: str) -> float:
    match = re.fullmatch(r"([0-9.]+)\s*(%?)", value)
    number = _number(match[1]) if match else None
    share = None if match is None or number is None else number / (100 if match[2] else 1)
    if share is None or not 0 <= share <= (1 if metric != "preemptions" else 1000):
        raise ValueError(f"{value!r} is not a share; write {metric} = 40 % (or 0.4)")
    return share


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _key(symptom: Symptom) -> str:
    """Its name in a summary, where that has it."""
    stat = symptom.stat if isinstance(symptom.stat, str) else f"p{symptom.stat:g}"
    return f"{stat}_{'e2el' if symptom.metric == 'e2e' else symptom.metric}_ms" if not symptom.group else ""


def of_file(run: MeasuredRun, setup: Setup) -> tuple[Symptom, ...]:
    """What a measured run shows that the scenario's SLO does not allow; without an SLO, its TTFT and TPOT."""
    limits = setup.scenario.slo.limits()
    asked = [Symptom(metric, 100 * GOOD, limit=limit, source=run.source) for metric, limit in limits.items()]
    there = [symptom.seen(run.summary[_key(symptom)] / 1e3) for symptom in asked if _key(symptom) in run.summary]
    found = [symptom for symptom in there if not symptom.fine(symptom.observed)]
    if found or limits:
        return tuple(found)
    for key in FILED:
        stat, metric, _ = key.split("_")
        if key in run.summary and metric not in {symptom.metric for symptom in found}:
            symptom = Symptom(metric, 99.0 if stat == "p99" else stat, source=run.source)
            found.append(symptom.seen(run.summary[key] / 1e3))
    if not found:
        raise ServecastError(f"{run.source}: it says neither TTFT nor TPOT; give a --symptom with its number")
    return tuple(found)


def of_run(setup: Setup, result: Result) -> tuple[Symptom, ...]:
    """What of a simulated run is wrong by itself: percentiles beyond the SLO of all or of a class, work that piles up,
    requests that are turned away, work that is done twice."""
    return tuple(_of_run(setup, result))


def _of_run(setup: Setup, result: Result) -> Iterator[Symptom]:
    summary = result.summary()
    if summary["rejected"]:
        yield Symptom("rejected", source="the simulation")
    missed = [symptom for symptom in _limited(setup, result) if not symptom.fine(value_of(symptom, setup, result))]
    yield from missed
    if summary["saturated"] and not any(symptom.metric in ("ttft", "e2e") for symptom in missed):
        yield Symptom("ttft", 99.0, source="work piles up")
    if summary["recomputed_fraction"] >= 1 - GOOD and not missed:
        yield Symptom("preemptions", source="the simulation")


def _limited(setup: Setup, result: Result) -> Iterator[Symptom]:
    """The percentiles that the SLOs are about. Of class limits only those of classes that have requests."""
    own: Mapping[str, Mapping[str, float]] = setup.requests.slo or {}
    for group, limits in own.items():
        for metric, limit in limits.items():
            yield Symptom(metric, 100 * GOOD, group, limit=limit, source="slo")
    if result.classes is None or len(own) < len(result.classes.names):
        groups = [""] if not own or result.classes is None else [n for n in result.classes.names if n not in own]
        for group in groups:
            for metric, limit in setup.scenario.slo.limits().items():
                yield Symptom(metric, 100 * GOOD, group, limit=limit, source="slo")


def value_of(symptom: Symptom, setup: Setup, result: Result) -> float | None:
    """The figure of a run: seconds, shares, or a rate; None where no request has one."""
    metric, summary = symptom.metric, result.summary()
    if metric in LATENCIES:
        return Requirement(metric, symptom.stat, 1.0, symptom.group).value(result)
    if metric == "gpu idle":
        return 1 - busy_gpus(setup, result)
    if metric in ("preemptions", "rejected"):
        return float(summary[metric] / summary["submitted"]) if summary["submitted"] else None
    if metric == "hit rate":
        return float(summary["prefix_cache_hit_rate"] or 0.0)  # without a cache nothing is found
    key = {
        "throughput": "request_throughput" if symptom.unit == "requests/s" else "output_throughput",
        "goodput": "slo_attainment",
        "kv cache": "kv_peak_fraction",
    }[metric]
    return None if summary[key] is None else float(summary[key])
