"""A YAML file with the line of every key, and `--set key=value` on top. It knows nothing of what the keys mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from servecast.errors import ServecastError, nearest

MAX_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class YamlFile:
    """`data` as loaded; `places` says for every key path (`cluster.pools.0.gpu`) where it was written."""

    data: dict[str, Any]
    places: dict[str, str]
    path: Path

    def at(self, problem: str) -> str:
        """`problem`, which begins with a key path, with the place in front; the nearest enclosing key if it is unset."""
        key = problem.split(maxsplit=1)[0].rstrip(":") if problem else ""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return f"{self.places.get(key, self.path)}: {problem}"

    def folder_of(self, key: str) -> Path:
        """The folder to which a path given under `key` is relative: the file's, or the current one for `--set`."""
        return Path() if self.places.get(key, "").startswith("--set") else self.path.parent


def load_yaml(path: Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> YamlFile:
    """Read `path` and apply `key=value` overrides (values are YAML). Raises ServecastError with every problem."""
    loader = yaml.SafeLoader(_text(path))
    places: dict[str, str] = {}
    problems: list[str] = []
    try:
        node = loader.get_single_node()
        if node is not None:
            _walk(node, "", path, places, problems)
        data = None if problems or node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ServecastError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ServecastError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if problems:
        raise ServecastError(*problems)
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {type(data).__name__}"
        raise ServecastError(f"{path} {found}; a scenario is a mapping: model, engine, cluster, workload, ...")
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    for key, value in pairs:
        _set(data, key, value, problems)
        stale = [k for k in places if k.startswith(f"{key}.")]
        for k in stale:
            del places[k]
        places[key] = f"--set {key}"
        _mark_set(value, key, places)
    if problems:
        raise ServecastError(*problems)
    return YamlFile(data, places, path)


def _text(path: Path) -> str:
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else Path()
        hint = nearest(path.name, [p.name for p in folder.glob("*.y*ml")])
        raise ServecastError(f"{path}: no such file{hint}")
    if path.is_dir():
        raise ServecastError(f"{path}: a folder; give a scenario file in it")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ServecastError(f"{path}: {path.stat().st_size:,} bytes; a scenario is a small YAML file (is this a trace?)")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ServecastError(f"{path}: not a text file (it is not UTF-8); a scenario is a YAML file") from None
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror}") from None


def _walk(node: yaml.Node, key: str, path: Path, places: dict[str, str], problems: list[str]) -> None:
    """Note the line of every key; report keys that are written twice, since YAML would keep the last silently."""
    if key:
        places.setdefault(key, f"{path}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            name = str(key_node.value)
            line = key_node.start_mark.line + 1
            if name in seen and name != "<<":
                problems.append(f"{path}:{line}: {name!r} is written twice (first in line {seen[name]}); keep one")
            seen[name] = line
            child = f"{key}.{name}" if key else name
            places[child] = f"{path}:{line}"
            _walk(value, child, path, places, problems)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(value, f"{key}.{i}", path, places, problems)


def _parse_override(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ServecastError(f"--set {text}: write key=value, for example --set engine.max_num_seqs=64")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ServecastError(f"--set {text}: {value!r} is not valid YAML; quote it if it is text") from None


def _set(data: Any, key: str, value: object, problems: list[str]) -> None:
    *parents, last = key.split(".")
    where = []
    for part in parents:
        where.append(part)
        if isinstance(data, list):
            if not part.isdigit() or int(part) >= len(data):
                problems.append(f"--set {key}: {'.'.join(where)} is not one of the {len(data)} entries (0 to {len(data) - 1})")
                return
            data = data[int(part)]
            continue
        if not isinstance(data, dict):
            break
        data = data.setdefault(part, {})
    if isinstance(data, list) and last.isdigit() and int(last) < len(data):
        data[int(last)] = value
    elif isinstance(data, dict):
        data[last] = value
    else:
        problems.append(f"--set {key}: {'.'.join(where)} is {data!r}, which has no keys")


def _mark_set(value: object, key: str, places: dict[str, str]) -> None:
    """Keys inside an overriding mapping come from --set too."""
    if isinstance(value, dict):
        for name, child in value.items():
            places[f"{key}.{name}"] = f"--set {key}"
            _mark_set(child, f"{key}.{name}", places)
