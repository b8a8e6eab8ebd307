"""What a run costs, and the summary's keys that say so.

Every GPU is charged for as long as it exists: idle, starting and draining ones too. Finished requests carry it all, the
cost of those that were lost or given up included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibrate.hardware import load_gpu
from servecast.costing.ownership import HOURS_A_MONTH, owned, rent_use
from servecast.costing.part import CostPart
from servecast.costing.power import Draw, draw_of
from servecast.costing.prices import DEFAULT, PriceSet, own_set, price_sets, priced, split_path, without
from servecast.costing.usage import Usage, usage_of
from servecast.errors import ServecastError
from sim.result import Result

if TYPE_CHECKING:
    from servecast.scenario import Scenario

RULE = (
    "every GPU is charged while it exists, idle, starting and draining included; finished requests carry all of it. "
    "Per million input tokens, and per million output tokens, is the whole cost over those alone: they do not add up. "
    "Where prefill and decode are apart, prompts also carry the prefill pools and answers the decode pools"
)


@dataclass(frozen=True, slots=True)
class Costing:
    """How a scenario's runs are charged: `gpus` are the pools' GPU ids, `rates` dollars per GPU and hour (None: nobody
    said, and `note` why), `draws` a pool each where power was asked for."""

    gpus: tuple[str, ...]
    prices: PriceSet | None
    rates: Mapping[str, float] | None
    part: CostPart
    draws: tuple[Draw, ...] | None = None
    note: str = ""

    def facts(self) -> dict[str, Any]:
        """What was assumed, for the manifest."""
        found: dict[str, Any] = {}
        if self.prices and self.rates:
            p = self.prices
            found = {"prices": p.said, "source": p.source, "note": p.note, "per_gpu_hour": dict(self.rates)}
            found |= {"rule": RULE}
        asked = self.part.model_dump(exclude_none=True, exclude={"prices"})
        if self.draws is not None:
            each = zip(self.gpus, self.draws, strict=True)
            asked["power"] |= {
                "watts_per_gpu": {g: {"idle": d.idle_w, "decode": d.decode_w, "prompt": d.prompt_w} for g, d in each},
                "estimate": "shares of the TDP by what steps do, good to a third; at the meter, with rest and PUE",
            }
        if self.part.buy and self._kwh is None:
            asked["buy"]["electricity"] = "left out: cost.power has no price"
        return found | asked

    @property
    def _kwh(self) -> float | None:
        return None if self.part.power is None else self.part.power.price

    def summary(self, result: Result, s: Mapping[str, Any]) -> dict[str, Any]:
        """The summary's keys about money and energy, of a run with the summary `s`; None where undefined.

        Always: `cost_per_hour` (the mean over the run), `cost_per_month` (730 h of this traffic), `cost_of_run`,
        `cost_per_request`, `cost_per_million_tokens` (input and output), `cost_per_million_input_tokens` and
        `cost_per_million_output_tokens` (each the whole cost over those tokens). Where prefill and decode are apart:
        `prefill_cost_per_million_input_tokens` and `decode_cost_per_million_output_tokens` (those pools' cost). All in
        dollars, per finished request and its tokens.

        With `cost.power`: `mean_power_w`, `energy_kwh`, `joules_per_token`, `joules_per_output_token`, and with a price
        `energy_cost_per_hour`. With `cost.buy`: `owned_cost_per_hour`, `owned_cost_per_million_tokens`,
        `break_even_buy_rent`; with `cost.api`: `api_cost_per_hour`, `break_even_rent_api`; with both:
        `break_even_buy_api` (see `ownership`).
        """
        usages = usage_of(result, self.gpus)
        duration, tokens_in, tokens_out = s["duration"], s["total_input_tokens"], s["total_output_tokens"]

        def cost_of(some: Sequence[Usage]) -> float | None:
            return None if self.rates is None else sum(u.gpu_s / 3600 * self.rates[u.gpu] for u in some)

        def per(cost: float | None, count: float) -> float | None:
            return None if cost is None or not count else cost / count

        cost = cost_of(usages)
        rent = per(cost, duration / 3600)
        found = {
            "cost_per_hour": rent,
            "cost_per_month": None if rent is None else HOURS_A_MONTH * rent,
            "cost_of_run": cost,
            "cost_per_request": per(cost, s["completed"]),
            "cost_per_million_tokens": per(cost, (tokens_in + tokens_out) / 1e6),
            "cost_per_million_input_tokens": per(cost, tokens_in / 1e6),
            "cost_per_million_output_tokens": per(cost, tokens_out / 1e6),
        }
        if {"prefill", "decode"} <= {u.role for u in usages}:
            for role, kind, count in (("prefill", "input", tokens_in), ("decode", "output", tokens_out)):
                own = cost_of([u for u in usages if u.role == role])
                found[f"{role}_cost_per_million_{kind}_tokens"] = per(own, count / 1e6)
        if self.draws is not None:
            joules = sum(draw.energy_j(usage) for draw, usage in zip(self.draws, usages, strict=True))
            watts = per(joules, duration)
            found |= {
                "mean_power_w": watts,
                "energy_kwh": joules / 3.6e6,
                "joules_per_token": per(joules, tokens_in + tokens_out),
                "joules_per_output_token": per(joules, tokens_out),
            }
            if self._kwh is not None:
                found["energy_cost_per_hour"] = None if watts is None else watts / 1000 * self._kwh
        return found | self._instead(usages, duration, tokens_in, tokens_out, rent)

    def _instead(
        self, usages: Sequence[Usage], duration_s: float, tokens_in: float, tokens_out: float, rent: float | None
    ) -> dict[str, float | None]:
        """What buying and paying per token would take."""
        found: dict[str, float | None] = {}
        buy, api, paid = self.part.buy, self.part.api, None
        if api is not None:
            paid = (tokens_in * api.input + tokens_out * api.output) / 1e6 / (duration_s / 3600) if duration_s else None
            found["api_cost_per_hour"] = paid
            found["break_even_rent_api"] = None if rent is None or paid is None else rent_use(rent, paid)
        if buy is not None:
            mine = owned(buy, usages, self.draws if self._kwh else None, self._kwh, duration_s)
            millions = (tokens_in + tokens_out) / 1e6
            found["owned_cost_per_hour"] = mine.per_hour
            found["owned_cost_per_million_tokens"] = mine.per_hour * duration_s / 3600 / millions if millions else None
            found["break_even_buy_rent"] = None if rent is None else mine.break_even(rent)
            if api is not None:
                found["break_even_buy_api"] = None if paid is None else mine.break_even(paid)
        return found


def costing_of(scenario: Scenario) -> Costing:
    """How runs of the scenario are charged; without a key `cost.prices`, by the set `runpod`, or not at all where it
    lacks a GPU. Raises ServecastError with every problem, under its key."""
    part, problems = scenario.cost or CostPart(), list[str]()
    gpus = tuple(pool.gpu for pool in scenario.cluster.pools)
    prices, rates, note = None, None, ""
    try:
        prices = _prices(scenario, part)
        rates = priced(prices, gpus)
    except ServecastError as error:
        if part.prices is None:
            note = f"no cost: {without(price_sets()[DEFAULT], next(g for g in gpus if g not in _default()))}"
        else:
            problems += (f"cost.prices: {problem}" for problem in error.problems)
    draws = None
    if part.power is not None:
        try:
            draws = tuple(draw_of(load_gpu(gpu), part.power) for gpu in gpus)
        except ServecastError as error:
            problems += error.problems
    if part.buy is not None and isinstance(part.buy.price, dict):
        have = part.buy.price
        problems += (
            f"cost.buy.price: nothing for {gpu}, of which there is a pool; give {{{gpu}: DOLLARS}} too"
            for gpu in dict.fromkeys(gpus)
            if gpu not in have
        )
    if problems:
        raise ServecastError(*problems)
    return Costing(gpus, prices, rates, part, draws, note)


def _default() -> Mapping[str, float]:
    return price_sets()[DEFAULT].prices


def _prices(scenario: Scenario, part: CostPart) -> PriceSet:
    if isinstance(part.prices, dict):
        return PriceSet(name="yours", source="the scenario", prices=part.prices)
    word = part.prices or DEFAULT
    if file := split_path(word):
        return own_set(scenario.path_of("cost.prices", file[0]), file[1])
    return price_sets()[word]
