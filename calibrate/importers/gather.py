"""From rows as a format holds them to `Measurements`: checked, one row a point, and everything left out counted.

It knows the families, no format.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.hardware import Gpu
from calibrate.importers.plausible import judge
from calibrate.measurements import FAMILIES, VALUES, Device, Measurements, impossible
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
AGREE = 3.0
"""Rows of one point whose times lie within this factor are repeats (their median is kept); beyond it they contradict
each other. Repeated kernels of a few microseconds differ by up to 2."""
ENOUGH = 5  # repeats from which their scatter is a spread


@dataclass(slots=True)
class Gathered:
    """What an importer has found so far about one GPU: rows by family, notes for people, and problems."""

    gpu: Gpu
    rows: dict[str, list[pl.DataFrame]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, family: str, rows: pl.DataFrame, time: str, unit: str) -> pl.Series:
        """Rows of a family: its columns, `kernel`, `file` and `row`, and the times in column `time`, in `unit`.

        Wrong sizes and times become problems with file and row; few times that no GPU reaches are left out and counted.
        Returns `row` of those taken.
        """
        import polars as pl

        spread = pl.col("spread") if "spread" in rows.columns else pl.lit(None, pl.Float64).alias("spread")
        named = rows.with_columns(spread, seconds=pl.col(time) * SECONDS[unit]).select(
            *FAMILIES[family], *VALUES, "file", "row"
        )
        for column, bad in impossible(family).items():
            if len(wrong := named.filter(bad)):
                more = f" (and {len(wrong) - 1:,} more rows)" if len(wrong) > 1 else ""
                self.problems.append(
                    f"{wrong['file'][0]}, row {wrong['row'][0]}: {column} is {wrong[column][0]}; expected more{more}"
                )
                named = named.filter(~bad)
        verdict = judge(family, named, self.gpu, unit)
        self.problems += verdict.problems
        self.notes += verdict.notes
        if len(verdict.rows):
            self.rows.setdefault(family, []).append(verdict.rows)
        return verdict.rows["row"]

    def without(self, rows: pl.DataFrame, bad: pl.Expr, what: str, why: str) -> pl.DataFrame:
        """`rows` where not `bad`; the rest is counted in the notes."""
        kept = rows.filter(~bad)
        if len(kept) < len(rows):
            self.notes.append(f"{what}: {len(rows) - len(kept):,} of {len(rows):,} rows left out: {why}")
        return kept

    def measurements(self, device: Device, where: Path, needed: tuple[str, ...] = ()) -> Measurements:
        """One sorted table a family. `ServecastError` with every problem, and for each `needed` family not found."""
        import polars as pl

        tables = {}
        for family in [name for name in FAMILIES if name in self.rows]:
            tables[family] = self._merged(family, pl.concat(self.rows[family]))
        if not self.problems and (missing := [family for family in needed if family not in tables]):
            self.problems.append(f"{where}: no table of {one_of(missing)} in it; found {one_of(tables) or 'nothing'}")
        if not self.problems and not tables:
            self.problems.append(f"{where}: no row in it that can be used")
        if self.problems:
            raise ServecastError(*self.problems)
        return Measurements(replace(device, notes=(*device.notes, *self.notes)), tables)

    def _merged(self, family: str, rows: pl.DataFrame) -> pl.DataFrame:
        """One row a point: the median of repeats."""
        import polars as pl

        key = list(FAMILIES[family])
        repeated = rows.select(key).is_duplicated()
        low, high = pl.col("seconds").quantile(0.1, "linear"), pl.col("seconds").quantile(0.9, "linear")
        scatter = (high - low) / pl.col("seconds").median()
        if repeated.any():
            points = (
                rows.filter(repeated)
                .group_by(key, maintain_order=True)
                .agg(
                    pl.col("seconds").median(),
                    pl.when(pl.len() >= ENOUGH).then(scatter).otherwise(pl.col("spread").median()).alias("spread"),
                    pl.col("kernel").unique(maintain_order=True).str.join(" | "),
                    pl.col("file").get(pl.col("seconds").arg_max()),
                    pl.col("row").get(pl.col("seconds").arg_max()),
                    pl.col("file").get(pl.col("seconds").arg_min()).alias("other_file"),
                    pl.col("row").get(pl.col("seconds").arg_min()).alias("other_row"),
                    (pl.col("seconds").max() / pl.col("seconds").min()).alias("ratio"),
                )
            )
            worst = points.row(points["ratio"].arg_max() or 0, named=True)
            if worst["ratio"] > AGREE:
                count = len(points.filter(pl.col("ratio") > AGREE))
                more = f" (and {count - 1:,} more points)" if count > 1 else ""
                self.problems.append(
                    f"{worst['file']}, row {worst['row']}: the same {family} point as {worst['other_file']}, row "
                    f"{worst['other_row']}, but {worst['ratio']:.3g} times its time; keep the right one{more}"
                )
            self.notes.append(
                f"{family}: {int(repeated.sum()):,} rows repeat {len(points):,} points; their median is kept "
                f"(they differ by up to {100 * (worst['ratio'] - 1):.0f} %)"
            )
            rows = pl.concat([rows.filter(~repeated), points.select(rows.columns)])
        return rows.select(*key, *VALUES).sort(key)
