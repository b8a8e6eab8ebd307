"""A YAML file with the line of every key, and `--set key=value` on top. It knows nothing of what the keys mean, but for
those that may hold one word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import yaml

from servecast.errors import ServecastError, nearest

MAX_BYTES = 250_000
MAX_VALUES = 20_000
"""A scenario is far smaller; a file with more is something else, or one whose aliases multiply."""

_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")

_WORDS = {"engine": "preset", "router": "kind"}
"""Keys that may hold one word in place of a mapping -> the mapping's key that the word is; others are set beside it."""

_HINTS = {
    "another document": ": a second document begins here (---), and a scenario file holds one",
    "'<document start>'": " (is this a trace?)",
    r"character '\t'": ": a tab; indent with spaces",
}
"""Part of the parser's words -> what a person should look at."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-6` is a number, as in YAML 1.2 and JSON (PyYAML's own rule wants `1.0e-6`)."""


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


@dataclass(frozen=True, slots=True)
class YamlFile:
    """`data` as loaded; `places` says for every key path (`cluster.pools.0.gpu`) where it was written. `here` is the
    folder in which the command line was typed."""

    data: dict[str, Any]
    places: dict[str, str]
    path: Path
    here: Path = Path()

    def at(self, problem: str) -> str:
        """`problem`, which begins with a key path, with the place in front: that of the nearest enclosing key. For
        one that was set it is `--set` alone, since the problem names the key."""
        key = max((k for k in self.places if re.match(re.escape(k) + r"[:. ]", problem)), key=len, default="")
        place = self.places.get(key, str(self.path))
        return f"--set {problem}" if place.startswith("--set ") else f"{place}: {problem}"

    def folder_of(self, *keys: str) -> Path:
        """The folder to which a path given under one of `keys` is relative: the file's, or `here` for what the command
        line says."""
        return self.here if any(self.places.get(key, "").startswith("--") for key in keys) else self.path.parent

    def change(self, pairs: Iterable[tuple[str, object]], option: str, problems: list[str]) -> None:
        """Set values by key path, and remember that the command line's `option` said so; what cannot be set is added to
        `problems`."""
        places = self.places
        for key, value in pairs:
            if not all(key.split(".")):
                problems.append(f"{option} {key}: an empty word in the key; write it like engine.max_num_seqs")
                continue
            _set(self.data, key, value, problems)
            for stale in [k for k in places if k.startswith(f"{key}.")]:
                del places[stale]
            said = f"{option} {key}" if option == "--set" else option
            parts = key.split(".")
            for i in range(1, len(parts)):
                places.setdefault(".".join(parts[:i]), said)
            places[key] = said
            _mark_set(value, key, places)


def load_yaml(path: Path) -> YamlFile:
    """Read `path`. Raises ServecastError with every problem."""
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path, here: Path = Path()) -> YamlFile:
    """The file at `path`, of which `text` is the content. Raises ServecastError with every problem."""
    places: dict[str, str] = {}
    data = _parse(text, str(path), places)
    if not isinstance(data, dict):
        found = {type(None): "it is empty", list: "it holds a list", str: "it holds plain text (is it a trace?)"}
        said = found.get(type(data), f"it holds only {data!r}")
        raise ServecastError(f"{path}: {said}; a scenario is a mapping: model, engine, cluster, workload, ...")
    return YamlFile(data, places, path, here)


def override(file: YamlFile, overrides: Iterable[str] | Mapping[str, object]) -> None:
    """Apply `key=value` overrides (values are YAML). Raises ServecastError with every problem."""
    problems: list[str] = []
    file.change(_pairs(overrides, problems), "--set", problems)
    if problems:
        raise ServecastError(*problems)


def parse_value(text: str, where: str) -> Any:
    """The value that `text` means; `where` is said in front of what is wrong with it. Raises ServecastError."""
    return _parse(text, where, {})


