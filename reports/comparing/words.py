"""How a comparison is said: the answer, why scenarios differ, and how it was judged. Plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reports.comparing.facts import Class, Compared, Difference, Line, Ran
from reports.cost_words import dollars
from reports.spent import PARTS
from reports.words import NONE, latency_unit, percent, quantity
from sim.statistics import Interval

MOST = 4
"""How many metrics, parts or classes a sentence names: those that differ the most."""
SHARE = 0.1
"""A part that makes less of a difference is not named."""

VERDICTS = {
    "better": "better",
    "worse": "worse",
    "equal": "the same",
    "noise": "no difference beyond noise",
    "model": "no difference beyond the model's error",
    "unknown": "noise unknown",
    "unlike": "not ranked",
    "undefined": NONE,
}
SIGNS = {
    "better": "▲",
    "worse": "▼",
    "equal": "=",
    "noise": "~",
    "model": "~",
    "unknown": "?",
    "unlike": "",
    "undefined": "",
}


def answer(c: Compared) -> list[str]:
    """What was found of every scenario against the first, and which is best where there are several."""
    if not c.alike:
        asks = (
            "The scenarios have different workloads: not the same requests at the same times. Figures stand side by "
            "side, but none is called better: give all the same workload and seed to compare what serves it"
        )
        return [f"{asks}.", *(s for i in range(1, len(c.ran)) if c.ran[i].same for s in [_against(c, i)])]
    said = [_against(c, i) for i in range(1, len(c.ran))]
    if len(c.ran) > 2 and (best := list(_best(c))):
        said.append(f"Better than every other beyond noise: {'; '.join(best)}.")
    return said


def _against(c: Compared, i: int) -> str:
    ran, first = c.ran[i], c.first
    if ran.same:
        return f"{ran.label} and {first.label} are the same scenario, and so is every figure."
    found: dict[str, list[Line]] = {}
    for line in c.lines:
        difference = line.differences[i]
        assert difference is not None
        found.setdefault(difference.word, []).append(line)
    ranked = {word: found.get(word, []) for word in ("better", "worse")}
    if set(found) <= {"equal", "undefined"}:
        return (
            f"{ran.label} against {first.label}: other settings, but the very same figures; they change nothing here."
        )
    said = [f"{word} in {_named(lines, i)}" for word, lines in ranked.items() if lines]
    for word in ("noise", "model", "unknown"):
        if lines := found.get(word, []):
            kind = "noise unknown" if word == "unknown" else VERDICTS[word]
            said.append(f"{kind} in {_count(len(lines), 'metric')}")
    if lines := found.get("equal", []):
        said.append(f"the same in {_count(len(lines), 'metric')}")
    return f"{ran.label} against {first.label}: {'; '.join(said)}."


def _named(lines: list[Line], i: int) -> str:
    """Those that differ the most, each with how much."""
    order = sorted(lines, key=lambda line: -abs(relative(line, i) or 0.0))
    names = [f"{line.metric.name} ({change(line, i)})" for line in order[:MOST]]
    left = len(order) - MOST
    return ", ".join(names) + (f" and {left} more" if left > 0 else "")


def _best(c: Compared) -> Iterator[str]:
    won: dict[int, list[str]] = {}
    for line in c.lines:
        if line.best is not None:
            won.setdefault(line.best, []).append(line.metric.name)
    for i, names in sorted(won.items()):
        yield f"{c.ran[i].label} in {', '.join(names)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def relative(line: Line, i: int) -> float | None:
    """The difference as a share of the first one's figure."""
    first, difference = line.values[0], line.differences[i]
    if difference is None or difference.interval is None or first is None or not first.mean:
        return None
    return difference.interval.mean / abs(first.mean)


def change(line: Line, i: int) -> str:
    """`-12 %`, or the difference itself where the first one's is 0."""
    found, difference = relative(line, i), line.differences[i]
    if found is not None:
        if found >= 9:
            return f"{found + 1:,.0f} times"
        fine = abs(found) < 0.095 or -1 < found < -0.985
        return f"{100 * found:+.{int(fine)}f} %"
    if difference is None or difference.interval is None:
        return NONE
    return signed(line, difference.interval.mean)


