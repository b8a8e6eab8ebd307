"""The options that may be written for an engine, by its own names: what a catalogue file of the family says of them.

A family is an engine in all its versions; a preset is one version's defaults. What an option means to the simulator is
said in `calibrate/families/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from calibrate.catalog import read
from servecast.errors import ServecastError, nearest, one_of

FAMILIES = (
    "vllm", "sglang", "tensorrt-llm", "tgi", "llama.cpp", "mlc-llm", "transformers", "sarathi", "orca",
)  # fmt: skip
"""Catalogue files `engine-<family>.yaml`; a family's presets are called `<family>-<version>`."""


@dataclass(slots=True)
class Chosen:
    """Options while they are resolved: `values` by name, and where each came from ("user", or the preset's source)."""

    values: dict[str, Any]
    preset_source: str
    sources: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = dict.fromkeys(self.values, "user")

    def default(self, key: str, value: object, why: str = "") -> None:
        """`key` is `value` unless the user said otherwise."""
        if key not in self.values:
            self.values[key] = value
            self.sources[key] = f"{self.preset_source} default{why}"


def family(name: str) -> Mapping[str, Any]:
    """The catalogue file of a family."""
    data: Mapping[str, Any] = read(f"engine-{name}")
    return data


def preset_names() -> list[str]:
    """The presets of the catalogue, by family, oldest first."""
    return [preset for name in FAMILIES for preset in family(name)["presets"]]


def family_of(preset: str) -> str:
    """The family of a preset by its name, listed or not; "" if there is none."""
    return max((name for name in FAMILIES if preset == name or preset.startswith(f"{name}-")), key=len, default="")


def find_preset(word: object) -> tuple[str, list[str]]:
    """The preset for `word`, and a note when its version is not listed and the nearest lower one stands in."""
    of = family_of(word) if isinstance(word, str) else ""
    known = list(family(of)["presets"]) if of else []
    versions = [name for name in known if name != of]  # a preset may have none, and stand for all
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)?", str(word).removeprefix(f"{of}-")) if versions else None
    if word in known:
        return str(word), []
    if not match:
        known = preset_names()
        hint = nearest(word, known) if isinstance(word, str) else ""
        found = "missing" if word is None else f"{word!r} is not a preset{hint}"
        raise ServecastError(f"engine.preset: {found}; known: {one_of(known)}")
    wanted = (int(match[1]), int(match[2] or 0))
    numbers = {name: _version(name, of, wanted) for name in versions}
    lower = [name for name in versions if numbers[name] <= wanted]
    if not lower:
        raise ServecastError(f"engine.preset: {word!r} is older than the oldest preset; known: {one_of(known)}")
    until = family(of)["presets"][lower[-1]].get("until")
    if until is not None and wanted > tuple(until):
        raise ServecastError(
            f"engine.preset: {word!r} is not modelled: {lower[-1]} stands for versions up to "
            f"{until[0]}.{until[1]}; known: {one_of(known)}"
        )
    if numbers[lower[-1]] == wanted:
        return lower[-1], [f"{word} uses the preset {lower[-1]}"]
    return lower[-1], [f"{word} is not a preset: resolved to {lower[-1]}, the nearest lower version"]


def _version(preset: str, of: str, wanted: tuple[int, int]) -> tuple[int, int]:
    """Major and minor; a preset that names a major version only stands for all of it."""
    major, _, minor = preset.removeprefix(f"{of}-").partition(".")
    return int(major), int(minor) if minor else wanted[1] if int(major) == wanted[0] else 0


