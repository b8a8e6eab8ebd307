"""Buying against renting by the hour and against paying per token: dollars per hour, and the use at which they meet.

**Use** (0 to 1) is the share of all hours in which the deployment serves the traffic of the run; in the others it has
nothing to do: bought GPUs idle, an API is not asked, and rented GPUs are given back (or, where they are paid for all
the time, stand idle: `rent_use`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servecast.costing.part import BuyPart
from servecast.costing.power import Draw
from servecast.costing.usage import Usage

HOURS_A_YEAR = 8760
HOURS_A_MONTH = HOURS_A_YEAR / 12


def capex_per_hour(price: float, years: float, residual: float) -> float:
    """Dollars per GPU and hour, used or not: `price (1 - residual) / (years x 8760)`."""
    return price * (1 - residual) / (years * HOURS_A_YEAR)


@dataclass(frozen=True, slots=True)
class Owned:
    """Dollars per hour of bought GPUs, all of a deployment together: `fixed` (capex and opex), and electricity while
    idle and while it serves the run's traffic."""

    fixed: float
    idle: float = 0.0
    load: float = 0.0

    @property
    def per_hour(self) -> float:
        """Dollars per hour while it serves."""
        return self.fixed + self.load

    def break_even(self, other: float) -> float | None:
        """The use from which on it is cheaper than what takes `other` dollars per hour of this traffic, and nothing in
        other hours: where `fixed + idle + use (load - idle) = use x other`. Above 1: at no use; None: electricity alone
        takes more."""
        gain = other - (self.load - self.idle)
        return (self.fixed + self.idle) / gain if gain > 0 else None


def owned(
    buy: BuyPart, usages: Sequence[Usage], draws: Sequence[Draw] | None, price_kwh: float | None, duration_s: float
) -> Owned:
    """What buying the deployment of a run would take: as many GPUs as it had at one time, which all stay.

    Per hour: `fixed` = sum of GPUs x (capex + price x opex / 8760). Electricity = kW x `price_kwh`; `load` is the mean
    over the `duration_s` seconds of the run, with GPUs idle that are bought and were not there all the time. Without
    draws or a price, electricity is left out.
    """
    fixed = idle_w = load_w = 0.0
    for i, usage in enumerate(usages):
        price = buy.price if isinstance(buy.price, float) else buy.price[usage.gpu]
        each = capex_per_hour(price, buy.years, buy.residual) + price * buy.opex / HOURS_A_YEAR
        fixed += usage.gpus * each
        if draws is not None and duration_s:
            idle_w += usage.gpus * draws[i].idle_w
            absent = usage.gpus - usage.gpu_s / duration_s
            load_w += draws[i].energy_j(usage) / duration_s + absent * draws[i].idle_w
    kwh = price_kwh or 0.0
    return Owned(fixed, idle_w / 1000 * kwh, load_w / 1000 * kwh)


def rent_use(rent_per_hour: float, api_per_hour: float) -> float | None:
    """The use from which on GPUs that are rented all the time are cheaper than the API: `rent / api`. None where the
    API takes nothing."""
    return rent_per_hour / api_per_hour if api_per_hour > 0 else None
