"""A sum of small tables over different axes, fitted together to scattered points. It knows numbers, not what they mean.

Where one table over all axes would be too large, a few over two or three of them say almost as much. A table is linear
between its knots on every axis and keeps the value of its edge beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.plain import field, many, mapping, number, rounded
from servecast.errors import ServecastError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Points = Mapping[str, Floats]

SCALE = 250.0  # values are written as whole multiples of 1/250: a resolution of 0.4 %
LARGEST = 20.0  # no sane value, a logarithm, is beyond it

RIDGE = 1e-3  # pull to zero; decides what belongs to which table, and where no point says anything
LEVEL = 1e-3  # pull of neighbours to each other: knots without points keep their neighbour's value
BEND = 3e-3  # pull of each knot to the line between its neighbours
OUTLIER = 0.015  # a point counts less beyond this residual: kernel times have outliers of 2x, not a normal law
ROUNDS = 4  # of reweighting


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of one table by name, with their knots; `own` tables have a copy for every owner (a head shape)."""

    knots: Mapping[str, Floats]
    own: bool = False
    ridge: float = RIDGE

    @property
    def shape(self) -> tuple[int, ...]:
        """Knots an axis."""
        return tuple(len(knots) for knots in self.knots.values())


@dataclass(frozen=True, slots=True)
class Tables:
    """`values[i]` belongs to `axes[i]`: by owner, where "" owns what is common to all."""

    axes: tuple[Axes, ...]
    values: tuple[Mapping[str, Floats], ...]

    def at(self, points: Points, owner: str) -> Floats:
        """The sum at every point. `points` holds a coordinate for every axis (arrays of one length). An owner that was
        not among the fitted ones has the common tables only."""
        total = np.zeros(len(next(iter(points.values()))))
        for axes, values in zip(self.axes, self.values, strict=True):
            table = values.get(owner if axes.own else "")
            if table is not None:
                flat = table.ravel()
                for index, weight in corners(axes, points):
                    total += weight * flat[index]
        return total

    def to_json(self, every: Sequence[Axes]) -> list[dict[str, Any]]:
        """One item a table: "span", the first and last knot of `every` axis that it has (from 0), and by owner the
        values in whole 1/SCALE, a row for each knot of the first axis, the last axis fastest."""
        out = []
        for whole, axes, values in zip(every, self.axes, self.values, strict=True):
            spans = []
            for name, knots in axes.knots.items():
                first = int(np.searchsorted(whole.knots[name], knots[0]))
                spans.append([first, first + len(knots) - 1])
            rows = {
                owner: np.rint(SCALE * table).astype(np.int64).reshape(axes.shape[0], -1).tolist()
                for owner, table in values.items()
            }
            out.append({"span": spans, "values": rows})
        return out


def write_axes(axes: Sequence[Axes]) -> list[dict[str, Any]]:
    """What `read_axes` reads."""
    return [
        {"own": each.own, "knots": {name: [rounded(x, 6) for x in knots] for name, knots in each.knots.items()}}
        for each in axes
    ]


def read_axes(data: Any, names: Sequence[str], where: str) -> tuple[Axes, ...]:
    """The axes, of these names, that `write_axes` wrote; `ServecastError` with the key where it is something else."""
    return many(lambda each, at: _read_axes(each, names, at))(data, where)


def read_tables(data: Any, every: Sequence[Axes], where: str) -> Tables:
    """What `Tables.to_json` wrote; `ServecastError` with the key where it is something else."""
    if not isinstance(data, list) or len(data) != len(every):
        raise ServecastError(f"{where}: expected a list of {len(every)} tables")
    read = [_read_table(each, axes, f"{where}[{i}]") for i, (each, axes) in enumerate(zip(data, every, strict=True))]
    return Tables(tuple(axes for axes, _ in read), tuple(values for _, values in read))


def corners(axes: Axes, points: Points) -> list[tuple[Ints, Floats]]:
    """For each corner of the cells that hold the points: its index in the flattened table, and its weight."""
    count = len(next(iter(points.values())))
    found = [(np.zeros(count, np.int64), np.ones(count))]
    for name, knots in axes.knots.items():
        place = np.interp(points[name], knots, np.arange(len(knots), dtype=np.float64))
        low = np.minimum(place.astype(np.int64), max(len(knots) - 2, 0))
        share = place - low
        upper = [(i * len(knots) + low + 1, w * share) for i, w in found] if len(knots) > 1 else []
        found = [(i * len(knots) + low, w * (1 - share)) for i, w in found] + upper
    return found


def within(axes: Sequence[Axes], points: Points) -> tuple[Axes, ...]:
    """The axes with only those knots that some point needs."""
    kept = []
    for each in axes:
        knots = {}
        for name, all_knots in each.knots.items():
            low = np.searchsorted(all_knots, points[name].min(), side="right") - 1
            high = np.searchsorted(all_knots, points[name].max(), side="left") + 1
            knots[name] = all_knots[max(int(low), 0) : int(high)]
        kept.append(Axes(knots, each.own, each.ridge))
    return tuple(kept)