def values(line: Line) -> list[str]:
    """The name with its unit is `heading`; every scenario's figure with its interval."""
    return [NONE if v is None else _interval(line, v) for v in line.values]


def heading(line: Line) -> str:
    """The metric's name, with its unit where that depends on the values."""
    return f"{line.metric.name} ({_scale(line)[1]})" if line.metric.kind == "ms" else line.metric.name


def difference(line: Line, i: int) -> str:
    """`-12.3 ± 4.5 (-10 %)`."""
    found = line.differences[i]
    if found is None or found.interval is None:
        return NONE
    half = "" if found.interval.half is None else f" ± {_amount(line, found.interval.half)}"
    shown = relative(line, i)
    return signed(line, found.interval.mean) + half + ("" if not shown else f" ({change(line, i)})")


def under_error(line: Line, found: Difference | None) -> str:
    """The range of the difference under the draws of the model's error."""
    if found is None or found.under_error is None:
        return NONE
    return " to ".join(signed(line, end) for end in found.under_error)


def signed(line: Line, value: float) -> str:
    """A difference, with its sign."""
    return f"{'-' if value < 0 else '+' if value > 0 else ''}{_amount(line, abs(value))}"


def _interval(line: Line, found: Interval) -> str:
    half = "" if not found.half else f" ± {_amount(line, found.half)}"
    return _amount(line, found.mean) + half


def _amount(line: Line, value: float) -> str:
    kind = line.metric.kind
    if kind == "ms":
        return quantity(value * _scale(line)[0])
    return dollars(value) if kind == "dollars" else percent(value) if kind == "share" else quantity(value)


def _scale(line: Line) -> tuple[float, str]:
    return latency_unit(max((v.mean for v in line.values if v is not None), default=None))


def why(c: Compared, i: int) -> list[str]:
    """What explains the difference to the first, in means over all requests and runs."""
    a, b = c.first, c.ran[i]
    if b.same:
        return []
    said = [_spent(name, key, a, b) for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))]
    said += [_waits(a.classes, b.classes), _steps(a, b), _lost(a, b), _found(a, b)]
    return [text for text in said if text]


def _spent(name: str, key: str, a: Ran, b: Ran) -> str:
    if key not in a.spent or key not in b.spent:
        return ""
    old, new = a.spent[key], b.spent[key]
    less = {part: new.get(part, 0.0) - old.get(part, 0.0) for part in {**old, **new}}
    whole, moved = sum(less.values()), sum(map(abs, less.values()))
    scale, unit = latency_unit(max(sum(old.values()), sum(new.values())))
    totals = f"Mean {name} {quantity(scale * sum(old.values()))} -> {quantity(scale * sum(new.values()))} {unit}"
    if moved <= 0.005 * sum(old.values()):
        return f"{totals}: spent alike."
    order = sorted((part for part in less if abs(less[part]) >= SHARE * moved), key=lambda part: -abs(less[part]))
    parts = [f"{PARTS[part][0]} {_plus(scale * less[part])} {unit}" for part in order[:MOST]]
    return f"{totals} ({_plus(scale * whole)}): {', '.join(parts)}."


