"""A smooth table over logarithmic axes, fitted to scattered points. It knows numbers, not what they mean.

Between its nodes it is linear in the logarithm of every axis; beyond them it keeps the value at the edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.plain import field, many, number, positive, rounded
from servecast.errors import ServecastError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SCALE = 100.0  # values are written as whole hundredths: a resolution of 1 %, far below a fit's error
LARGEST = 20.0  # no sane value, a logarithm, is beyond it

LEVEL = 0.01  # stiffness against any difference between neighbours; decides where bending leaves a choice
OUTLIER = 0.05  # a point counts less beyond this residual: kernel times have outliers of 2x, not a normal law
ROUNDS = 4  # of reweighting
STEP = 0.07  # nodes closer than this, in the logarithm, are the two sides of a step


@dataclass(frozen=True, slots=True)
class Surface:
    """`values[i, j, ...]` at `(axes[0][i], axes[1][j], ...)`; axes are positive and increasing."""

    axes: tuple[Floats, ...]
    values: Floats

    def line(self, *rest: float) -> Floats:
        """The values along the first axis, at these coordinates of the other axes."""
        total = np.zeros(len(self.axes[0]))
        for index, weight in _corners(self.axes[1:], [np.array([x], np.float64) for x in rest]):
            corner: Any = (slice(None), *(int(i[0]) for i in index))
            total += weight[0] * self.values[corner]
        return total

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """The axes by name, and "rows": for every node of the other axes (the last one fastest) the values along the
        first axis, in whole hundredths."""
        rows = np.rint(SCALE * self.values).astype(np.int64).reshape(len(self.axes[0]), -1).T
        axes = {name: [rounded(x, 12) for x in axis] for name, axis in zip(names, self.axes, strict=True)}
        return axes | {"rows": rows.tolist()}


def read_surface(data: Any, names: Sequence[str], where: str) -> Surface:
    """What `to_json` gave; `ServecastError` with the key where it is something else."""
    axes = tuple(np.array(field(data, name, where, many(positive)), np.float64) for name in names)
    for name, axis in zip(names, axes, strict=True):
        if not len(axis) or (np.diff(axis) <= 0).any():
            raise ServecastError(f"{where}.{name}: expected increasing numbers, at least one")
    rows = field(data, "rows", where, lambda value, _: value)
    count, width = int(np.prod([len(axis) for axis in axes[1:]])), len(axes[0])
    if not isinstance(rows, list) or len(rows) != count:
        raise ServecastError(f"{where}.rows: expected a list of {count} rows, one for each of {' x '.join(names[1:])}")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            raise ServecastError(f"{where}.rows[{i}]: expected {width} numbers, one for each of {names[0]}")
    values = np.array(rows)
    if values.dtype.kind not in "if" or not (np.abs(values) <= SCALE * LARGEST).all():
        many(many(number))(rows, f"{where}.rows")
        raise ServecastError(f"{where}.rows: expected numbers between {-SCALE * LARGEST:g} and {SCALE * LARGEST:g}")
    return Surface(axes, (values / SCALE).T.reshape([len(axis) for axis in axes]))


def fit_surface(axes: Sequence[Floats], points: Sequence[Floats], y: Floats, stiffness: Sequence[float]) -> Surface:
    """The surface on these nodes that is close to `y` at `points` and bends little, an axis at a time.

    It minimises sum |residual| (squared below OUTLIER) + stiffness x (each node's distance from the line through its
    two neighbours)^2. So nodes without points continue their neighbours, and single wild points do not count.
    """
    from scipy.sparse import csr_matrix, diags, identity, kron, vstack
    from scipy.sparse.linalg import cg

    shape = [len(axis) for axis in axes]
    nodes = int(np.prod(shape))
    rows, columns, weights = [], [], []
    for index, weight in _corners(axes, points):
        rows.append(np.arange(len(y)))
        columns.append(np.ravel_multi_index(index, shape))
        weights.append(weight)
    ones = (np.concatenate(weights), (np.concatenate(rows), np.concatenate(columns)))
    design = csr_matrix(ones, shape=(len(y), nodes))

    stiff: list[Any] = [1e-6 * identity(nodes)]  # no direction is left free
    for axis, bending in enumerate(stiffness):
        bend, level = _differences(np.log(axes[axis]))
        before, after = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
        rows_of_axis: Any = csr_matrix(np.vstack([np.sqrt(bending) * bend, np.sqrt(LEVEL) * level]))
        stiff.append(kron(kron(identity(before), rows_of_axis), identity(after)))
    penalty = vstack(stiff).tocsr()
    penalty = (penalty.T @ penalty).tocsr()

    values, counts = np.zeros(nodes), np.ones(len(y))
    for _ in range(ROUNDS):
        weighted = design.T.multiply(counts).tocsr()
        normal = (weighted @ design + penalty).tocsr()
        values, _ = cg(normal, weighted @ y, x0=values, rtol=1e-6, maxiter=2000, M=diags(1 / normal.diagonal()))
        counts = OUTLIER / np.maximum(np.abs(design @ values - y), OUTLIER)
    return Surface(tuple(axes), np.round(values, 2).reshape(shape))


def thin(values: Iterable[int], ratio: float) -> Floats:
    """Nodes for these measured values: the ends, and of the rest the roundest (most factors of two) that keep a
    distance of `ratio` to each other. Where v and v + 1 were measured, but not v + 2, a step was looked for: then both
    sides are kept."""
    found = sorted(set(values))
    known = set(found)
    far = {v: v + 1 for v in found if v >= 16 and v + 1 in known and v + 2 not in known}
    chosen: list[int] = []
    for value in sorted(known - set(far.values()), key=lambda v: (v not in (found[0], found[-1]), -(v & -v), v)):
        if all(max(value, other) / min(value, other) >= ratio for other in chosen):
            chosen.append(value)
    return np.array(sorted({found[0], found[-1], *chosen, *(far[v] for v in chosen if v in far)}), np.float64)


def _corners(axes: Sequence[Floats], points: Sequence[Floats]) -> Iterable[tuple[list[Ints], Floats]]:
    """For each corner of the cells that hold the points: its index an axis, and its weight."""
    cells = []
    for axis, x in zip(axes, points, strict=True):
        logs = np.log(axis)
        place = np.interp(np.log(x), logs, np.arange(len(axis), dtype=np.float64))
        low = np.minimum(place.astype(np.int64), max(len(axis) - 2, 0))
        cells.append((low, place - low, len(axis)))
    for corner in range(2 ** len(cells)):
        index, weight = [], np.ones(len(points[0]))
        for bit, (low, share, size) in enumerate(cells):
            upper = corner >> bit & 1
            if upper and size == 1:
                break
            index.append(low + upper)
            weight = weight * (share if upper else 1 - share)
        else:
            yield index, weight


def _differences(logs: Floats) -> tuple[Floats, Floats]:
    """Rows that give each inner node's distance from the line through its neighbours, and each node's difference to
    the next. Near sides of steps are neighbours of near sides, far ones of far ones: a step is no bend."""
    step = np.diff(logs) < STEP
    near, far = np.append(step, False), np.append(False, step)
    bends, levels = [], []
    for lane in (np.flatnonzero(~far), np.flatnonzero(~near)) if step.any() else (np.arange(len(logs)),):
        for left, at, right in zip(lane, lane[1:], lane[2:], strict=False):
            share = (logs[at] - logs[left]) / (logs[right] - logs[left])
            bends.append(np.zeros(len(logs)))
            bends[-1][[left, at, right]] = 1 - share, -1, share
        for left, right in pairwise(lane):
            levels.append(np.zeros(len(logs)))
            levels[-1][[left, right]] = -1, 1
    return np.array(bends).reshape(-1, len(logs)), np.array(levels).reshape(-1, len(logs))