def flat(options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Options with sections (`kv_cache_config: {dtype: fp8}`) as dotted names (`kv_cache_config.dtype`), of those
    sections that the family has."""
    sections = {name.partition(".")[0] for name in known if "." in name}
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key in sections and isinstance(value, Mapping):
            found |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        section, dot, name = key.partition(".")
        if dot:
            found.setdefault(section, {})[name] = value
        else:
            found[key] = value
    return found


def refusals(options: Mapping[str, object]) -> list[str]:
    """Every problem of a scenario's engine options, `preset` among them, that shows without a model and a GPU. Raises
    `ServecastError` where there is no such preset."""
    name, _ = find_preset(options.get("preset"))
    rest = flat({k: v for k, v in options.items() if k != "preset"}, family(family_of(name))["options"])
    return [problem for key, value in rest.items() if (problem := _refusal(key, value, name))]


def _refusal(key: str, value: object, name: str) -> str | None:
    """Why this option of the preset `name`, or its value, cannot be taken, or None."""
    data = family(family_of(name))
    preset, unmodelled, options = data["presets"][name], data["unmodelled"], data["options"]
    where, section = f"engine.{key}", key.partition(".")[0]
    inside = [option.partition(".")[2] for option in options if option.startswith(f"{section}.")]
    if inside and key == section:
        return None if value is None else f"{where} is {value!r}; expected a mapping of {one_of(inside)}"
    if key in unmodelled:
        neutral = unmodelled[key]["neutral"]
        if any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            return None
        words = one_of("null" if n is None else str(n).lower() for n in neutral)
        why = f" ({unmodelled[key]['why']})" if "why" in unmodelled[key] else ""
        allowed = f"only {words} is accepted" if words else "leave it out"
        return f"{where}: {value!r} is not modelled yet{why}; {allowed}"
    if key in data["elsewhere"]:
        return f"{where}: set it as {data['elsewhere'][key]} in the scenario"
    if key not in options:
        if inside:
            return f"{where}: unknown option{nearest(key.partition('.')[2], inside)}; modelled: {one_of(inside)}"
        ignored = data.get("command_line", {}).get("ignored", {})
        if key in (*ignored.get("flags", ()), *ignored.get("values", ())):
            return f"{where}: has no influence here, or none that is modelled (docs/not-modelled.md); take it out"
        hint = nearest(key, ["preset", *options, *unmodelled])
        return f"{where}: unknown option{hint}; modelled: {one_of(['preset', *options])}"
    if value is None:
        return None
    if key in preset["absent"] and value != preset["defaults"].get(key):
        return f"{where}: {name} does not have this option; take it out or use another preset"
    if key in preset["fixed"] and value != preset["defaults"][key]:
        return f"{where}: {value!r} cannot be set in {name}: {preset['fixed'][key]}"
    if problem := _wrong_value(where, value, options[key], preset["absent_words"].get(key, ())):
        return problem
    if key in preset["only"] and value not in preset["only"][key]:
        return f"{where} is {value}; {name} allows {one_of(map(str, preset['only'][key]))}"
    return None


def _wrong_value(where: str, value: object, allowed: Any, absent: Any) -> str | None:
    """What is wrong with a value, given what the catalogue allows."""
    if allowed == "flag":
        return None if isinstance(value, bool) else f"{where} is {value!r}; expected true or false"
    if isinstance(allowed, list):
        words = [word for word in allowed if word not in absent]
        return None if value in words else f"{where} is {value!r}; expected {' or '.join(words)}"
    if allowed == "text":
        return None if isinstance(value, str) and value else f"{where} is {value!r}; expected a name or a path"
    if isinstance(value, bool):
        return f"{where} is {value!r}; expected a number"
    if "from" in allowed:
        least, most = allowed["from"], allowed["most"]
        good = isinstance(value, (int, float)) and least <= value <= most
        return None if good else f"{where} is {value!r}; expected a number of at least {least:g} and at most {most:g}"
    if "above" in allowed:
        above, most = allowed["above"], allowed["most"]
        good = isinstance(value, (int, float)) and above < value <= most
        return None if good else f"{where} is {value!r}; expected a number above {above:g} and at most {most:g}"
    if not isinstance(value, int) or not allowed["least"] <= value <= allowed.get("most", 2**31 - 1):
        most = f" and at most {allowed['most']:,}" if "most" in allowed else ""
        return f"{where} is {value!r}; expected a whole number of at least {allowed['least']}{most}"
    return None