class Problem:
    """The least squares that find the tables: the design of points, and the pulls of the knots to each other."""

    def __init__(self, axes: Sequence[Axes], owners: Sequence[str]) -> None:
        from scipy.sparse import block_diag

        self.axes = tuple(axes)
        self.owners = tuple(sorted(set(owners)))
        self._which = np.searchsorted(self.owners, owners)
        penalty = block_diag([m for each in axes for m in [_pulls(each)] * (len(self.owners) if each.own else 1)])
        self._penalty = (penalty.T @ penalty).toarray()

    def design(self, points: Points) -> Any:
        """The sparse matrix that gives the sum at every point; the points are in the order of the owners."""
        from scipy.sparse import csr_matrix, hstack

        parts = []
        for axes in self.axes:
            size = int(np.prod(axes.shape))
            found = corners(axes, points)
            rows = np.tile(np.arange(len(self._which)), len(found))
            columns = np.concatenate([index + (self._which * size if axes.own else 0) for index, _ in found])
            weights = np.concatenate([weight for _, weight in found])
            width = size * (len(self.owners) if axes.own else 1)
            parts.append(csr_matrix((weights, (rows, columns)), shape=(len(self._which), width)))
        return hstack(parts).tocsr()

    def solve(self, design: Any, y: Floats, counts: Floats) -> Floats:
        """The flat values that minimise sum counts x residual^2 + the pulls."""
        weighted = design.multiply(counts[:, None]).T.tocsr()
        found: Floats = np.linalg.solve((weighted @ design).toarray() + self._penalty, weighted @ y)
        return found

    def tables(self, flat: Floats) -> Tables:
        """Flat values as tables, rounded as they are written."""
        flat = np.clip(np.rint(SCALE * flat) / SCALE, -LARGEST, LARGEST)
        values: list[dict[str, Floats]] = []
        start = 0
        for axes in self.axes:
            size = int(np.prod(axes.shape))
            values.append({})
            for owner in self.owners if axes.own else ("",):
                values[-1][owner] = flat[start : start + size].reshape(axes.shape)
                start += size
        return Tables(self.axes, tuple(values))


def fit_tables(axes: Sequence[Axes], points: Points, owners: Sequence[str], y: Floats) -> Tables:
    """The tables whose sum is closest to `y` at `points`; single wild points do not count."""
    problem = Problem(within(axes, points), owners)
    design = problem.design(points)
    counts = np.ones(len(y))
    flat = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        flat = problem.solve(design, y, counts)
        counts = robust(y - design @ flat)
    return problem.tables(flat)


def robust(residual: Floats) -> Floats:
    """How much each point counts: 1 up to OUTLIER, then by its distance instead of its square."""
    return OUTLIER / np.maximum(np.abs(residual), OUTLIER)


def _pulls(axes: Axes) -> Any:
    """Rows whose squares are the pulls on one table's knots."""
    from scipy.sparse import csr_matrix, diags, identity, kron, vstack

    shape = axes.shape
    rows: list[Any] = [np.sqrt(axes.ridge) * identity(int(np.prod(shape)))]
    for i, size in enumerate(shape):
        before, after = identity(int(np.prod(shape[:i]))), identity(int(np.prod(shape[i + 1 :])))
        if size > 1:
            step = diags([-1.0, 1.0], [0, 1], shape=(size - 1, size))
            rows.append(np.sqrt(LEVEL) * kron(kron(before, step), after))
        if size > 2:
            bend = diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(size - 2, size))
            rows.append(np.sqrt(BEND) * kron(kron(before, bend), after))
    return csr_matrix(vstack(rows))


def _read_axes(data: Any, names: Sequence[str], where: str) -> Axes:
    knots = field(data, "knots", where, mapping(many(number)))
    own = field(data, "own", where, lambda value, _: value)
    if not knots or not set(knots) <= set(names) or not isinstance(own, bool):
        raise ServecastError(f"{where}: expected knots of some of {', '.join(names)}, and whether they are own")
    for name, values in knots.items():
        if not values or (np.diff(values) <= 0).any():
            raise ServecastError(f"{where}.knots.{name}: expected increasing numbers, at least one")
    return Axes({name: np.array(values, np.float64) for name, values in knots.items()}, own)


def _read_table(data: Any, whole: Axes, where: str) -> tuple[Axes, dict[str, Floats]]:
    spans, rows = (field(data, key, where, lambda value, _: value) for key in ("span", "values"))
    knots = {}
    for (name, every), span in zip(whole.knots.items(), spans if isinstance(spans, list) else (), strict=False):
        if not isinstance(span, list) or len(span) != 2 or not all(isinstance(i, int) for i in span):
            break
        knots[name] = every[max(span[0], 0) : span[1] + 1]
    if len(knots) != len(whole.knots) or not all(len(each) for each in knots.values()):
        raise ServecastError(f"{where}.span: expected the first and last knot of {', '.join(whole.knots)}")
    axes = Axes(knots, whole.own, whole.ridge)
    if not isinstance(rows, dict) or (not axes.own and set(rows) != {""}):
        raise ServecastError(f"{where}.values: expected tables by owner")
    return axes, {owner: _values(table, axes, f"{where}.values.{owner}") for owner, table in rows.items()}


def _values(table: Any, axes: Axes, where: str) -> Floats:
    size = int(np.prod(axes.shape))
    try:
        values = np.array(table, np.float64)
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.size != size or not (np.abs(values) <= SCALE * LARGEST).all():
        raise ServecastError(f"{where}: expected {size} whole numbers between +-{SCALE * LARGEST:g}, in rows")
    return values.reshape(axes.shape) / SCALE
