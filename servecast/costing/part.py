"""What a scenario says of money: whose prices, what power costs, what buying or paying per token would."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from servecast.costing.prices import Dollars, GpuId, price_sets, split_path
from servecast.errors import nearest, one_of
from servecast.parts import Part, checked


def _number(value: object) -> object:
    return float(value) if type(value) is int else value


Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]
Watts = Annotated[float, Field(gt=0, lt=100_000), BeforeValidator(_number)]


def _known_prices(prices: str | dict[str, float]) -> list[str]:
    if isinstance(prices, dict) or split_path(prices) or prices in price_sets():
        return []
    return [
        f": {prices!r} is no set of prices{nearest(prices, price_sets())}; known: {one_of(price_sets())}, a YAML file "
        "of yours, or {gpu: dollars an hour}"
    ]


class PowerPart(Part):
    """What is drawn, estimated from how busy GPUs are. `price` of a kWh in dollars (unset: energy alone is said), `pue`
    of the data centre, `rest`: watts of the server and network for each GPU. `tdp` by GPU, and the shares of it that
    are drawn while idle, in steps of decodes (`decode`) and in steps with prompts (`prompt`), in place of the
    catalogue's."""

    price: Annotated[float, Field(gt=0, lt=100), BeforeValidator(_number)] | None = None
    pue: Annotated[float, Field(ge=1, le=5), BeforeValidator(_number)] = 1.0
    rest: Annotated[float, Field(ge=0, lt=100_000), BeforeValidator(_number)] = 0.0
    tdp: dict[GpuId, Watts] = Field(default_factory=dict)
    idle: Share | None = None
    decode: Share | None = None
    prompt: Share | None = None


class BuyPart(Part):
    """GPUs of one's own: `price` of each in dollars, with its share of server and network (a number, or by GPU), paid
    over `years`, after which the share `residual` of it is left; `opex`: share of the price a year for space, people,
    repairs and capital. Electricity is what `power` says."""

    price: Dollars | dict[GpuId, Dollars]
    years: Annotated[float, Field(gt=0, le=30), BeforeValidator(_number)]
    residual: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)] = 0.0
    opex: Share = 0.0


class ApiPart(Part):
    """Dollars per million tokens that an API asks for."""

    input: Annotated[float, Field(ge=0, lt=1e6), BeforeValidator(_number)]
    output: Dollars


class CostPart(Part):
    """`prices`: a named set, a YAML file of yours, or {gpu: dollars an hour}. The rest only where it is asked for."""

    prices: Annotated[str | dict[GpuId, Dollars], checked(_known_prices)] | None = None
    power: PowerPart | None = None
    buy: BuyPart | None = None
    api: ApiPart | None = None
