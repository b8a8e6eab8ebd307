"""The command that starts what a scenario simulates, a line a pool: the inverse of `serve_args.py`.

In the line are the model, the layout and the options that the user set; all others are the engine's own defaults. What
only the scenario knows (host times, logged memory) is left out; what an engine would have to be told in a way that is
not known here is said. How each engine spells its options: `command_line` in `calibrate/catalog/engine-*.yaml`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.engine import resolve_engine
from calibrate.layout import Parallelism
from calibrate.model_ids import id_of_model
from calibrate.options import family, flat, nested
from servecast.errors import ServecastError
from servecast.parts import is_path
from servecast.serve_args import DRAFT_MODEL, HEADS
from servecast.setup import Setup
from servecast.split import USUAL
from servecast.yamlfile import dump_yaml

FILE = "{option}.yaml"
"""Where options go that an engine reads from a file alone."""
SGLANGS = "deepep_auto"
"""A way to bring tokens to experts that vLLM has no word for."""


@dataclass(frozen=True, slots=True)
class Command:
    """How each of the `replicas` of a pool is started: `line`, with a `file` (name, content) that it reads where there
    is one; `notes` say what is not in it. `line` is empty for engines of which no command line is known. `said` are the
    options in it, `resolved` all that the engine has, by its names; `flags` how it writes them."""

    pool: str
    replicas: int
    what: str
    line: str
    file: tuple[str, str] | None
    notes: tuple[str, ...]
    said: Mapping[str, Any]
    resolved: Mapping[str, Any]
    flags: Mapping[str, str]

    @property
    def text(self) -> str:
        """For a shell, with comments."""
        lines = [f"# {self.what}"]
        if self.file:
            lines.append(f"cat > {self.file[0]} <<'EOF'\n{self.file[1]}EOF")
        return "\n".join([*lines, *[self.line] * bool(self.line), *(f"# {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Difference:
    """An option that differs: as the engine writes it, and its values (None: the engine has no such option there)."""

    pool: str
    flag: str
    before: Any
    after: Any


def serve_line(setup: Setup) -> str:
    """The commands that start every pool, as text for a shell; the router is the user's."""
    return "\n".join(command.text for command in commands(setup))


def commands(setup: Setup) -> list[Command]:
    """The command of every pool."""
    return [_command(setup, index) for index in range(len(setup.pools))]


def differing(before: Setup, after: Setup) -> list[Difference]:
    """What of the commands of `after` differs from those of `before`: options that stand in one of the lines, and have
    another value in the other or by its defaults. Pools go by name (one pool and one pool by themselves); where the
    engine is another, or a pool is new or gone, the whole line is the difference."""
    old, new = ({command.pool: command for command in commands(setup)} for setup in (before, after))
    if len(old) == len(new) == 1:
        old = dict(zip(new, old.values(), strict=True))
    found = []
    for pool in dict.fromkeys([*new, *old]):
        a, b = old.get(pool), new.get(pool)
        if a is None or b is None or a.line.split(" ")[0] != b.line.split(" ")[0]:
            found.append(Difference(pool, "", a and a.line, b and b.line))
            continue
        for name in dict.fromkeys([*b.said, *a.said]):
            values = [each.said.get(name, each.resolved.get(name)) for each in (a, b)]
            if values[0] != values[1]:
                found.append(Difference(pool, {**b.flags, **a.flags}[name], *values))
    return found


def _command(setup: Setup, index: int) -> Command:
    pool = setup.pools[index]
    data = family(pool.engine.engine)
    each = f"{pool.layout.gpus} x {pool.gpu.id}" if pool.layout.gpus > 1 else f"a {pool.gpu.id}"
    name = f"{pool.name}: " if len(setup.pools) > 1 else ""
    count = f"{pool.replicas:,} replicas, each on {each}" if pool.replicas > 1 else f"on {each}"
    what = f"{name}{count}; {data['title']} {pool.engine.version}"
    if "command_line" not in data:
        note = f"how {data['title']} is started is not known here"
        return Command(pool.name, pool.replicas, what, "", None, (note,), {}, {}, {})
    return _Writer(setup, index).write(what)


