"""docs/accuracy.md: what the comparisons say, as Markdown. It knows rows, no data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.accuracy.ranking import Ranking, Regret
from benchmarks.accuracy.rows import Errors, Row, Uncovered, errors, grouped, worst

TEMPLATE = Path(__file__).with_name("template.md")


def text(
    rows: Sequence[Row], uncovered: Sequence[Uncovered], ranked: Sequence[Ranking], lost: Regret, sure: str
) -> str:
    """The whole page."""
    return TEMPLATE.read_text("utf-8").format(
        tables="\n\n".join(_sections(rows)),
        ranking=_ranking(ranked, lost),
        sure=sure,
        worst=_worst(rows),
        uncovered=_uncovered(uncovered, len(rows)),
    )


def _sections(rows: Sequence[Row]) -> Iterator[str]:
    for (name,), group in grouped(rows, "data").items():
        yield f"## {name[0].upper()}{name[1:]}"
        for (assumed,), same in grouped(group, "assumed").items():
            if assumed:
                yield f"Assumed, since the source leaves it open: {assumed}."
            yield "\n".join(_many(same) if len(same) > 15 else _few(same))


def _many(rows: Sequence[Row]) -> list[str]:
    """A row a model, GPU and metric, and the errors over all of them."""
    names = ("model", "GPU", "metric", "median", "p90", "signed", "points", "fitted")
    out = [_row(names), _row(["---"] * len(names))]
    groups = [(*key, group) for key, group in grouped(rows, "model", "gpu", "fitted").items()]
    if len(groups) > 1:
        groups.append(("all", "", "see above", list(rows)))
    for model, gpu, fitted, group in groups:
        found = [(metric, errors(group, metric)) for metric in group[0].measured]
        out += [f"| {model} | {gpu} | {m} | {_errors(e)} | {fitted or 'nothing'} |" for m, e in found if e is not None]
    return out


def _few(rows: Sequence[Row]) -> list[str]:
    """A row a metric."""
    names = ("what", "load", "metric", "measured", "predicted", "error")
    out = [_row(names), _row(["---"] * len(names))]
    for row in rows:
        what = row.model if row.gpu.split("-")[0] in row.model.lower() else f"{row.model}, {row.gpu}"
        for metric, value in row.measured.items():
            unit = {"duration_s": " s", "tokens/s": ""}.get(metric, " ms")
            cells = (f"{what}, {row.layout}", row.load, metric.removesuffix("_s"), f"{_number(value)}{unit}")
            ours = f"{_number(row.predicted[metric])}{unit}"
            out.append(_row((*cells, ours, f"{100 * row.off(metric):+.1f} %")))
    return out + _single(rows)


def _number(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _single(rows: Iterable[Row]) -> list[str]:
    """Mean |error| of single requests, where that was computed."""
    found = [(row, row.others["single requests"]) for row in rows if "single requests" in row.others]
    if not found:
        return []
    out = [
        "",
        "Mean |error| of single requests:",
        "",
        "| GPU | priced by | TTFT | TPOT | E2E |",
        "|---|---|---|---|---|",
    ]
    for row, off in found:
        out.append(f"| {row.gpu} | {row.layout} | " + " | ".join(f"{100 * x:.1f} %" for x in off.values()) + " |")
    return out


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _errors(found: Errors) -> str:
    return f"{100 * found.median:.1f} % | {100 * found.p90:.1f} % | {100 * found.signed:+.1f} % | {found.points}"


def _ranking(ranked: Sequence[Ranking], lost: Regret) -> str:
    out = [
        "## Which configuration is better?", "",
        "Pairs of configurations (GPU, precision, tensor parallelism) of one model at one load, by the gap of their",
        "measured output tokens a second and GPU:", "",
        "| measured gap | named right | pairs |", "|---|---|---|",
    ]  # fmt: skip
    for each in ranked:
        most = f" to {100 * each.most:.0f} %" if each.most < 10 else " % and more"
        gap = f"{100 * each.least:.0f}{most}"
        out.append(f"| {gap} | {100 * each.right / max(each.pairs, 1):.0f} % | {each.pairs} |")
    said = (
        f"Taking what the forecast likes best loses {100 * lost.mean:.2f} % of the best one's throughput on average, "
        f"{100 * lost.worst:.1f} % at worst, over {lost.choices} choices."
    )
    out += ["", fill(said, 124)]
    return "\n".join(out)


def _worst(rows: Sequence[Row]) -> str:
    out = ["| what | load | metric | measured | predicted |", "|---|---|---|---|---|"]
    seen: set[tuple[str, ...]] = set()
    for row, metric in worst(rows, ("TTFT", "TPOT", "E2E", "duration_s"), len(rows)):
        key = row.data, row.model, row.gpu, metric
        if key in seen:
            continue  # the worst of each kind says enough
        seen.add(key)
        out.append(
            f"| {row.model}, {row.gpu}, {row.layout} | {row.load} | {metric.removesuffix('_s')} | "
            f"{_number(row.measured[metric])} | {_number(row.predicted[metric])} |"
        )
        if len(seen) == 10:
            break
    return "\n".join(out)


def _uncovered(uncovered: Sequence[Uncovered], covered: int) -> str:
    points = sum(each.points for each in uncovered)
    out = [
        "## Not covered", "",
        f"{covered} points are predicted, {points:,} cannot be yet:", "",
        "| data | what is missing | points |", "|---|---|---|",
    ]  # fmt: skip
    by_reason: dict[tuple[str, str], int] = {}
    for each in uncovered:
        by_reason[each.data, each.why] = by_reason.get((each.data, each.why), 0) + each.points
    out += [f"| {data} | {why} | {n:,} |" for (data, why), n in sorted(by_reason.items(), key=lambda item: -item[1])]
    return "\n".join(out)
