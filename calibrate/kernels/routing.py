"""How tokens spread over experts: experts that get any, and rows, on the fullest of the ranks. Knows no kernels.

Skews, by name: "balanced" (every expert as many rows), "uniform" (each token draws its experts at random),
"power_law_<alpha>" (the loads of the experts follow that power law) and "touched=<n>" (n experts share all rows). A
table instead of a name: every expert's share of the rows, in the order in which experts are dealt to the ranks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from servecast.errors import ServecastError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Skew = str | tuple[float, ...]

TOKENS = np.unique(np.rint(2.0 ** np.concatenate([np.arange(0, 8, 0.5), np.arange(8, 18)])))
"""Token counts at which a power law is worked out; in between it is smooth."""
DEALS = 8  # ways of dealing the experts to ranks, over which the fullest rank is averaged
SEED = 20240229
SKEWS = r"balanced|uniform|power_law_(?P<alpha>\d+(\.\d+)?)|touched=(?P<touched>\d+)"


def loads(skew: Skew, tokens: Floats, experts: int, topk: int, ep: int) -> tuple[Floats, Floats]:
    """(experts that get rows, rows) on the fullest of `ep` ranks for every entry of `tokens`; at least 1 each.

    `tokens` (0 counts as 1) enter the layer and go to `topk` of `experts` each; the fullest rank holds experts/ep of
    them, rounded up.
    """
    if not isinstance(skew, str):
        return _table(skew, np.maximum(tokens, 1.0), experts, topk, ep)
    named = re.fullmatch(SKEWS, skew)
    if named is None:
        raise ServecastError(f"skew: found {skew!r}; expected balanced, uniform, power_law_<alpha> or touched=<n>")
    tokens = np.maximum(tokens, 1.0)
    ep = min(ep, experts)
    local, mean = -(-experts // ep), tokens * topk / ep
    if named["alpha"]:
        active, rows = _power_law(experts, topk, ep, float(named["alpha"]))
        x = np.log(tokens)
        active = np.exp(np.interp(x, np.log(TOKENS), np.log(active)))
        rows = np.exp(np.interp(x, np.log(TOKENS), np.log(rows / TOKENS))) * tokens
    elif named["touched"]:
        active, rows = np.full_like(tokens, min(int(named["touched"]), local)), mean
    elif skew == "uniform":
        active = local * -np.expm1(tokens * np.log1p(-min(topk / experts, 1 - 1e-12)))
        # the largest of ep nearly normal sums lies about sqrt(2 ln ep) deviations above their mean
        rows = np.minimum(mean + np.sqrt(2 * np.log(ep) * mean), tokens * min(topk, local))
    else:
        active, rows = np.minimum(mean, local), mean
    rows = np.maximum(rows, 1.0)
    return np.minimum(np.maximum(active, 1.0), rows), rows


def _table(shares: tuple[float, ...], tokens: Floats, experts: int, topk: int, ep: int) -> tuple[Floats, Floats]:
    """`loads` of a table: each token draws `topk` experts with these shares; ranks hold neighbours, the first ones one
    more where they do not divide."""
    given = np.array(shares, np.float64)
    if len(given) != experts or not (given >= 0).all() or not 0 < given.sum() < np.inf:
        raise ServecastError(f"skew: found a table of {len(given)} shares; expected {experts}, none negative")
    chosen = topk * given / given.sum()  # by how many tokens each
    if (most := float(chosen.max())) > 1:
        raise ServecastError(
            f"skew: expert {int(chosen.argmax())} has {most / topk:.1%} of the rows; a token goes to one once, so "
            f"with {topk} experts a token it can have {1 / topk:.1%} at most"
        )
    tokens_column = tokens[..., None]
    active = -np.expm1(tokens_column * np.log1p(-np.minimum(chosen, 1 - 1e-12)))
    parts = [part for part in np.array_split(np.arange(experts), ep) if len(part)]
    fullest = max(parts, key=lambda part: float(chosen[part].sum()))
    rows = np.maximum(tokens * chosen[fullest].sum(), 1.0)
    return np.minimum(np.maximum(active[..., fullest].sum(-1), 1.0), rows), rows


@lru_cache(maxsize=4096)
def _power_law(experts: int, topk: int, ep: int, alpha: float) -> tuple[Floats, Floats]:
    """`loads` at TOKENS.

    Weights of the experts are the quantiles of a density x^-alpha between 1 and 0.8 x tokens (0.01 and 2 while there
    are fewer rows than experts); rows follow the weights, are whole, at most one a token, and what the rounding leaves
    over goes to experts without any. So NVIDIA's published tables draw them (collector of aiconfigurator, Apache-2.0,
    helper.py), at random; here it is the middle of the draws.
    """
    tokens = TOKENS[:, None]
    total = tokens * topk
    few = total <= experts
    power = 1 - alpha if abs(1 - alpha) > 1e-6 else 1e-6
    low = np.where(few, 0.01, 1.0) ** power
    high = np.where(few, 2.0, np.maximum(0.8 * tokens, 1.001)) ** power
    middle = (np.arange(experts) + 0.5) / experts
    weight = ((high - low) * middle + low) ** (1 / power)
    rows = np.rint(np.minimum(total * weight / weight.sum(1, keepdims=True), tokens))
    left = total - rows.sum(1, keepdims=True)
    empty = rows == 0
    filled = np.clip(left, 0, empty.sum(1, keepdims=True)) / np.maximum(empty.sum(1, keepdims=True), 1)
    active = np.where(empty, filled, 1.0)
    left = left - np.where(empty, filled, 0.0).sum(1, keepdims=True)
    rows = rows + np.where(empty, filled, 0.0)
    room = np.where(left > 0, tokens - rows, rows)
    rows = rows + left * room / np.maximum(room.sum(1, keepdims=True), 1e-9)

    vacant = -experts % ep  # places of ranks that hold an expert less
    rows, active = (np.pad(x, ((0, 0), (0, vacant))) for x in (rows, active))
    deal = np.random.default_rng(SEED)
    dealt = np.stack([deal.permutation(experts + vacant) for _ in range(DEALS if ep > 1 else 1)])
    dealt = dealt.reshape(len(dealt), ep, -1)
    of_rank = rows[:, dealt].sum(3)
    fullest = of_rank.argmax(2)[..., None]
    most = np.take_along_axis(of_rank, fullest, 2)[..., 0].mean(1)
    touched = np.take_along_axis(active[:, dealt].sum(3), fullest, 2)[..., 0].mean(1)
    found = np.maximum.accumulate(np.maximum(touched, 1.0)), np.maximum.accumulate(np.maximum(most, 1.0))
    for array in found:
        array.flags.writeable = False  # shared by every caller
    return found