def _plus(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{quantity(abs(value))}"


def _waits(a: Mapping[str, Class], b: Mapping[str, Class]) -> str:
    pairs = [
        (name, old, new)
        for name in a
        if name in b and (old := a[name].queue_ms) is not None and (new := b[name].queue_ms) is not None
    ]
    if len(pairs) < 2:
        return ""
    pairs.sort(key=lambda each: -abs(each[2] - each[1]))
    scale, unit = latency_unit(max(max(old, new) for _, old, new in pairs))
    said = [f"{name} {quantity(scale * old)} -> {quantity(scale * new)} {unit}" for name, old, new in pairs[:MOST]]
    return f"Mean wait in the queue, by class: {', '.join(said)}."


def _steps(a: Ran, b: Ran) -> str:
    batches = [quantity(r.figures.get("mean_batch_size_current")) for r in (a, b)]
    said = [f"{100 * old:.0f} -> {100 * new:.0f} %" for old, new in zip(a.busy, b.busy, strict=True)]
    idle = [f"{100 * max(0.0, 1 - sum(r.busy)):.0f}" for r in (a, b)]
    return (
        f"Time of replicas: steps with prompts {said[0]}, steps that only decode {said[1]}, idle {idle[0]} -> "
        f"{idle[1]} %; mean batch {batches[0]} -> {batches[1]} requests."
    )


def _lost(a: Ran, b: Ran) -> str:
    old, new = (r.figures.get("preemptions", 0.0) for r in (a, b))
    if not old and not new:
        return ""
    again = [percent(r.figures.get("recomputed_fraction")) for r in (a, b)]
    return (
        f"Preemptions {quantity(old)} -> {quantity(new)} a run; {again[0]} -> {again[1]} of the tokens that were "
        "computed had been before."
    )


def _found(a: Ran, b: Ran) -> str:
    old, new = (r.figures.get("prefix_cache_hit_rate") for r in (a, b))
    return f"Prefix hits {percent(old)} -> {percent(new)} of prompt tokens." if old or new else ""


def piled_up(c: Compared) -> list[str]:
    """Of every scenario that is saturated, or too short to tell, what that means."""
    runs = max(1, len(c.seeds))
    said = []
    for r in c.ran:
        if r.saturated:
            said.append(
                f"{r.label} is saturated in {r.saturated} of {_count(runs, 'run')}: its latencies, and differences to "
                f"them, depend on how long the run is. {r.verdict[:1].upper()}{r.verdict[1:]}."
            )
        elif r.undecided:
            said.append(f"{r.label}: {_count(r.undecided, 'run')} too short to tell whether latencies are steady.")
    return said


def changed(c: Compared) -> list[tuple[str, list[str]]]:
    """(key, every scenario's value) of what differs from the first."""
    found: dict[str, dict[str, str]] = {}
    firsts: dict[str, str] = {}
    for r in c.ran[1:]:
        for key, old, new in r.changes:
            firsts[key] = old
            found.setdefault(key, {})[r.label] = new
    return [(key, [firsts[key], *(own.get(r.label, firsts[key]) for r in c.ran[1:])]) for key, own in found.items()]


def method(c: Compared) -> list[str]:
    """How it was judged, in sentences."""
    return [_noise(c), *_error(c), _window(c), SATURATION, ALONE]


SATURATION = (
    "Saturated: the requests in the system are counted over time. From the second to the last quarter of the time in "
    "which requests arrive, their mean number grows by more than 3 % of those that arrived meanwhile, and by more than "
    "three times the square root of the number in the system, which chance may make."
)
ALONE = (
    "Every metric is judged alone: where two scenarios are equally good, about one metric in twenty would still seem "
    "to differ. What differs follows from the same requests, so metrics go together."
)


def _noise(c: Compared) -> str:
    if c.one_course:
        return (
            f"Noise: {c.one_course}, of {c.requests:,} requests. It is cut into 32, 16, 8 or 5 sections, as many as "
            "are independent of each other (correlation of neighbours within one standard error of 0; p99: 5), of at "
            "least 25 requests; ± is the 95 % interval (Student's t) of the difference over the same sections of both "
            "runs, about the figure of the whole run; for p99 under heavy load it is too narrow. It says nothing of "
            "other traffic. Peaks have none."
        )
    return (
        f"Noise: every scenario runs under the same {len(c.seeds)} seeds ({c.seeds[0]} to {c.seeds[-1]}), with the "
        "same arrivals and lengths under each. ± is the 95 % interval (Student's t) over seeds; of differences, those "
        "of each seed. A difference whose interval holds 0 is none beyond noise."
    )


def _error(c: Compared) -> Iterator[str]:
    if c.draws:
        yield (
            f"The model's error: {c.draws} draws of what may be wrong (kernels, clocks, host, front end), the same for "
            f"every scenario, under seed {c.seeds[0]}. Differences are taken draw by draw; better or worse also needs "
            f"the central {100 * c.level:.0f} % of them on one side of 0."
        )


def _window(c: Compared) -> str:
    start = (
        "Figures are of all requests, from an empty start to the last answer, as in `servecast run`; nothing is trimmed"
    )
    if c.trimmed is None:
        return f"{start}. Some run does not settle within its first half (MSER-5 on E2E): there is no steady window."
    return (
        f"{start}. The steady window begins after the first {100 * c.trimmed:.0f} % of the requests (the longest "
        "warm-up of all runs by MSER-5 on E2E, rounded up to a tenth) and ends with the last arrival."
    )
