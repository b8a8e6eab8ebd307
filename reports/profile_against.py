"""A profile's prices against measured times: what is off by how much, and the figures that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from calibrate.kernels.heads import COLUMNS, KIND_COLUMNS, kind_sizes
from calibrate.kernels.moe import LAYOUT
from calibrate.measurements import FAMILIES, Measurements
from calibrate.profile import Profile
from reports import look
from reports.profile_figures import decades
from reports.profile_words import NAMES, family_name, per_cent
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SAMPLE = 1000
"""Points of a family that are compared and drawn; of more, as many at random."""
SEED = 20241101
RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
"""Ticks of the ratio; what lies beyond them is drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Compared:
    """`points` of the `total` measured ones of a family: prices and measured times in seconds, what each is called."""

    family: str
    total: int
    predicted: Floats
    measured: Floats
    names: Sequence[str]

    @property
    def ratio(self) -> Floats:
        """predicted / measured."""
        return self.predicted / self.measured

    @property
    def shown(self) -> Floats:
        """The ratio as far as a figure shows it."""
        return np.clip(self.ratio, RATIOS[0], RATIOS[-1])

    @property
    def row(self) -> tuple[str, ...]:
        """Family, points, median and p90 of |ratio - 1|, and the median of ratio - 1."""
        size = np.abs(self.ratio - 1)
        points = f"{len(size):,}" + (f" of {self.total:,}" if self.total > len(size) else "")
        return (
            family_name(self.family), points, per_cent(float(np.median(size))),
            per_cent(float(np.quantile(size, 0.9))), f"{round(100 * float(np.median(self.ratio - 1)), 1) + 0:+.1f} %",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Against:
    """All families that both have; `seen` says whether the fit saw these measurements, `left_out` what is not priced
    by the profile, with why."""

    families: tuple[Compared, ...]
    seen: str
    left_out: tuple[str, ...]


def compare(profile: Profile, measured: Measurements) -> Against:
    """The profile's prices of the measured points; `ServecastError` for measurements of another GPU, or where the two
    share no family."""
    if measured.device.gpu != profile.gpu.id:
        raise ServecastError(
            f"the measurements are of {measured.device.gpu}, the profile is of {profile.gpu.id}; to compare two GPUs, "
            "fit a profile to each and use `servecast calibrate diff`"
        )
    found, left_out = [], []
    for family in sorted(measured.tables, key=lambda family: (_place(family), family)):
        table = measured.tables[family]
        if family not in profile.families:
            left_out.append(f"{family_name(family)} ({len(table):,} points): the profile does not price it")
            continue
        known = _known(family, profile.families[family], table)
        if len(known) < len(table):
            missing = len(table) - len(known)
            left_out.append(f"{family_name(family)}: {missing:,} points of types that the profile was not fitted to")
        if len(known):
            found.append(_compared(profile, family, known))
    if not found:
        raise ServecastError(
            f"the measurements hold nothing that the profile was fitted to; it was to {one_of(profile.families)}"
        )
    return Against(tuple(found), _seen(profile, measured), tuple(left_out))


def figures_of(against: Against) -> dict[str, tuple[go.Figure, str]]:
    """A figure a family, and what it says."""
    found = {}
    for each in against.families:
        name, points, median, p90, bias = each.row
        said = f"{name[0].upper()}{name[1:]}, {points} points: |error| median {median}, p90 {p90}; bias {bias}."
        if beyond := int((each.ratio != each.shown).sum()):
            said += f" {beyond:,} at the edge of the right panel lie beyond it."
        found[f"against-{each.family}"] = (_scatter(each), said)
    return found


def _scatter(each: Compared) -> go.Figure:
    """Predicted over measured time, and their ratio over measured time."""
    figure = look.panels(["<b>Predicted time</b>", "<b>Predicted / measured</b>"], columns=2, legend=0)
    scale, unit = (1e6, "µs") if float(np.median(each.measured)) < 1e-3 else (1e3, "ms")
    x, y = (scale * side for side in (each.measured, each.predicted))
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    panels = (
        ("", y, [low, high], f"measured %{{x:.4~g}} {unit}, predicted %{{y:.4~g}} {unit}"),
        ("2", each.shown, [1.0, 1.0], f"%{{customdata:.3~g}} x the measured %{{x:.4~g}} {unit}"),
    )
    for panel, values, line, hover in panels:
        axes = {"xaxis": f"x{panel}", "yaxis": f"y{panel}"}
        figure.add_scatter(
            x=[low, high], y=line, mode="lines", line={"color": look.GREY, "width": 1}, hoverinfo="skip", **axes
        )
        figure.add_scatter(
            x=x.astype(np.float32), y=values.astype(np.float32), mode="markers", text=each.names,
            customdata=each.ratio.astype(np.float32) if panel else None,
            marker={"color": look.BLUE, "size": 4, "opacity": 0.5},
            hovertemplate=f"%{{text}}<br>{hover}<extra></extra>", **axes,
        )  # fmt: skip
    times = decades(low, high, f"measured ({unit})")
    ends = min(float(each.shown.min()), 0.8), max(float(each.shown.max()), 1.25)
    ticks = [r for r in RATIOS if ends[0] <= r <= ends[1]]
    figure.update_layout(
        xaxis=times,
        xaxis2=times,
        yaxis=decades(low, high, unit),
        yaxis2={
            "title": {"text": "ratio"}, "type": "log", "range": [np.log10(ends[0]) - 0.02, np.log10(ends[1]) + 0.02],
            "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks],
        },
    )  # fmt: skip
    return figure


def _compared(profile: Profile, family: str, table: pl.DataFrame) -> Compared:
    sample = table.sample(SAMPLE, seed=SEED) if len(table) > SAMPLE else table
    sample = sample.with_row_index("_place")
    predicted = np.empty(len(sample))
    by, price = _PRICES[family]
    for key, rows in sample.group_by(by, maintain_order=True):
        predicted[rows["_place"].to_numpy()] = price(profile.families[family], key, rows)
    names = [_name(family, row) for row in sample.iter_rows(named=True)]
    return Compared(family, len(table), predicted, sample["seconds"].to_numpy(), names)


def _name(family: str, row: Mapping[str, Any]) -> str:
    """A measured point for people: its columns as the tables name them."""
    parts = [
        f"{column} {row[column]:,}" if isinstance(row[column], int) else escape(row[column])
        for column in FAMILIES[family]
        if row[column] != 0
    ]
    return ", ".join(parts)


def _known(family: str, model: Any, table: pl.DataFrame) -> pl.DataFrame:
    """The rows whose dtype, operation or kind the model was fitted to."""
    import polars as pl

    if family == "gemm":
        return table.filter(pl.col("weights").is_in(list(model.tables)))
    if family == "moe":
        return table.filter(pl.col("weights").is_in([variant.weights for variant in model.variants]))
    if family == "elementwise":
        return table.filter(pl.col("op").is_in([op for op, _ in model.curves]))
    if family == "collective":
        key = pl.concat_str("op", "backend", separator=" ")
        return table.filter(key.is_in([f"{op} {backend}" for op, backend, _ in model.curves]))
    kinds = [dict(zip(KIND_COLUMNS, kind_sizes(name), strict=True)) for name in model.kinds]
    return table.join(pl.DataFrame(kinds), on=KIND_COLUMNS, how="semi", maintain_order="left")


def _place(family: str) -> int:
    return list(NAMES).index(family) if family in NAMES else len(NAMES)


def _seen(profile: Profile, measured: Measurements) -> str:
    device = asdict(measured.device)
    facts = ("device", "measured_by", "source", "software", "taken")
    if any(all(source.facts.get(fact) == device[fact] for fact in facts) for source in profile.sources):
        return "The profile was fitted to these points: this shows how well it follows them, not how well it predicts."
    return "By its sources the profile was not fitted to these points: this shows how well it predicts them."


def _columns(rows: pl.DataFrame, names: Sequence[str]) -> list[Floats]:
    return [rows[name].to_numpy().astype(np.float64) for name in names]


_PRICES: Mapping[str, tuple[tuple[str, ...], Callable[[Any, tuple[Any, ...], pl.DataFrame], Floats]]] = {
    "gemm": (("weights",), lambda model, key, rows: model.seconds(*key, *_columns(rows, ("m", "n", "k")))),
    "prefill_attention": (
        ("kv_dtype",),
        lambda model, key, rows: model.seconds(*key, *_columns(rows, ("sequences", "q", "context", *COLUMNS))),
    ),
    "decode_attention": (  # as a loop over the one kernel measures it: small caches stay in the L2
        ("kv_dtype",),
        lambda model, key, rows: model.seconds(
            *key, *_columns(rows, ("sequences", "context", *COLUMNS)), resident=True
        ),
    ),
    "moe": (
        ("weights", *LAYOUT, "skew"),
        lambda model, key, rows: model.seconds(key[0], *_columns(rows, ("tokens",)), *key[1:-1], skew=key[-1]),
    ),
    "elementwise": (("op",), lambda model, key, rows: model.seconds(*key, *_columns(rows, ("rows", "elements")))),
    "collective": (
        ("op", "backend", "gpus"),
        lambda model, key, rows: model.seconds(*key, *_columns(rows, ("bytes",))),
    ),
}
"""Family -> (columns that are given apart, the seconds of rows that are equal in them)."""
