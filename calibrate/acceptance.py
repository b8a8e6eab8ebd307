"""How often drafted tokens are accepted: what people give, as the share of drafts accepted up to each position.

It knows no engine: which drafts are right is a matter of the target model, of what drafts, and of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibrate.catalog import read
from servecast.errors import ServecastError, nearest, one_of


def acceptance_names() -> list[str]:
    """The measured tables of the catalogue."""
    return list(read("acceptance")["tables"])


def table(name: str) -> list[float]:
    """The rates of a measured table, one a position. Raises ServecastError for an unknown name."""
    tables = read("acceptance")["tables"]
    if name not in tables:
        names = acceptance_names()
        raise ServecastError(f"{name!r} is no measured table{nearest(name, names)}; known: {one_of(names)}")
    rates: list[float] = tables[name]["rates"]
    return rates


def geometric(rate: float, tokens: int) -> list[float]:
    """Rates where each token is accepted with the same probability once those before it are."""
    return [rate ** (i + 1) for i in range(tokens)]


def of_length(length: float, tokens: int) -> list[float]:
    """The same with a mean acceptance length of `length` tokens a step, the target's own among them."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(geometric(middle, tokens)) < length else (low, middle)
    return geometric((low + high) / 2, tokens)


def of_lengths(lengths: Sequence[float]) -> list[float]:
    """Rates from mean acceptance lengths that were measured with 1, 2, 3, ... drafted tokens.

    A further token adds its rate to the length. Rates that would rise are noise: neighbours are pooled until none does
    (isotonic regression, the pool-adjacent-violators algorithm), and none is below 0.
    """
    pools: list[tuple[float, int]] = []  # mean, how many
    for rate in np.diff([1.0, *lengths]).tolist():
        pools.append((rate, 1))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [min(max(mean, 0.0), 1.0) for mean, count in pools for _ in range(count)]


def mean_length(rates: Sequence[float]) -> float:
    """Tokens a step."""
    return 1.0 + sum(rates)
