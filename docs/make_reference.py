"""Write docs/reference.md from the code: `python docs/make_reference.py`. A test holds the file to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from calibrate.options import family, family_of, preset_names
from reports.words import DEFINITIONS
from servecast import listing
from servecast.cli import main
from servecast.scenario import Scenario
from servecast.units import parse_rate, parse_size
from workloads.units import parse_duration

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Written from the code by `python docs/make_reference.py`: every command, key, preset and name. `servecast X --help`
and `servecast run SCENARIO --show-resolved` say the same where you are.
"""


def text() -> str:
    """The whole page."""
    return "\n".join([HEAD, *commands(), *keys(), *engines(), *catalogue(), *metrics()]) + "\n"


def commands() -> Iterator[str]:
    """Every command with its options, as its help has them."""
    yield "## Commands\n"
    for path, command in _commands("servecast", main):
        arguments = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
        yield f"**`{' '.join([path, *arguments])}`** {_line(command.help or '')}\n"
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        if options:
            yield "| option | |\n|---|---|"
            for option in options:
                yield f"| `{', '.join(option.opts)}` | {_cell(option.help or '')} |"
            yield ""


def _commands(path: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(f"{path} {name}", command)
        else:
            yield f"{path} {name}", command


def _line(help: str) -> str:
    """The first paragraph."""
    return _cell(help.partition("\n\n")[0].partition("\b")[0])


def _cell(words: str) -> str:
    return re.sub(r"\s+", " ", words).strip().replace("|", "\\|").replace("<", "&lt;")


def keys() -> Iterator[str]:
    """Every part of a scenario, outermost first."""
    yield "## Scenario keys\n"
    seen: list[type[BaseModel]] = [Scenario]
    for part in seen:
        yield f'<a id="{_anchor(part)}"></a>\n### {_name(part)}\n\n{_cell(part.__doc__ or "")}\n'
        yield "| key | value | default |\n|---|---|---|"
        for key, field in part.model_fields.items():
            default = "required" if field.is_required() else _default(field.get_default())
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            yield f"| `{key}` | {_cell_kind(kind, seen)} | {default} |"
        yield ""


def _name(part: type[BaseModel]) -> str:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", part.__name__.removesuffix("Part"))
    return words if words == "Scenario" else words.lower()


def _anchor(part: type[BaseModel]) -> str:
    return f"key-{_name(part).replace(' ', '-').lower()}"


def _default(value: Any) -> str:
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell_kind(kind: Any, seen: list[type[BaseModel]]) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        parsers = [getattr(each, "func", None) for each in args[1:]]
        if parse_duration in parsers:
            return "time, with its unit"
        if parse_rate in parsers:
            return "rate, with its unit"
        return "size, with its unit" if parse_size in parsers else _cell_kind(args[0], seen)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_cell_kind(each, seen) for each in args if each is not NoneType))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in args)
    if origin is list:
        return f"list: {_cell_kind(args[0], seen)}"
    if origin is dict and args[1] is not Any:
        return f"mapping of names to {_cell_kind(args[1], seen)}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind not in seen:
            seen.append(kind)
        return f"[{_name(kind)}](#{_anchor(kind)})"
    plain = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    return plain.get(kind, "mapping" if origin is dict or kind is dict else "any")


def engines() -> Iterator[str]:
    """Presets, and the options of each family with their defaults in its newest preset."""
    yield "## Engines\n\nPresets, and the options that scenarios may set; others are refused, with the reason.\n"
    families: dict[str, list[str]] = {}
    for name in preset_names():
        families.setdefault(family_of(name), []).append(name)
    for kind, names in families.items():
        found = family(kind)
        defaults = found["presets"][names[-1]]["defaults"]
        yield f"### {found['title']}\n\nPresets: {', '.join(f'`{name}`' for name in names)}.\n"
        yield f"| option | value | default of `{names[-1]}` |\n|---|---|---|"
        for option, allowed in found["options"].items():
            default = defaults.get(option, "")
            shown = (
                "" if default in ("", None) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
            )
            yield f"| `{option}` | {_allowed(allowed)} | {shown} |"
        yield ""


def _allowed(allowed: Any) -> str:
    if isinstance(allowed, list):
        return ", ".join(f"`{each}`" for each in allowed)
    if isinstance(allowed, dict):
        return _cell(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in allowed.items()))
    return str(allowed)


def catalogue() -> Iterator[str]:
    """What can be named."""
    for what in ("gpus", "models", "mixes"):
        yield f"## {what.capitalize() if what != 'gpus' else 'GPUs'}\n\n```text"
        yield from (line.rstrip() for line in listing.LISTINGS[what]())
        yield "```\n"


def metrics() -> Iterator[str]:
    """What each number means."""
    yield "## Metrics\n\n| | |\n|---|---|"
    for name, meaning in DEFINITIONS.items():
        yield f"| {name} | {_cell(meaning)} |"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
