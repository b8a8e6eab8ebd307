"""`--serve-args`: the line with which somebody starts an engine, as the model, layout and options of a scenario.

How each engine spells its options, and which of them change nothing here, is in `calibrate/catalog/engine-*.yaml` under
`command_line`; whether an option and its value are modelled is asked of `calibrate.options`, as for a scenario.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.model_ids import model_of_id
from calibrate.options import family, family_of, refusals
from servecast.errors import ServecastError, nearest, one_of
from servecast.serve_words import Words, options_of, split_line

KEY = "--serve-args"
SWITCHES = ("cluster.ep",)
"""Keys of the scenario that are true or false."""
WORDS = ("cluster.experts.all2all",)
"""Keys that are words, which the scenario checks."""
DRAFT_MODEL = "speculative_config.model"
HEADS = ("eagle", "eagle3")
"""Ways to speculate that load a head of the model."""
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class ServeLine:
    """What a line says: `options` by the engine's names, `keys` of the scenario (`model`, `cluster.tp`) that say what
    other options do, `notes` for people, and every `problem` that shows without a scenario."""

    family: str
    keys: dict[str, Any]
    options: dict[str, Any]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def read_line(text: str) -> ServeLine:
    """The line as options. Raises ServecastError where no engine is started."""
    try:
        words = split_line(text)
    except ServecastError as error:
        raise ServecastError(*(f"{KEY}: {problem}" for problem in error.problems)) from None
    return _Reader(words).read()


class _Reader:
    """Reads the words of one line with the catalogue of its engine."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.data: Mapping[str, Any] = family(words.family)
        self.line: Mapping[str, Any] = self.data["command_line"]
        self.options: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.ignored: list[str] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        ignored = self.line["ignored"]
        flags = {k for k, allowed in self.data["options"].items() if allowed == "flag"} | set(ignored["flags"])
        flags |= {name for name, key in self.data["elsewhere"].items() if key in SWITCHES}
        for key, entry in self.data["unmodelled"].items():
            if any(isinstance(neutral, bool) for neutral in entry["neutral"]):
                flags.add(key)
        self.flags = flags
        self.ignorable = {*ignored["flags"], *ignored["values"]}
        known = [*self.data["options"], *self.data["unmodelled"], *self.data["elsewhere"], *self.ignorable]
        self.known = set(known) | set(self.line["aliases"])

    def read(self) -> ServeLine:
        rest = [w for word in self.words.rest for w in _level(word)]
        found, loose, problems = options_of(tuple(rest), self._takes)
        self.problems += problems
        written: dict[str, str] = {}
        for option, values in found:
            name, negated = self._name(option)
            if option == "-O" and values[0].isdecimal():  # its other meaning
                name = "optimization_level"
            if name in written and "." not in option:
                self.problems.append(f"{option}: given twice (also as {written[name]}); keep one")
            written[name] = option
            self._take(option, name, negated, values)
        self._positional(loose)
        self._draft_model()
        self._environment()
        if "model" not in self.keys and not any(p.startswith("model") for p in self.problems):
            self.problems.append("the model is missing; for example meta-llama/Llama-3.1-8B-Instruct")
        self.problems += [f"{w}: a variable of your shell; write its value" for w in self.words.rest if "$" in w]
        if self.words.before:
            self.ignored.insert(0, " ".join([*self.words.before[:2], "..."][: len(self.words.before)]))
        if self.ignored:
            self.notes.append(f"of the line, without influence here: {one_of(dict.fromkeys(self.ignored))}")
        return ServeLine(self.words.family, self.keys, self.options, tuple(self.notes), tuple(self.problems))

    def _name(self, option: str) -> tuple[str, bool]:
        """The engine's own name of `--no-enable-x`, `-tp`, or an unambiguous beginning of one (argparse takes those),
        and whether it is negated."""
        word, dot, inner = option.lstrip("-").partition(".")
        word = word.replace("-", "_")
        aliases = self.line["aliases"]
        if word not in self.known and word.startswith("no_") and word[3:] in self.flags:
            return word[3:], True
        if word not in self.known and option.startswith("--"):
            longer = {aliases.get(name, name) for name in self.known if name.startswith(word)}
            word = longer.pop() if len(longer) == 1 else word
        return aliases.get(word, word) + dot + inner, False

    def _takes(self, option: str) -> str:
        name, _ = self._name(option)
        return "none" if name in self.flags else "many" if name in self.line["lists"] else "one"

    def _take(self, option: str, name: str, negated: bool, values: list[str]) -> None:
        """Put one option where it belongs."""
        base = name.partition(".")[0]
        if base in self.ignorable:
            self.ignored.append(option)
        elif name in self.flags:
            self._take_flag(option, name, negated, values)
        elif name in self.data["elsewhere"]:
            self._take_key(option, self.data["elsewhere"][name], values[0])
        elif name in self.data["options"]:
            self._take_value(option, name, values[0])
        elif base in self.data["unmodelled"]:
            value = _plain(values[0]) if len(values) == 1 else [_plain(each) for each in values]
            if any(key.startswith(f"{base}.") for key in self.line["inside"]):
                self._take_inside(option, name, value)
            elif name == base:
                self.options[base] = value
            else:
                before = self.options.get(base)
                self.options[base] = (before if isinstance(before, dict) else {}) | {name.partition(".")[2]: value}
        else:
            hint = nearest(base, sorted(self.known)).replace("_", "-").replace("'", "'--", 1)
            self.problems.append(f"{option}: {self.data['title']} has no such option that is known here{hint}")

    def _take_flag(self, option: str, name: str, negated: bool, values: list[str]) -> None:
        word = values[0].lower() if values else "true"
        if word not in ("true", "false"):
            self.problems.append(f"{option}: {values[0]!r} is neither true nor false")
        else:
            on, key = (word == "true") != negated, self.data["elsewhere"].get(name)
            if key is None:
                self.options[name] = on
            else:
                self.keys[key] = on

    def _take_key(self, option: str, key: str, value: str) -> None:
        if key == "model":
            self._take_model(value)
        elif key in WORDS:
            self.keys[key] = value
        elif value.isdecimal():
            self.keys[key] = int(value)
        else:
            self.problems.append(f"{option}: {value!r} is not a whole number")

    def _take_value(self, option: str, name: str, value: str) -> None:
        allowed, special = self.data["options"][name], self.line["words"].get(name)
        if special and value.lower() in special["values"]:
            self.problems.append(f"{option} {value}: {special['why']}; write a number")
        elif not isinstance(allowed, dict):
            self.options[name] = value
        elif "above" in allowed:
            self.options[name] = _number(value)
        else:
            self.options[name] = self._whole(value)

    def _whole(self, value: str) -> int | float | str:
        """A whole number; vLLM also takes 32k and 32K. Other text stays, to be refused."""
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])", value) if self.line["human_numbers"] else None
        if match and (match[2].islower() or match[1].isdecimal()):
            return int(float(match[1]) * _SUFFIXES[match[2]])
        return _number(value)

    def _take_inside(self, option: str, name: str, value: object) -> None:
        """An option that holds JSON: each of its keys that is an option here, and the rest to be refused."""
        inside = self.line["inside"]
        for key, each in _leaves(name, value):
            if key in inside:
                self.options[inside[key]] = each
            elif key in self.data["unmodelled"]:
                self.options[key] = each
            else:
                known = one_of(k.partition(".")[2] for k in inside)
                self.problems.append(f"{option}: {key.partition('.')[2] or each!r} is not modelled; of it are {known}")

    def _take_model(self, value: str) -> None:
        try:
            self.keys["model"], note = _model(value)
        except ServecastError as error:
            self.problems += error.problems
        else:
            self.notes += [note] if note else []

    def _draft_model(self) -> None:
        """The model that drafts, by its id too. Heads are in no catalogue: they are made of layers as the model's."""
        method, word = self.options.get("speculative_config.method"), self.options.get(DRAFT_MODEL)
        if not isinstance(word, str) or method not in ("draft_model", *HEADS):
            return
        try:
            self.options[DRAFT_MODEL], note = _model(word)
        except ServecastError as error:
            if method not in HEADS:
                self.problems += [f"speculative_config.{problem}" for problem in error.problems]
                return
            del self.options[DRAFT_MODEL]
            note = f"{word} is taken to have the sizes of a layer of the model (a path to its config.json says them)"
        self.notes += [note] if note else []

    def _positional(self, loose: list[str]) -> None:
        takes_one = "-m" not in self.words.start and self.words.start != "sglang serve"
        if takes_one and loose and "model" not in self.keys:
            self._take_model(loose.pop(0))
        self.problems += [f"{word!r}: belongs to no option" for word in loose]

    def _environment(self) -> None:
        known = self.line["environment"]
        for name, value in self.words.environment.items():
            if name in known["matters"]:
                entry = known["matters"][name]
                if value not in entry["neutral"]:
                    why = f" ({entry['why']})" if "why" in entry else ""
                    self.problems.append(f"{name}={value}: not modelled{why}; take it out of the line")
            elif name.startswith(known["ours"]) and name not in known["ignored"]:
                self.notes.append(f"nobody here knows what {name} does to times: the line runs as if it were not set")
            else:
                self.ignored.append(name)


