"""The scenario file: what people type, checked all at once, and nothing resolved yet.

What a model, GPU, engine option, arrival process or length distribution may be is asked of the rooms that know;
`servecast.setup` makes the things themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from calibrate.engine import check_options, resolve_engine
from calibrate.hardware import load_gpu
from calibrate.models import load_model
from servecast.errors import ServecastError, nearest, one_of
from servecast.mistakes import MistakeError, say, shown
from servecast.units import Duration
from servecast.yamlfile import YamlFile, load_yaml
from sim.routers import ROUTERS
from workloads.arrivals import ARRIVALS
from workloads.kinds import Registry, check_kind
from workloads.lengths import LENGTHS
from workloads.readers import READERS
from workloads.trace import MAX_TOKENS

MAX_REQUESTS = 100_000_000
MAX_REPLICAS = 100_000
"""More than these is a slip of the pen, and would exhaust the memory before anything is said."""


def _known(load: Callable[[str], object]) -> Callable[[str], str]:
    """A check that `load` accepts the word."""

    def check(word: str) -> str:
        try:
            load(word)
        except ServecastError as error:
            raise MistakeError(f": {re.sub('^(gpu|model): ', '', problem)}" for problem in error.problems) from None
        return word

    return check


def _kind_of(registry: Registry[Any]) -> Callable[[Any], Any]:
    """A check of a `{kind: ..., parameters}` mapping."""

    def check(spec: Any) -> Any:
        if problems := check_kind(registry, spec, ""):
            raise MistakeError(problems)
        return spec

    return check


def _named(what: str, names: Iterable[str]) -> Callable[[str], None]:
    """Raises ServecastError for a word that is not among `names`."""

    def check(word: str) -> None:
        if word not in names:
            raise ServecastError(f"unknown {what} {word!r}{nearest(word, names)}; known: {one_of(names)}")

    return check


def _cap(value: Any) -> Any:
    if value == "unlimited" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS):
        return value
    raise ValueError(f"{shown(value)} is neither a whole number of tokens from 1 to {MAX_TOKENS} nor unlimited")


def is_path(model: str) -> bool:
    """Whether a scenario's `model` is a path to a config.json (or a folder with one) rather than a catalogue name."""
    return "/" in model or model.endswith(".json")


Count = Annotated[int, Field(ge=1)]
Arrivals = Annotated[dict[str, Any], AfterValidator(_kind_of(ARRIVALS))]
LengthsOf = Annotated[dict[str, Any], AfterValidator(_kind_of(LENGTHS))]

