"""Where two profiles price kernels differently. For profiles of different GPUs that compares the hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.heads import kind_sizes
from calibrate.profile import Profile
from reports.profile_points import Points, telling_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Part = tuple[str, str]
    Only = tuple[tuple[str, tuple[str, ...]], ...]

LARGEST = 3
"""Disagreements that are named, of each family; of each shape the largest one only."""
SAME = 1.005
"""Ratios, or what they are off, that are none to speak of."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Prices of B over those of A at `points` calls that both have measured; `left_out` others are outside of one."""

    family: str
    of: str
    points: int
    left_out: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One call: its dtype or operation and size, its shape, its seconds in A and in B, and how many times their ratio
    is off the median of their row (above 1 either way)."""

    family: str
    what: str
    shape: str
    a: float
    b: float
    off: float


@dataclass(frozen=True, slots=True)
class Diff:
    """`only[0]` and `only[1]` are what one of them alone has measured: (family, parts), "all of it" where the other
    has nothing of a family."""

    rows: tuple[Difference, ...]
    largest: tuple[Disagreement, ...]
    only: tuple[Only, Only]


def diff(a: Profile, b: Profile) -> Diff:
    """Compare the prices of the telling points, those that lie inside what both have measured."""
    there = {(points.family, points.of) for points in telling_points(b)}
    rows: list[Difference] = []
    calls: list[Disagreement] = []
    for points in telling_points(a):
        if (points.family, points.of) not in there:
            continue
        inside = points.measured(a) & points.measured(b)
        if not inside.any():
            continue
        first, second = points.price(a)[inside], points.price(b)[inside]
        low, median, high = (float(q) for q in np.quantile(second / first, (0.1, 0.5, 0.9)))
        rows.append(Difference(points.family, points.of, len(first), int((~inside).sum()), median, low, high))
        calls += _calls(points, np.flatnonzero(inside), first, second, median)
    largest = [call for family in dict.fromkeys(c.family for c in calls) for call in _largest(family, calls)]
    return Diff(tuple(rows), tuple(largest), (_only(a, b), _only(b, a)))


def datasheets(a: Profile, b: Profile) -> list[tuple[str, float]]:
    """(what, rate of A over that of B) of the datasheets: how the times should differ where nothing else does."""
    found = [("memory bandwidth", a.gpu.bandwidth_bytes_per_s / b.gpu.bandwidth_bytes_per_s)]
    found += [(f"{d} FLOP/s", a.gpu.flops[d] / b.gpu.flops[d]) for d in a.gpu.flops if d in b.gpu.flops]
    return [*found, ("link bandwidth", a.gpu.link.bandwidth_bytes_per_s / b.gpu.link.bandwidth_bytes_per_s)]


def _calls(points: Points, where: NDArray[np.int64], a: Floats, b: Floats, median: float) -> Iterator[Disagreement]:
    for i, first, second in zip(where.tolist(), a.tolist(), b.tolist(), strict=True):
        off = float(np.exp(abs(np.log(second / first / median))))
        yield Disagreement(points.family, f"{points.of}, {points.sizes[i]}", points.names[i], first, second, off)


def _largest(family: str, calls: Iterable[Disagreement]) -> list[Disagreement]:
    """The calls of a family whose ratios are furthest from the median of their row, one a shape."""
    mine = sorted((call for call in calls if call.family == family), key=lambda call: -call.off)
    shapes: dict[str, Disagreement] = {}
    for call in mine:
        shapes.setdefault(call.shape, call)
    return [call for call in shapes.values() if call.off > SAME][:LARGEST]


def _only(a: Profile, b: Profile) -> Only:
    """What A has measured and B has not."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for family, parts in _PARTS.items():
        if family not in a.families:
            continue
        if family not in b.families:
            found.append((family, ("all of it",)))
            continue
        others = set(parts(b.families[family]))
        groups: dict[str, list[str]] = {}
        for group, item in dict.fromkeys(parts(a.families[family])):
            if (group, item) not in others:
                groups.setdefault(group, []).append(item)
        if groups:
            found.append((family, tuple(f"{group} {', '.join(items)}".strip() for group, items in groups.items())))
    return tuple(found)


def _kinds(model: Any) -> list[Part]:
    found = []
    for name in model.kinds:
        dtype, head_dim, value_dim, window = kind_sizes(name)
        size = f"{head_dim}" if value_dim == head_dim else f"{head_dim} and {value_dim}"
        found.append((f"{dtype} KV, heads of", size + (f" (window {window:,})" if window else "")))
    return found


_PARTS: Mapping[str, Callable[[Any], list[Part]]] = {
    "gemm": lambda model: [(weights, "") for weights in model.tables],
    "prefill_attention": _kinds,
    "decode_attention": _kinds,
    "moe": lambda model: [(variant.weights, "") for variant in model.variants],
    "elementwise": lambda model: [(op, "") for op, _ in model.curves],
    "collective": lambda model: [(f"{op} by {backend}, GPUs", str(gpus)) for op, backend, gpus in model.curves],
}
"""Family -> what a model of it covers, as (group, item)."""
