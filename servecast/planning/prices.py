"""What a GPU-hour costs in a plan: a bundled set or a file, with prices of the user's own on top."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from calibrate.hardware import load_gpu
from servecast.costing.prices import DEFAULT, own_set, price_sets, split_path
from servecast.errors import ServecastError, nearest, one_of


def prices_of(word: str | None, own: Iterable[str] = ()) -> tuple[dict[str, float], str]:
    """(dollars per GPU-hour by GPU, whose they are). `own`: `gpu=2.50`. Raises ServecastError with every problem."""
    named, problems = word or DEFAULT, list[str]()
    if path := split_path(named):
        found = own_set(Path(path[0]), path[1])
    elif named in price_sets():
        found = price_sets()[named]
    else:
        raise ServecastError(
            f"--prices {named}: no such price set{nearest(named, price_sets())}; there are {one_of(price_sets())}, "
            "or name a YAML file of your own"
        )
    prices, said = dict(found.prices), [found.said]
    for text in own:
        gpu, _, price = text.partition("=")
        try:
            prices[load_gpu(gpu.strip()).id] = dollars(price)
        except ServecastError as error:
            problems += [f"--price {text}: {problem}" for problem in error.problems]
        except ValueError:
            problems.append(f"--price {text}: expected GPU=DOLLARS per GPU-hour, such as h100-sxm=2.50")
        said.append(f"{gpu.strip()} yours")
    if problems:
        raise ServecastError(*problems)
    return prices, "; ".join(said)


def dollars(text: str) -> float:
    """Raises ValueError for what is no price."""
    value = float(text.strip().lstrip("$"))
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value