Format = Annotated[str, AfterValidator(_known(_named("trace format", READERS)))]
Cap = Annotated[int | Literal["unlimited"], BeforeValidator(_cap)]
Limit = Annotated[Duration, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        """`key: null` (also `--set key=null`) takes a key back; a required one is then missing."""
        if not isinstance(value, dict):
            return value
        return {key: v for key, v in value.items() if v is not None or key not in cls.model_fields}


class PoolPart(_Part):
    """Equal replicas: `replicas` engines on `tp` GPUs each."""

    role: Literal["unified", "prefill", "decode"] = "unified"
    gpu: Annotated[str, AfterValidator(_known(load_gpu))]
    tp: Count = 1
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1


class ClusterPart(_Part):
    """Where it runs: pools and a router. `{gpu: ..., tp: ..., replicas: ...}` is the short form of one unified pool."""

    pools: list[PoolPart] = Field(min_length=1)
    router: Annotated[str, AfterValidator(_known(_named("router", ROUTERS)))] = "round-robin"

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "pools" in value:
            if short := [key for key in value if key in PoolPart.model_fields]:
                raise ValueError(
                    f"{one_of(short)} beside pools; write either the short form, cluster: {{gpu: ...}}, or every pool "
                    "under pools (with --set: cluster.gpu changes the one, cluster.pools.0.gpu the other)"
                )
            return value
        pool = {key: value[key] for key in value if key != "router"}
        return {"pools": [pool]} | ({"router": value["router"]} if "router" in value else {})


class ClosedLoopPart(_Part):
    """`concurrency` clients, each of which sends its next request when it has its answer."""

    concurrency: Count


class LengthsPart(_Part):
    """Prompt and output lengths, drawn independently; or pairs drawn from the requests of a trace."""

    prompt: LengthsOf | None = None
    output: LengthsOf | None = None
    trace: str | None = None
    format: Format | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> LengthsPart:
        if self.trace is None and (self.prompt is None or self.output is None):
            missing = one_of(name for name in ("prompt", "output") if getattr(self, name) is None)
            raise ValueError(f"{missing} missing; give prompt and output, or trace")
        if self.trace is not None and (self.prompt or self.output):
            raise ValueError("give prompt and output, or trace, not both")
        if self.trace is None and self.format is not None:
            raise ValueError("format belongs to trace, which is missing")
        return self


class WorkloadPart(_Part):
    """What arrives: a trace, generated arrivals, or a closed loop."""

    trace: str | None = None
    format: Format | None = None
    rate_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    window: Annotated[list[Duration], Field(min_length=2, max_length=2)] | None = None
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    arrivals: Arrivals | None = None
    lengths: LengthsPart | None = None
    closed_loop: ClosedLoopPart | None = None
    max_tokens: Cap | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> WorkloadPart:
        kinds = [name for name in ("trace", "arrivals", "closed_loop") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of trace, arrivals, closed_loop; found {one_of(kinds) or 'none'}")
        kind = kinds[0]
        takes = {
            "trace": {"trace", "format", "rate_scale", "window", "num_requests", "max_tokens"},
            "arrivals": {"arrivals", "lengths", "num_requests", "max_tokens"},
            "closed_loop": {"closed_loop", "lengths", "num_requests", "max_tokens"},
        }[kind]
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        extra = sorted(given - takes)
        needs = [] if kind == "trace" else [name for name in ("num_requests", "lengths") if name not in given]
        if extra or needs:
            said = [f"{one_of(extra)} has no meaning with {kind}"] * bool(extra)
            said += [f"{one_of(needs)} missing"] * bool(needs)
            raise ValueError(f"{'; '.join(said)} ({kind} takes {one_of(sorted(takes - {kind}))})")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError("window is [start, end] with start before end, for example [0s, 10min]")
        return self


class SloPart(_Part):
    """Limits that every request should meet; goodput counts those that meet all of them."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2e: Limit | None = None


class Scenario(_Part):
    """One simulation, as written: `load_scenario` reads it from YAML."""

    name: str
    model: Annotated[str, AfterValidator(_known(lambda word: None if is_path(word) else load_model(word)))]
    engine: dict[str, Any]
    cluster: ClusterPart
    workload: WorkloadPart
    slo: SloPart = SloPart()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    _file: YamlFile | None = PrivateAttr(None)

    @field_validator("engine", mode="before")
    @classmethod
    def _preset_alone(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @field_validator("engine")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            check_options(options)
        except ServecastError as error:
            raise MistakeError(problem.removeprefix("engine") for problem in error.problems) from None
        return options

    def at(self, problem: str) -> str:
        """`problem`, which begins with a key path, with the file and line of that key where there are any."""
        return self._file.at(problem) if self._file else problem

    def path_of(self, key: str, value: str) -> Path:
        """The path that `value`, given under `key`, means: relative to the scenario file, or to here for --set."""
        return self._file.folder_of(key) / value if self._file else Path(value)


def load_scenario(path: str | Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> Scenario:
    """Read and check a scenario file.

    `overrides`: `"engine.max_num_seqs=64"` strings, or a mapping from key path to value. Raises ServecastError with
    every problem, each with file and line, what was found and what is allowed.
    """
    file = load_yaml(Path(path), overrides)
    if file.data.get("name") is None:
        file.data["name"] = Path(path).stem
    try:
        scenario = Scenario.model_validate(file.data)
    except ValidationError as error:
        short_form = isinstance(cluster := file.data.get("cluster"), dict) and "pools" not in cluster
        problems = [p for e in error.errors() for p in _said(e, short_form)]
        raise ServecastError(*map(file.at, problems + _engine_problems(file.data, problems))) from None
    scenario._file = file
    return scenario


def _said(error: Any, short_form: bool) -> list[str]:
    """A pydantic error as sentences that begin with the key path."""
    loc = [part for part in error["loc"] if not (isinstance(part, str) and "[" in part)]  # union branches are not keys
    if short_form and loc[:3] == ["cluster", "pools", 0]:
        loc = ["cluster", *loc[3:]]
    return say(error, ".".join(map(str, loc)) or "scenario", _fields(loc[:-1]))


def _engine_problems(data: Mapping[str, Any], found: list[str]) -> list[str]:
    """How the engine options of a scenario that failed elsewhere clash with its model and GPU, so that all is said at
    once."""
    pools = data.get("cluster", {}).get("pools") if isinstance(data.get("cluster"), dict) else None
    pool = pools[0] if isinstance(pools, list) and pools else data.get("cluster")
    engine = {"preset": e} if isinstance(e := data.get("engine"), str) else e
    try:
        resolve_engine(engine, load_gpu(pool["gpu"]), load_model(data["model"]))  # type: ignore[index, arg-type]
    except ServecastError as error:
        return [p for p in error.problems if p.startswith("engine.") and p not in found]
    except (KeyError, TypeError, AttributeError):
        pass  # the model, GPU or engine is not even there, which has been said
    return []


def _fields(loc: list[Any]) -> list[str]:
    """The keys that may stand at a place of the scenario."""
    if loc == ["cluster"]:
        return [*PoolPart.model_fields, *ClusterPart.model_fields]
    parts: dict[str, type[_Part]] = {
        "cluster": ClusterPart, "pools": PoolPart, "workload": WorkloadPart, "slo": SloPart,
        "lengths": LengthsPart, "closed_loop": ClosedLoopPart,
    }  # fmt: skip
    innermost = [parts[name] for name in map(str, loc) if name in parts]
    return list((innermost or [Scenario])[-1].model_fields)