def put_into(data: dict[str, Any], line: ServeLine) -> tuple[dict[str, Any], list[str]]:
    """What of a scenario's `data` the line replaces, by key path, and what was done, in words.

    The line is all there is to say of the engine: what it leaves out has the engine's default, not the scenario's
    value. Raises ServecastError with every problem of the line.
    """
    given = data.get("engine")
    given = {"preset": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    preset, why = given.get("preset"), "the scenario's"
    if not isinstance(preset, str) or family_of(preset) != line.family:
        preset, why = list(family(line.family)["presets"])[-1], f"the newest of {family(line.family)['title']}"
    if line.problems:
        raise ServecastError(*_all_problems(line, preset))
    own = {"scheduler": given["scheduler"]} if "scheduler" in given and why == "the scenario's" else {}
    lost = [k for k in given if k != "preset" and k not in line.options and k not in own]
    cluster = data.get("cluster")
    pools = isinstance(cluster, dict) and isinstance(cluster.get("pools"), list)
    pool = cluster["pools"][0] if pools and isinstance(cluster, dict) else cluster
    layout = {"tp": line.keys.get("cluster.tp", 1)}
    defaults = {"pp": 1, "dp": 1, "ep": False, "dcp": 1, "pcp": 1, "experts.all2all": "allgather_reducescatter"}
    for name, default in defaults.items():
        if f"cluster.{name}" in line.keys or _written(pool, name.split(".")):
            layout[name] = line.keys.get(f"cluster.{name}", default)
    changes = {"model": line.keys.get("model"), "engine": {"preset": preset, **line.options, **own}}
    changes |= {f"cluster.{'pools.0.' * pools}{name}": value for name, value in layout.items()}
    changes |= {key: value for key, value in line.keys.items() if key != "model" and key[8:] not in layout}
    spread = ", ".join(name if value is True else f"{name} {value}" for name, value in layout.items() if value)
    notes = [f"{KEY}: {changes['model']}, {spread}, {preset} ({why}); workload and GPU are the scenario's"]
    if data.get("memory") is not None:
        changes["memory"] = {}
        lost.append("memory")
    if lost:
        notes.append(f"{KEY}: replaced, with what the line says or the engine's default: {one_of(lost)}")
    return changes, notes + [f"{KEY}: {note}" for note in line.notes]


def _written(data: object, path: list[str]) -> bool:
    """Whether a scenario's `data` has the key."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def problems_of(text: str) -> list[str]:
    """What is wrong with a line that nobody has given a scenario for, under the newest preset of its engine."""
    try:
        line = read_line(text)
    except ServecastError as error:
        return list(error.problems)
    return _all_problems(line, list(family(line.family)["presets"])[-1])


def _all_problems(line: ServeLine, preset: str) -> list[str]:
    return [f"{KEY}: {problem}" for problem in (*line.problems, *refusals({"preset": preset, **line.options}))]


def _level(word: str) -> list[str]:
    """`-O3` as two words."""
    match = re.fullmatch(r"-O=?([0-9])", word)
    return ["-O", match[1]] if match else [word]


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The values inside nested mappings by dotted name."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each)
    else:
        yield name, value


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _plain(value: str) -> Any:
    """JSON where it is JSON, None for None, else the text."""
    if value == "None":
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def _model(value: str) -> tuple[str, str]:
    """What the scenario calls a checkpoint, a path or an id, and a note as `model_of_id` has it."""
    if os.path.isfile(value) or os.path.isfile(os.path.join(value, "config.json")):  # noqa: PTH113, PTH118
        return value if "/" in value or value.endswith(".json") else f"./{value}", ""
    return model_of_id(value)
