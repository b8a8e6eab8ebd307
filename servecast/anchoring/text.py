"""A `host:` block put into the text of a scenario file, whose other lines and comments stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from servecast.errors import ServecastError

if TYPE_CHECKING:
    from servecast.scenario import Scenario


def block(host: Mapping[str, str | float]) -> str:
    """The part as a scenario has it."""
    return "host:\n" + "".join(f"  {name}: {value}\n" for name, value in host.items())


def write(scenario: Path, out: Path, host: Mapping[str, str | float]) -> None:
    """A new file: the scenario's text with `host` put in, if it means what it should there."""
    text = put_host(scenario.read_bytes().decode("utf-8-sig"), host)
    try:
        with out.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise ServecastError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    problems: list[str] = []
    tried(problems, out)
    if problems:
        out.unlink()
        hint = f"--out {out}: the copy would not run there, so it was not kept; paste the block above into {scenario}"
        raise ServecastError(hint, *problems)


def put_host(text: str, host: Mapping[str, str | float]) -> str:
    """A scenario's text with these keys in its `host:` part; all else, comments too, as it was."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "a scenario that was loaded"
    pair = next(((key, node) for key, node in root.value if key.value == "host"), None)
    newline = "\r\n" if "\r\n" in text else "\n"
    flow = ", ".join(f"{name}: {value}" for name, value in host.items())
    if pair is None:
        if root.flow_style:
            end = root.value[-1][1].end_mark.index
            return _edited(text, [(end, end, f", host: {{{flow}}}")])
        indent = " " * root.value[0][0].start_mark.column
        lines = "".join(f"{indent}{line}{newline}" for line in block(host).splitlines())
        return _edited(text, [_line_after(text, root.value[-1][1].end_mark.index, lines, newline)])
    key, node = pair
    if node.start_mark.index < key.end_mark.index:
        raise ServecastError(
            "--out: the scenario's host: is an alias of another part; write it out, or paste the block"
        )
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return _edited(text, [(node.start_mark.index, node.end_mark.index, f" {{{flow}}}")])
    there = {key.value: value for key, value in node.value}
    edits = [
        (there[name].start_mark.index, there[name].end_mark.index, f"{value}")
        for name, value in host.items()
        if name in there
    ]
    new, last = {name: value for name, value in host.items() if name not in there}, node.value[-1][1].end_mark.index
    if node.flow_style:
        edits.append((last, last, "".join(f", {name}: {value}" for name, value in new.items())))
    else:
        indent = " " * node.value[0][0].start_mark.column
        lines = "".join(f"{indent}{name}: {value}{newline}" for name, value in new.items())
        edits.append(_line_after(text, last, lines, newline))
    return _edited(text, edits)


def _line_after(text: str, at: int, lines: str, newline: str) -> tuple[int, int, str]:
    """An edit that puts lines below what ends at `at`."""
    if at and text[at - 1] == "\n":
        return at, at, lines
    end = text.find("\n", at) + 1
    return (end, end, lines) if end else (len(text), len(text), newline + lines)


def _edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    """The text with pieces (from, to) replaced."""
    for start, end, piece in sorted(edits, reverse=True):
        text = text[:start] + piece + text[end:]
    return text


def tried(problems: list[str], path: Path) -> Scenario | None:
    """The scenario, or nothing, and what is wrong with it among `problems`."""
    from servecast.scenario import load_scenario
    from servecast.setup import set_up

    try:
        set_up(found := load_scenario(path))
        return found
    except ServecastError as error:
        problems += error.problems
        return None