class _Writer:
    """Writes the line of one pool with the catalogue of its engine."""

    def __init__(self, setup: Setup, index: int) -> None:
        self.setup, self.index, self.pool = setup, index, setup.pools[index]
        self.data = family(self.pool.engine.engine)
        self.preset = self.data["presets"][self.pool.engine.preset]
        self.how: Mapping[str, Any] = self.data["command_line"]
        given = setup.scenario.pool_engine(index)
        self.given = {
            name: value
            for name, value in flat(given, self.data["options"]).items()
            if name not in ("preset", "scheduler") and value is not None
        }
        self.notes = list(self._left_out("scheduler" in given))

    def write(self, what: str) -> Command:
        pool, said = self.pool, {"model": self._checkpoint("model", self.pool.serves)}
        words = [word.format(model=shlex.quote(said["model"])) for word in self.how["start"]]
        for name, value in self._layout():
            said[name] = value
            words += self._words(name, value)
        inside: dict[str, Any] = {}
        filed: dict[str, Any] = {}
        for name, value in self.given.items():
            if value is False and self._off_by_default(name):
                continue
            if not self._spelled(name):
                self.notes.append(f"not in the line: {name} {value}, which this version says in another way")
                continue
            said[name] = value
            if (key := self._inside(name)) is not None:
                inside[key] = self._checkpoint(f"engine.{name}", value) if name == DRAFT_MODEL else value
            elif "file" in self.how and name not in self.how["on_line"]:
                filed[name] = value
            else:
                words += self._words(name, value)
        for option, values in _tree(inside).items():
            words += [self._flag(option), shlex.quote(json.dumps(values))]
        file = None
        if filed:
            file = (FILE.format(option=self.how["file"]), dump_yaml(nested(filed)))
            words += [self._flag(self.how["file"]), file[0]]
        resolved = dict(pool.engine.options) | {
            name: value for key, value in _spread(pool.layout).items() if (name := self._name_of(f"cluster.{key}"))
        }
        flags = {name: self._flag(self._inside(name) or name) for name in (*resolved, *said)}
        line, notes = " ".join(words), tuple(self.notes)
        return Command(pool.name, pool.replicas, what, line, file, notes, said, resolved, flags)

    def _checkpoint(self, key: str, word: str) -> str:
        """What an engine loads for a model of the catalogue, or the path of one, that `key` names."""
        if not is_path(word):
            return id_of_model(word)
        path = self.setup.scenario.path_of(key, word, f"cluster.pools.{self.index}.{key}")
        if path.suffix == ".json" and path.name != "config.json":
            self.notes.append(f"in place of {path.name}: the folder or the id of the checkpoint")
        return str(path.parent if path.name == "config.json" else path)

    def _layout(self) -> Iterator[tuple[str, Any]]:
        """The engine's name and value of every way to spread the model that is not the default."""
        for key, value in _spread(self.pool.layout).items():
            if value == _spread(Parallelism(1))[key]:
                continue
            name = self._name_of(f"cluster.{key}")
            if name and self._spelled(name) and value != SGLANGS:
                yield name, value
            else:
                said = key if value is True else f"{key} {value}"
                self.notes.append(f"not in the line: {said}; how {self.data['title']} is told so is not known here")

    def _name_of(self, key: str) -> str:
        """The option that says what a key of the scenario says: the first that the catalogue has."""
        return next((name for name, where in self.data["elsewhere"].items() if where == key), "")

    def _words(self, name: str, value: object) -> list[str]:
        if value is True:
            return [self._flag(name)]
        if value is False:
            way = self.preset.get("negated", self.how["negated"])
            return [self._flag(f"no_{name}")] if way == "no" else [self._flag(name), "false"]
        text = value if isinstance(value, str) else json.dumps(value)
        return [self._flag(name), shlex.quote(text)]

    def _flag(self, name: str) -> str:
        """How an option is written; a dot stands in front of a key of its JSON."""
        option, dot, key = name.partition(".")
        return "--" + option.replace("_", self.how["separator"]) + dot + key

    def _inside(self, name: str) -> str | None:
        """The key in an option's JSON that says what option `name` says, where that has no flag of its own."""
        if key := self.preset.get("spelled", {}).get(name):
            return str(key)
        if "." in name and "file" not in self.how:
            return name
        if name not in self.how.get("json", ()):
            return None
        return next(str(key) for key, option in self.how["inside"].items() if option == name)

    def _spelled(self, name: str) -> bool:
        """Whether this version has an option of that name."""
        return self.preset.get("spelled", {}).get(name, name) is not None

    def _off_by_default(self, name: str) -> bool:
        """Whether the flag is off where nobody sets it."""
        if name not in self.data["options"]:
            return True  # what is not modelled and off changes nothing
        pool = self.pool
        rest = {key: value for key, value in self.given.items() if key != name}
        try:
            spec = resolve_engine({"preset": pool.engine.preset} | rest, pool.gpu, pool.model, pool.layout)
        except ServecastError:
            return False
        return spec.options[name] is False

    def _left_out(self, own_policy: bool) -> Iterator[str]:
        """What the scenario has and the line has not."""
        layout, split, node = self.pool.layout, self.setup.scenario.cluster.split, self.pool.gpu.gpus_per_node
        if own_policy:
            yield "not in the line: engine.scheduler, a policy of your own"
        if layout.redundant_experts:
            yield f"not in the line: experts.redundant {layout.redundant_experts}, by the engine's options for EPLB"
        if self.pool.role != "unified":
            name = (split and split.connector) or USUAL[self.pool.engine.engine]
            flag = self._flag(self.how["side"])
            yield f"not in the line: how this {self.pool.role} side hands over by {name} ({flag})"
        if self.pool.offload is not None and "kv_offloading_size" not in self.given:
            names = ", ".join(tier.name for tier in self.pool.offload.tiers)
            yield f"not in the line: KV tiers ({names}), by kv_offloading_size (GiB) or a connector of yours"
        drafts = self.pool.engine.speculation
        if drafts is not None and drafts.method in HEADS and drafts.model is None:
            yield f"not in the line: the checkpoint of the {drafts.method} head, {DRAFT_MODEL}"
        if layout.gpus > node:
            yield f"not in the line: how its nodes find each other; {layout.gpus} GPUs, {node} a node"


def _spread(layout: Parallelism) -> dict[str, int | bool | str]:
    """The keys of `cluster` that options of engines say, and their values."""
    return {name: getattr(layout, name) for name in ("tp", "pp", "dp", "ep", "dcp", "pcp")} | {
        "experts.all2all": layout.all2all_backend
    }


def _tree(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested mappings."""
    found: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        at = found
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return found
