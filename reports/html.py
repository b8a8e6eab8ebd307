"""The report: one self-contained HTML page that opens offline. The answer first, the reasons for trust last.

Everything that comes from a user passes `escape` here; figures hold numbers and our own words only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

import plotly.graph_objects as go

from reports import drafts, figures, pool_words, spent, tier_words, words
from reports.cost_words import cost_assumptions, cost_rows
from reports.page import card, figure, page
from reports.words import NONE, gib, percent, quantity
from sim.result import Result


def report_html(result: Result) -> str:
    """The whole page as text, below 6 MB however long the run was."""
    summary = result.summary()
    body = "\n".join(
        [
            _header(result, summary),
            _cards(result, summary),
            "<h2>Latency</h2>",
            _latencies(summary),
            _intervals(result.manifest),
            _spent(summary),
            _classes(summary),
            _pools(summary),
            "".join(f"<p>Pipeline stages: {escape(said)}</p>" for said in pool_words.pipelines(summary)),
            "".join(f"<p>Replicas: {escape(said)}</p>" for said in pool_words.came_and_went(summary)),
            "".join(f"<p>Drafts: {escape(said)}</p>" for said in drafts.said(summary, result.manifest)),
            _cost(summary, result.manifest),
            *(figure(name, caption) for name, (_, caption) in _figures(summary).items() if name != "spent"),
            "<h2>Assumptions, and where the numbers come from</h2>",
            *_provenance(result.manifest),
            "<h2>What each number means</h2>",
            "<dl>"
            + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in words.DEFINITIONS.items())
            + "</dl>",
            f"<footer>{escape(_origin(result.manifest))}</footer>",
        ]
    )
    drawn = figures_of(result)
    return page(words.title(result), body, drawn)


def _origin(manifest: Mapping[str, Any]) -> str:
    seed = f", seed {manifest['seed']}" if "seed" in manifest else ""
    return f"A forecast, not a measurement. Made by servecast {manifest.get('servecast', '')}{seed}".strip()


def _header(result: Result, summary: Mapping[str, Any]) -> str:
    word, why = words.verdict(result)
    text = f"<strong>{words.headline(word)}</strong>: {escape(why)}. {escape(words.consequence(word))}"
    banners = [
        f'<div class="banner {word.replace(" ", "-")}">{text}</div>',
        *(f'<div class="banner">{escape(notice)}</div>' for notice in words.notices(result, summary)),
    ]
    ran = f"{words.setup(result)}; {words.requests(summary['submitted'])} in {words.seconds(summary['duration'])}"
    return f'<h1>{escape(words.title(result))}</h1>\n<p class="soft">{escape(ran)}</p>\n' + "\n".join(banners)


def _cards(result: Result, s: Mapping[str, Any]) -> str:
    cards = []
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2el_ms")):
        unit, (_, p50, _, p99) = words.latency_row(s, key)
        cards.append((f"{name}, median", p50, unit, _with("p99", p99, unit)))
    cards.append(
        (
            "Output",
            quantity(s["output_throughput"]),
            "tokens/s",
            _with("input", quantity(s["input_throughput"]), "tokens/s"),
        )
    )
    cards.append(("Requests", quantity(s["request_throughput"]), "per s", f"{s['completed']:,} finished"))
    if result.slo:
        met = f"{percent(s['slo_attainment'])} meet {words.slo(result.slo)}"
        cards.append(("Goodput", quantity(s["request_goodput"]), "requests/s", met))
    if (share := s.get("gaps_over_slo_fraction")) is not None:
        cards.append(("Gaps over the SLO", percent(share), "", words.gaps(s).partition(", ")[2]))
    if said := words.given_up(s):
        cards.append(("In vain", percent(s["vain_fraction"]), "of tokens", said.partition(";")[0]))
    cards.append(
        (
            "KV cache, peak",
            percent(s["kv_peak_fraction"]),
            "",
            _with("", gib(s["peak_kv_cache_memory_used"]), "per GPU"),
        )
    )
    if said := words.held(s):
        cards.append(("KV held", percent(s["kv_pinned_fraction"]), "", said.partition("(")[2].rstrip(")")))
    if (found := s["prefix_cache_hit_rate"]) is not None:
        cards.append(("Prefix hits", percent(found), "", "of prompt tokens"))
    for name, tier in s.get("kv_tiers", {}).items():
        if tier["hit_rate"] is not None:
            cards.append((f"KV from {name}", percent(tier["hit_rate"]), "", tier_words.waited(s) or "of prompt tokens"))
    preemptions, again = words.preemptions(s)
    cards.append(("Preemptions", preemptions, "", again or f"peak batch {quantity(s['peak_batch_size_current'])}"))
    return '<div class="cards">' + "".join(card(*one) for one in cards) + "</div>"


def _with(name: str, value: str, unit: str) -> str:
    """Name, value and unit; nothing where there is no value."""
    return "" if value == NONE else f"{name} {value} {unit}".strip()


def _latencies(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, key in {**words.shown(summary), "queue time": "queue_ms"}.items():
        unit, values = words.latency_row(summary, key)
        rows.append((f"{name} ({unit})", *values))
    return _table(("", "mean", "p50", "p90", "p99"), rows, numbers=True)


def _intervals(manifest: Mapping[str, Any]) -> str:
    """How sure the latencies are, where that was asked."""
    said, rows = words.interval_rows(manifest)
    if not rows:
        return ""
    table = _table(("", "mean", "p50", "p90", "p99"), [(name, *cells) for name, cells in rows], numbers=True)
    return f"<h2>How sure is it?</h2><p>{escape(said)}.</p>{table}"


def _spent(summary: Mapping[str, Any]) -> str:
    """Where TTFT and TPOT were spent."""
    tables = [
        _table((metric, *spent.WHICH.values()), [(name, *cells) for name, cells in found], numbers=True)
        for metric, found in spent.rows(summary["spent"])
    ]
    if not tables:
        return ""
    drawn = figure("spent", figures.FIGURES["spent"][1])
    return f'<h2>Where the time went</h2><div class="beside">{"".join(tables)}</div>{drawn}'


def _classes(summary: Mapping[str, Any]) -> str:
    """What each request class saw, where there are any."""
    if not (classes := summary.get("classes")):
        return ""
    head = ("class", *words.CLASS_COLUMNS)
    return "<h2>Request classes</h2>" + _table(
        head, [(name, *words.class_row(s)) for name, s in classes.items()], numbers=True
    )


def _pools(summary: Mapping[str, Any]) -> str:
    """The pools side by side, where there are several."""
    if not (pools := summary.get("pools")):
        return ""
    facts = [(name, *cells) for name, cells in pool_words.pool_facts(pools)]
    table = "<h2>Pools</h2>" + _table(("", *pools), facts, numbers=True)
    if not (handed := summary.get("handed_over")):
        return table
    stages = _table(
        ("", "mean", "p50", "p90", "p99"),
        [(name, *cells) for name, cells in pool_words.stage_rows(handed)],
        numbers=True,
    )
    return f"{table}<p>{escape(pool_words.handed_over(handed))}</p>{stages}"


def _cost(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """What it costs, under which assumptions, and the commands that start it."""
    said = ""
    if rows := list(cost_assumptions(manifest)):
        table = _table(("", ""), cost_rows(summary))
        said = f"<h2>Cost</h2>{table}<details><summary>Assumptions</summary>{_table(('', ''), rows)}</details>"
    if lines := manifest.get("serve_lines"):
        said += f"<h2>The command that starts it</h2><pre>{escape(chr(10).join(lines))}</pre>"
    return said


def figures_of(result: Result) -> dict[str, go.Figure]:
    """The page's figures, by name."""
    return {name: make(result) for name, (make, _) in _figures(result.summary()).items()}


