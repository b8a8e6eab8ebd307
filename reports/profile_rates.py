"""What kernels reach of a GPU's datasheet, by a profile: FLOP/s and bytes/s at the telling points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibrate.profile import Profile
from reports.profile_points import BOUNDS, Points, telling_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Achieved:
    """The rates, over shapes, of calls of one size: in FLOP/s where `bound` is "flops", in bytes/s where "bytes".

    `limit` is the datasheet's; `at` names the shape of the best rate.
    """

    family: str
    of: str
    size: str
    bound: str
    median: float
    best: float
    limit: float
    at: str


def achieved(profile: Profile) -> list[Achieved]:
    """What calls of every size reach, on the side on which they come closer to the datasheet, and `best` ones of the
    other. Only calls within the measured range count."""
    found = []
    for points in telling_points(profile):
        if not points.bounds:
            continue
        seconds, inside = points.price(profile), points.measured(profile)
        sizes = np.array(points.sizes)
        for size in dict.fromkeys(points.sizes):
            here = np.flatnonzero(inside & (sizes == size))
            if len(here):
                found += [_achieved(points, bound, size, here, seconds) for bound in points.bounds]
    return found


def by_size(found: Sequence[Achieved]) -> list[Achieved]:
    """Of what `achieved` found, for every size the side that comes closer to the datasheet."""
    closer: dict[tuple[str, str, str], Achieved] = {}
    for each in found:
        key = each.family, each.of, each.size
        if key not in closer or each.median / each.limit > closer[key].median / closer[key].limit:
            closer[key] = each
    return list(closer.values())


def best(found: Sequence[Achieved]) -> list[tuple[str, str, Achieved | None, Achieved | None]]:
    """(family, of, the best FLOP/s, the best bytes/s) of what `achieved` found."""
    rows = []
    for family, of in dict.fromkeys((each.family, each.of) for each in found):
        mine = [each for each in found if (each.family, each.of) == (family, of)]
        flops, moved = ([each for each in mine if each.bound == bound] for bound in BOUNDS)
        rows.append((family, of, max(flops, key=_best, default=None), max(moved, key=_best, default=None)))
    return rows


def _best(each: Achieved) -> float:
    return each.best


def _achieved(points: Points, bound: str, size: str, here: NDArray[np.int64], seconds: Floats) -> Achieved:
    work, limit = (points.flops, points.peak) if bound == "flops" else (points.moved, points.bandwidth)
    rates = work[here] / seconds[here]
    top = int(rates.argmax())
    name = points.names[int(here[top])]
    return Achieved(points.family, points.of, size, bound, float(np.median(rates)), float(rates[top]), limit, name)