def dump_yaml(data: Mapping[str, Any]) -> str:
    """`data` as text that `load_yaml` reads back, a line a key."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return text


def read_text(path: Path) -> str:
    """The content of a scenario file. Raises ServecastError where there is none."""
    try:
        if not path.exists():
            folder = path.parent if path.parent.is_dir() else Path()
            hint = nearest(path.name, [p.name for p in folder.glob("*.y*ml")])
            raise ServecastError(
                f"{path}: no such file{hint or '; `servecast list scenarios` shows those that come with it'}"
            )
        if path.is_dir():
            raise ServecastError(f"{path}: a folder; give a scenario file in it")
        if path.stat().st_size > MAX_BYTES:
            raise ServecastError(
                f"{path}: {path.stat().st_size:,} bytes; a scenario is a small YAML file (is this a trace?)"
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ServecastError(f"{path}: not a text file (it is not UTF-8); a scenario is a YAML file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ServecastError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parse(text: str, where: str, places: dict[str, str]) -> Any:
    """The value of one YAML document; fills `places` with the line of every key. Raises ServecastError."""
    problems: list[str] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _walk(node, "", where, places, problems, [])
        if not problems:
            return loader.construct_document(node)
    except yaml.reader.ReaderError:
        raise ServecastError(f"{where}: not a text file (it holds control characters)") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        said = str(error.problem or error.context)
        said += next((hint for part, hint in _HINTS.items() if part in said), "")
        raise ServecastError(f"{where}{line}: not valid YAML: {said}") from None
    except RecursionError:
        raise ServecastError(f"{where}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ServecastError(f"{where}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    raise ServecastError(*problems)


def _walk(
    node: yaml.Node, key: str, where: str, places: dict[str, str], problems: list[str], within: list[yaml.Node]
) -> None:
    """Note the line of every key; report what YAML would take silently: keys written twice, keys that are not text,
    and aliases that contain themselves or multiply."""
    line = f"{where}:{node.start_mark.line + 1}"
    if any(node is outer for outer in within):
        problems.append(f"{line}: {key} holds itself (an alias inside its own anchor)")
        return
    if len(places) > MAX_VALUES:
        raise ServecastError(f"{where}: more than {MAX_VALUES:,} values; a scenario is a small YAML file")
    if key:
        places.setdefault(key, line)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            number = key_node.start_mark.line + 1
            if key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                said = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                problems.append(f"{where}:{number}: {said} stands where a key is expected; keys are words")
                continue
            name = str(key_node.value)
            if name in seen and name != "<<":
                problems.append(f"{where}:{number}: {name!r} is written twice (first in line {seen[name]}); keep one")
            seen[name] = number
            child = f"{key}.{name}" if key else name
            places[child] = f"{where}:{number}"
            _walk(value, child, where, places, problems, [*within, node])
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(value, f"{key}.{i}", where, places, problems, [*within, node])


def _pairs(overrides: Iterable[str] | Mapping[str, object], problems: list[str]) -> list[tuple[str, object]]:
    """Key paths and values; what is wrong with a `key=value` is added to `problems`."""
    if isinstance(overrides, Mapping):
        return [(str(key), plain(value)) for key, value in overrides.items()]
    pairs = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(f"--set {text}: write key=value, for example --set engine.max_num_seqs=64")
            continue
        try:
            pairs.append((key.strip(), parse_value(value, f"--set {key.strip()}")))
        except ServecastError as error:
            said = error.problems[0].removeprefix(f"--set {key.strip()}").lstrip(":1 ")
            problems.append(f"--set {text[:100]}: {said}; quote the value if it is text")
    return pairs


def plain(value: object) -> object:
    """Values given in Python as YAML would give them: copies, and numpy's numbers and paths as plain ones."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _set(data: Any, key: str, value: object, problems: list[str]) -> None:
    *parents, last = key.split(".")
    where = []
    for part in parents:
        where.append(part)
        if isinstance(data, list):
            if not part.isdecimal() or int(part) >= len(data):
                problems.append(f"--set {key}: {'.'.join(where)}: {_entries(data)}")
                return
            data = data[int(part)]
            continue
        if not isinstance(data, dict):
            break
        if data.get(part) is None:
            data[part] = {}
        if part in _WORDS and isinstance(data[part], str):
            data[part] = {_WORDS[part]: data[part]}
        data = data[part]
    if isinstance(data, list):
        if last.isdecimal() and int(last) < len(data):
            data[int(last)] = value
        else:
            problems.append(f"--set {key}: {_entries(data)}")
    elif isinstance(data, dict):
        data[last] = value
    else:
        problems.append(f"--set {key}: {'.'.join(where)} is {data!r}, which has no keys")


def _entries(data: list[Any]) -> str:
    return (
        f"the list has {len(data)} entries, numbered from 0 to {len(data) - 1}" if data else "the list has no entries"
    )


def _mark_set(value: object, key: str, places: dict[str, str]) -> None:
    """Keys inside an overriding mapping or list come from --set too."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    root = places[key]
    for name, child in children:
        places[f"{key}.{name}"] = root
        _mark_set(child, f"{key}.{name}", places)
