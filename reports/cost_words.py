"""What a run costs, said to people: dollars, watts, and buying or paying per token instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from reports.words import NONE, percent, quantity


def dollars(value: float | None) -> str:
    """`$2,548`, `$3.49`, `$0.097`, `$0.00012`: cents, and two digits of what is less than a dime."""
    if value is None:
        return NONE
    if value >= 1000:
        return f"${value:,.0f}"
    if value == 0 or value >= 0.1:
        return f"${value:.2f}"
    return f"${value:.{1 - math.floor(math.log10(value))}f}"


def cost_facts(s: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, sentence) of what is known about money and power, from a summary and its manifest."""
    assumed, found = manifest.get("cost") or {}, []
    if s.get("cost_per_hour") is not None:
        each = ", ".join(f"{dollars(s[f'cost_per_million_{kind}tokens'])} per million {kind.replace('_', ' ')}tokens"
                         for kind in ("", "output_"))  # fmt: skip
        hour, month = dollars(s["cost_per_hour"]), dollars(s["cost_per_month"])
        found.append(("Cost", f"{hour} an hour, {month} a month; {each} ({assumed['prices']})"))
    if s.get("mean_power_w") is not None:
        paid = f", {dollars(s['energy_cost_per_hour'])} an hour" if "energy_cost_per_hour" in s else ""
        token = f"{quantity(s['joules_per_output_token'])} J per output token"
        found.append(("Power", f"{quantity(s['mean_power_w'])} W{paid}, {token} (estimate)"))
    if "owned_cost_per_hour" in s:
        meets = [_meets("renting", s.get("break_even_buy_rent"), s["cost_per_hour"])]
        if "api_cost_per_hour" in s:
            meets.append(_meets("the API", s["break_even_buy_api"], s["api_cost_per_hour"]))
        found.append(("Buying", f"{dollars(s['owned_cost_per_hour'])} an hour{''.join(filter(None, meets))}"))
    if "api_cost_per_hour" in s:
        use = s["break_even_rent_api"]
        rented = f"; GPUs rented all the time are {_cheaper('it', use)}" if s["cost_per_hour"] is not None else ""
        found.append(("API", f"{dollars(s['api_cost_per_hour'])} an hour of this traffic{rented}"))
    return found


def cost_rows(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of a report's table: every key of the summary about money and energy."""
    money = {
        "cost_per_hour": "an hour, mean over the run", "cost_per_month": "a month (730 h) of this traffic",
        "cost_of_run": "the run", "cost_per_request": "a finished request",
        "cost_per_million_tokens": "a million tokens, input and output",
        "cost_per_million_input_tokens": "a million input tokens, if these carry all",
        "cost_per_million_output_tokens": "a million output tokens, if these carry all",
        "prefill_cost_per_million_input_tokens": "a million input tokens, prefill pools alone",
        "decode_cost_per_million_output_tokens": "a million output tokens, decode pools alone",
        "energy_cost_per_hour": "electricity, an hour",
        "owned_cost_per_hour": "bought, an hour of this traffic",
        "owned_cost_per_million_tokens": "bought, a million tokens, input and output",
        "api_cost_per_hour": "paid per token, an hour of this traffic",
    }  # fmt: skip
    shares = {
        "break_even_buy_rent": "buying is cheaper than renting from this use on",
        "break_even_buy_api": "buying is cheaper than the API from this use on",
        "break_even_rent_api": "renting all the time is cheaper than the API from this use on",
    }
    plain = {
        "mean_power_w": ("power at the meter, mean (estimate)", "W"), "energy_kwh": ("energy of the run", "kWh"),
        "joules_per_token": ("energy a token, input and output", "J"),
        "joules_per_output_token": ("energy an output token, if these carry all", "J"),
    }  # fmt: skip
    rows = [(name, dollars(s[key])) for key, name in money.items() if key in s]
    rows += [(name, f"{quantity(s[key])} {unit}") for key, (name, unit) in plain.items() if key in s]
    return rows + [(name, percent(s[key])) for key, name in shares.items() if key in s]


def cost_assumptions(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(what, assumption) of a report's table."""
    assumed = manifest.get("cost") or {}
    if "prices" in assumed:
        rates = ", ".join(f"{gpu} {dollars(rate)}" for gpu, rate in assumed["per_gpu_hour"].items())
        yield "prices per GPU and hour", f"{rates} ({assumed['prices']})"
        yield "source", "; ".join(filter(None, (assumed["source"], assumed["note"])))
        yield "rule", assumed["rule"]
    for key in ("power", "buy", "api"):
        for name, value in assumed.get(key, {}).items():
            yield f"{key}: {name.replace('_', ' ')}", _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _meets(what: str, use: float | None, other: float | None) -> str:
    if other is None:
        return ""
    return f"; {_cheaper(what, use)}"


def _cheaper(what: str, use: float | None) -> str:
    if use is None or use > 1:
        return f"at no use cheaper than {what}"
    return f"cheaper than {what} from {percent(use)} use on"