def _figures(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures that have something to show."""
    if not summary["engine_steps"]:
        return {}
    there = {"spent": bool(summary["spent"]), "pools": "pools" in summary, "replicas": "peak_replicas" in summary}
    there["drafts"] = bool(summary.get("draft_tokens"))
    return {name: made for name, made in figures.FIGURES.items() if there.get(name, True)}


def _provenance(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy first, then what was assumed, in the order in which a reader doubts it."""
    workload, pools = manifest.get("workload") or {}, manifest.get("pools") or []
    said: dict[str, list[str]] = {}
    for pool in pools:
        said.setdefault(_accuracy(pool["cost"]), []).append(pool["name"])
    for text, names in said.items():
        whose = f"{escape(', '.join(names))}: " if len(said) > 1 else ""
        yield f'<div class="banner">{whose}{text}</div>'
    if workload:
        known = {
            key: value for key, value in workload.items() if value and key != "dropped"
        }  # the top says what was dropped
        yield "<h3>Workload</h3>" + _list([f"{key}: {value}" for key, value in _flat(known)])
    for key, heading in (("notes", "Notes"), ("not_modelled", "Not modelled")):
        if manifest.get(key):
            yield f"<h3>{heading}</h3>" + _list(manifest[key])
    for pool in pools:
        yield from _pool_provenance(pool, f" of {escape(pool['name'])}" if len(pools) > 1 else "")
    if scenario := manifest.get("scenario"):
        text = json.dumps(scenario, indent=2, ensure_ascii=False, default=str)
        yield f"<details><summary>The scenario as resolved</summary><pre>{escape(text)}</pre></details>"


def _accuracy(cost: Mapping[str, Any]) -> str:
    accuracy = escape(str(cost.get("accuracy", "not yet validated")))
    kind = escape(str(cost.get("kind", "unknown")))
    text = f"<strong>Accuracy: {accuracy}</strong>. Step times are priced by the {kind} cost model."
    return " ".join([text, *map(escape, words.outside(cost))])


def _pool_provenance(pool: Mapping[str, Any], of: str) -> Iterator[str]:
    rows = [(name, _text(o["value"]), _text(o["source"])) for name, o in pool["engine_options"].items()]
    yield f"<h3>Engine options{of}</h3>" + _table(("option", "value", "where it comes from"), rows)
    table = _table(("", ""), [_memory_row(key, value) for key, value in pool["memory"].items()])
    yield f'<h3>Memory of one GPU{of}</h3><div class="memory">{table}</div>'
    cost = _table(("", ""), list(_flat(pool["cost"])))
    yield f"<details><summary>How steps are priced{of}</summary>{cost}</details>"


def _memory_row(key: str, value: Any) -> tuple[str, str]:
    name = words.MEMORY.get(key, key.replace("_", " "))
    if key == "kv_bytes_per_token":
        return name, f"{value / 1024:,.4g} KiB"
    if key.endswith("_bytes"):
        return name, gib(value)
    return name, _text(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, numbers: bool = False) -> str:
    """All columns after the first are `numbers`, or none is."""
    kind = ' class="number"' if numbers else ""
    top = f"<th>{escape(head[0])}</th>" + "".join(f"<th{kind}>{escape(h)}</th>" for h in head[1:])
    body = "".join(
        f"<tr><th>{escape(first)}</th>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    above = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table{kind}>{above}<tbody>{body}</tbody></table></div>'


def _list(items: Iterable[Any]) -> str:
    return "<ul>" + "".join(f"<li>{escape(_text(item))}</li>" for item in items) + "</ul>"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "; ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
