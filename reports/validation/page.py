"""A validation as one self-contained HTML page that opens offline: doubts first, then the errors, then their causes.

Everything that comes from a user passes `escape` here; figures hold numbers and our own words only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from reports import words
from reports.page import card, figure, page
from reports.validation import words as say
from reports.validation.compared import STATS
from reports.validation.figures import figures_of
from reports.words import NONE

if TYPE_CHECKING:
    from reports.validation.compared import Validation

STYLE = """.wide { overflow-x: auto; } .wide th { white-space: nowrap; } footer, code { overflow-wrap: anywhere; }
.error td, td.error { font-weight: 600; } tr.first > * { border-top: 1px solid var(--line); }
.sides tr > * { border-bottom: 0; } .sides tbody th { font-weight: 600; }
.sides td { padding-top: 1px; padding-bottom: 3px; }
.causes td:first-child { min-width: 15rem; }
.far { color: var(--bad); } .fair { color: var(--unsure); } .near { color: var(--good); }
code { color: var(--soft); font-size: 0.85em; }
"""
FAR, FAIR = 0.2, 0.1
"""Errors from which a figure is shown in red and in amber."""


def validation_html(v: Validation) -> str:
    """The whole page as text, below 6 MB however many requests there are."""
    figures = figures_of(v)
    body = "\n".join(
        [
            *_top(v),
            _cards(v),
            *(figure(name, caption) for name, (_, caption) in figures.items()),
            "<h2>Forecast and measurement</h2>",
            *_tables(v),
            "<h2>What may explain the error</h2>",
            *_causes(v),
            "<h2>Where the numbers come from</h2>",
            *_provenance(v),
            "<h2>What each number means</h2>",
            _definitions(),
            "<footer>Forecast is what was simulated. Made by servecast "
            f"{escape(str(v.result.manifest.get('servecast', '')))}.</footer>",
        ]
    )
    return page(say.title(v), body, {name: make(v) for name, (make, _) in figures.items()}, STYLE)


def _top(v: Validation) -> Iterator[str]:
    yield f"<h1>{escape(say.title(v))}</h1>"
    yield f'<p class="soft">{escape(words.setup(v.result))}<br>Measured: {escape(say.measured_by(v.run))}</p>'
    for doubt in v.run.doubts:
        yield f'<div class="banner saturated"><strong>Doubt about the file</strong>: {escape(doubt)}.</div>'
    for warning in v.warnings:
        yield f'<div class="banner">{escape(warning)}</div>'
    error = FAIR if v.mean_error is None else v.mean_error
    kind = "saturated" if error >= FAR else "stable" if error < FAIR else ""
    yield f'<div class="banner {kind}"><strong>{escape(say.verdict(v))}</strong> {escape(v.replayed)}</div>'


def _cards(v: Validation) -> str:
    cards = []
    for name in ("TTFT", "TPOT", "E2E"):
        for stat, word in (("mean", "mean"), ("p50", "median")):
            if (key := f"{stat}_{words.METRICS[name]}") in v.errors:
                cards.append((f"{name}, {word}", key))
                break
    cards += [("Output", "output_throughput")] * ("output_throughput" in v.errors)
    shown = [card(name, _coloured(v.errors[key]), "", _both(v, key)) for name, key in cards]
    return f'<div class="cards">{"".join(shown)}</div>' if shown else ""


def _both(v: Validation, key: str) -> str:
    values = [v.predicted[key], v.measured[key]]
    if key.endswith("_ms"):
        row = key.partition("_")[2]
        scale, unit = words.latency_unit(max(side[k] for side in (v.predicted, v.measured) for k in side if row in k))
        return f"forecast {words.quantity(values[0] * scale)}, measured {words.quantity(values[1] * scale)} {unit}"
    return f"forecast {words.quantity(values[0])}, measured {words.quantity(values[1])} tokens/s"


def _coloured(error: float | None) -> str:
    size = 0.0 if error is None else abs(error)
    kind = "far" if size >= FAR else "fair" if size >= FAIR else "near"
    return NONE if error is None else f'<span class="{kind}">{say.signed(error)}</span>'


def _tables(v: Validation) -> Iterator[str]:
    if found := say.rows(v):
        yield f'<div class="wide">{_latencies(v, found)}</div>'
    if rows := say.others(v):
        body = "".join(
            f'<tr><th>{name}</th><td class="number">{ours}</td><td class="number">{theirs}</td>'
            f'<td class="number error">{_coloured(error)}</td></tr>'
            for name, ours, theirs, error in rows
        )
        yield f'<h3>Throughput</h3><div class="wide">{_head(("", *say.SIDES))}<tbody>{body}</tbody></table></div>'
    if by_request := say.per_request(v):
        body = "".join(
            f"<tr><th>{name}</th>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"
            for name, *cells in by_request
        )
        head = _head(("", "requests", "off by, on average", "correlation"))
        yield f'<h3>Request by request</h3><div class="wide">{head}<tbody>{body}</tbody></table></div>'


def _latencies(v: Validation, found: Sequence[tuple[str, str, list[tuple[str, list[str]]]]]) -> str:
    body = []
    for name, unit, sides in found:
        key = words.METRICS[name]
        body.append(f'<tr class="first"><th colspan="{1 + len(STATS)}">{name} ({unit})</th></tr>')
        for side, values in sides:
            error = side == "error"
            cells = [_coloured(v.errors.get(f"{stat}_{key}")) for stat in STATS] if error else values
            row = f"<td>{side}</td>" + "".join(f'<td class="number">{cell}</td>' for cell in cells)
            kind = ' class="error"' if error else ""
            body.append(f"<tr{kind}>{row}</tr>")
    return f"{_head(('', *STATS), 'sides')}<tbody>{''.join(body)}</tbody></table>"


def _head(columns: Iterable[str], kind: str = "") -> str:
    first, *numbers = columns
    cells = f"<th>{first}</th>" + "".join(f'<th class="number">{name}</th>' for name in numbers)
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead>'


def _causes(v: Validation) -> Iterator[str]:
    said, likely = say.causes(v.causes)
    yield f"<p>{escape(said)}</p>"
    if likely:
        yield "<ol>" + "".join(_cause(v, i) for i in range(len(likely))) + "</ol>"
        yield f'<div class="banner">{escape(say.caution(likely))}</div>'
    if v.causes.tried:
        yield f"<details><summary>All changes that were tried</summary>{_tried(v)}</details>"
    if v.causes.refused:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in v.causes.refused)
        yield f"<details><summary>What could not be tried</summary><ul>{items}</ul></details>"


def _cause(v: Validation, i: int) -> str:
    cause = v.causes.likely[i]
    command = f"<br><code>{escape(text)}</code>" if (text := say.sets(cause)) else ""
    return f"<li>{escape(say.cause(cause, v.causes))}{command}</li>"


def _tried(v: Validation) -> str:
    keys = [(name, f"mean_{key}") for name, key in words.METRICS.items() if f"mean_{key}" in v.errors]
    base = v.causes.mean_error or 0.0
    body = [("none", base, v.errors if not v.causes.over else {})]
    body += [(cause.words, cause.mean_error, dict(cause.errors)) for cause in v.causes.tried]
    rows = "".join(
        f'<tr><td>{escape(change)}</td><td class="number">{say.mean_error(error, base)}</td>'
        + "".join(f'<td class="number">{_coloured(errors.get(key))}</td>' for _, key in keys)
        + "</tr>"
        for change, error, errors in body
    )
    head = _head(("change", "mean error", *(f"{name}, mean" for name, _ in keys)), "causes")
    return f'<div class="wide">{head}<tbody>{rows}</tbody></table></div>'


def _provenance(v: Validation) -> Iterator[str]:
    manifest = v.result.manifest
    yield f'<div class="banner">{escape(" ".join(words.pricing(v.result)))}</div>'
    lists = (
        ("The measured run", v.run.notes),
        ("The forecast", [*(manifest.get("workload") or {}).get("notes", ()), *manifest.get("notes", ())]),
        ("Not modelled", manifest.get("not_modelled") or ()),
    )
    for heading, items in lists:
        if items:
            yield f"<h3>{heading}</h3><ul>" + "".join(f"<li>{escape(str(item))}</li>" for item in items) + "</ul>"
    for options in (pool["engine_options"] for pool in manifest.get("pools") or ()):
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(_value(o['value']))}</td><td>{escape(str(o['source']))}</td></tr>"
            for name, o in options.items()
            if o["value"] is not None
        )
        head = "<thead><tr><th>option</th><th>value</th><th>where it comes from</th></tr></thead>"
        yield (
            f"<details><summary>Engine options of the forecast</summary><table>{head}<tbody>{rows}</tbody></table>"
            "</details>"
        )


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _definitions() -> str:
    names = ("TTFT", "TPOT", "ITL", "E2E", "p50, p90, p99")
    meaning = {
        "Error": "forecast over measurement, less 1: +10 % is a forecast that is a tenth too slow, or too high",
        "Mean error": say.MEAN_ERROR,
        "Off by, on average": "the mean over requests of |forecast / measured - 1| (MAPE)",
        **{name: words.DEFINITIONS[name] for name in names},
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in meaning.items()) + "</dl>"
