"""The scenario file: what people type, checked all at once, and nothing resolved yet.

What a model, GPU, engine option, arrival process or length distribution may be is asked of the rooms that know;
`servecast.setup` makes the things themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator

from calibrate.connectors import load_connector, load_transfer_link
from calibrate.engine import check_options, resolve_engine
from calibrate.hardware import load_gpu
from calibrate.kernels.routing import SKEWS
from calibrate.models import load_model
from calibrate.options import refusals
from servecast.change_parts import AutoscalePart, EventPart, FailuresPart, LimitsPart, Moment
from servecast.costing.part import ApiPart, BuyPart, CostPart, PowerPart
from servecast.errors import ServecastError, one_of
from servecast.host_part import ExtraPart, HostPart
from servecast.mistakes import MistakeError, say
from servecast.own_policy import split
from servecast.parts import Count, Part, Time, checked, known, known_model
from servecast.serve_args import KEY, put_into, read_line
from servecast.speculation import LengthPart, SpeculationPart
from servecast.tier_parts import KvTiersPart, TierPart
from servecast.units import Size
from servecast.workload import (
    ClassPart,
    ClosedLoopPart,
    LengthsPart,
    NetworkPart,
    PriorityPart,
    PrometheusPart,
    ServegenPart,
    SloPart,
    TimeoutPart,
    WorkloadPart,
)
from servecast.yamlfile import YamlFile, load_yaml, override
from sim.routers import ROUTERS
from workloads.kinds import check_parameters

MAX_REPLICAS = 100_000
"""More than these is a slip of the pen, and would exhaust the memory before anything is said."""


class MemoryPart(Part):
    """Bytes of one GPU that your engine logged, in place of the memory plan's."""

    weights: Size | None = None
    activations: Size | None = None
    cuda_graphs: Size | None = None
    communication: Size | None = None
    other: Size | None = None


def _known_load(load: str | list[float]) -> list[str]:
    if isinstance(load, str):
        known = re.fullmatch(SKEWS, load)
        return [] if known else [f": {load!r} is none of balanced, uniform, power_law_<alpha>, or a list of shares"]
    return (
        []
        if load and all(0 <= share < 1e9 for share in load) and sum(load) > 0
        else [": a list of shares has a number of 0 or more for every expert, and not all are 0"]
    )


class ExpertsPart(Part):
    """How experts are spread and reached: copies that loads are balanced by (EPLB), how tokens spread over experts
    (`load`: a word, or every expert's share of the tokens), and how data parallel ranks bring tokens to them."""

    redundant: Annotated[int, Field(ge=0, le=100_000)] = 0
    load: Annotated[str | list[float], checked(_known_load)] | None = None
    all2all: Literal["allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput", "deepep_auto"] = (
        "allgather_reducescatter"
    )


class PoolPart(Part):
    """Equal replicas: `replicas` of `tp` x `pp` x `dp` x `pcp` GPUs each, `pp` of them pipeline stages. The `dp`
    engines of a replica serve requests of their own and share the experts, over which they step together: cut over all
    GPUs, or with `ep` dealt out whole (`experts` says more). `dcp` of the `tp` GPUs share the tokens of the KV cache,
    `pcp` groups of `tp` the tokens of a step; `network` is the adapter between nodes, where a replica needs several.
    `profile` is a file with the GPU's kernel times, or datasheet; unset, the shipped profile of the GPU, or its
    datasheet where there is none. Of several pools each may have a `model`, `host`, `memory` and `speculation` of its
    own, and an `engine`: options on top of the scenario's, or, with a preset, in place of them. `weight` is what the
    router `weighted` goes by. `failures` and `autoscale` change how many there are; `cold_start`: from a replica's
    start until it serves (unset, an estimate for vLLM). `kv_tiers`: what keeps KV beyond the GPUs."""

    name: Annotated[str, Field(min_length=1)] | None = None
    role: Literal["unified", "prefill", "decode"] = "unified"
    gpu: Annotated[str, known(load_gpu)]
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    dcp: Count = 1
    pcp: Count = 1
    ep: bool = False
    experts: ExpertsPart = ExpertsPart()
    network: Annotated[str, known(load_transfer_link)] | None = None
    profile: str | None = None
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    weight: Annotated[float, Field(gt=0, lt=1e6)] = 1.0
    model: Annotated[str, known_model] | None = None
    engine: dict[str, Any] | None = None
    host: HostPart | None = None
    memory: MemoryPart | None = None
    speculation: SpeculationPart | None = None
    failures: FailuresPart | None = None
    autoscale: AutoscalePart | None = None
    cold_start: Moment | None = None
    kv_tiers: KvTiersPart | None = None

    @field_validator("engine", mode="before")
    @classmethod
    def _preset_alone(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


def _known_router(spec: dict[str, Any]) -> list[str]:
    return check_parameters(ROUTERS, spec, "")


def _word(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Router = Annotated[dict[str, Any], BeforeValidator(_word), checked(_known_router)]


class SplitPart(Part):
    """How prefill pools hand over to decode pools: the `connector` (unset, the engine's usual one), and the `link`
    between them (a network adapter of the catalogue; unset, the GPUs' own link in a node that holds all of them).
    `first_token`: which side streams it. Prompts of up to `local_tokens` tokens are read by the decode side itself.
    `router` chooses among decode replicas;
    `run_blocks`: adjacent blocks that lie in the same order on both sides, where the connector joins them; unset, one,
    and of SGLang, which sorts free pages, an estimate."""

    connector: Annotated[str, known(load_connector)] | None = None
    link: Annotated[str, known(load_transfer_link)] | None = None
    first_token: Literal["decode", "prefill"] = "decode"
    local_tokens: Annotated[int, Field(ge=0)] = 0
    router: Router = Field({"kind": "round-robin"}, validate_default=False)
    run_blocks: Annotated[float, Field(ge=1, lt=1e9)] | None = None


class ClusterPart(Part):
    """Where it runs: pools and a router. `{gpu: ..., tp: ..., replicas: ...}` is the short form of one pool.

    `router` is a word, or `{kind: ..., parameters}`; what it knows of loads is up to `router_stale` old. `split`: how
    prefill pools hand over to decode pools. `events` happen to replicas, `retries`: how often a request that was lost
    with one is sent anew, `limits`: what is turned away."""

    pools: list[PoolPart] = Field(min_length=1)
    router: Router = Field({"kind": "round-robin"}, validate_default=False)
    router_stale: Time = 0.0
    split: SplitPart | None = None
    events: list[EventPart] | None = None
    retries: Annotated[int, Field(ge=0, le=1000)] | None = None
    limits: LimitsPart | None = None

    @model_validator(mode="after")
    def _names(self) -> ClusterPart:
        if len(self.pools) == 1:
            keys = ("model", "engine", "host", "memory", "speculation")
            own = [key for key in keys if getattr(self.pools[0], key) is not None]
            if own:
                raise MistakeError(
                    f".pools.0.{key}: there is one pool; write it outside cluster, as {key}" for key in own
                )
        names = self.names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MistakeError([f".pools: {one_of(twice)} is the name of several pools; each needs its own"])
        return self

    @property
    def routers(self) -> dict[str, str]:
        """The kinds of routers that it has, and the key of each."""
        split = {} if self.split is None else {self.split.router["kind"]: "cluster.split.router"}
        return split | {self.router["kind"]: "cluster.router"}

    @property
    def names(self) -> list[str]:
        """The pools' names: the given ones, else their roles or GPUs, numbered where several pools have that one."""
        plain = [pool.gpu if pool.role == "unified" else pool.role for pool in self.pools]
        unnamed = [word for word, pool in zip(plain, self.pools, strict=True) if pool.name is None]
        names: list[str] = []
        for i, (word, pool) in enumerate(zip(plain, self.pools, strict=True)):
            before = sum(plain[j] == word and self.pools[j].name is None for j in range(i))
            names.append(pool.name or (word if unnamed.count(word) == 1 else f"{word} {before + 1}"))
        return names

    def pool_of(self, event: EventPart) -> int:
        """The index of the pool to which it happens."""
        return 0 if event.pool is None else self.names.index(event.pool)

    def most(self, index: int) -> int:
        """How many replicas a pool can come to have."""
        part = self.pools[index]
        if part.autoscale is not None:
            return max(part.replicas, part.autoscale.max)
        started = [e.start for e in self.events or [] if e.pool in (None, self.names[index]) and e.start is not None]
        return part.replicas + sum(started)

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
        ours = {key: value[key] for key in value if key in cls.model_fields}
        return {"pools": [{key: value[key] for key in value if key not in ours}]} | ours


class Scenario(Part):
    """One simulation, as written: `load_scenario` reads it from YAML."""

    name: str
    model: Annotated[str, known_model]
    engine: dict[str, Any]
    cluster: ClusterPart
    workload: WorkloadPart
    host: HostPart = HostPart()
    memory: MemoryPart = MemoryPart()
    speculation: SpeculationPart | None = None
    slo: SloPart = SloPart()
    cost: CostPart | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    _file: YamlFile | None = PrivateAttr(None)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @field_validator("engine", mode="before")
    @classmethod
    def _preset_alone(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @field_validator("engine")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        problems: list[str] = []
        try:
            check_options({key: value for key, value in options.items() if key != "scheduler"})
        except ServecastError as error:
            problems += error.problems
        if options.get("scheduler") is not None:
            try:
                split(options["scheduler"])
            except ServecastError as error:
                problems += error.problems
        if problems:
            raise MistakeError(problem.removeprefix("engine") for problem in problems)
        return options

    def pool_engine(self, index: int) -> dict[str, Any]:
        """The engine options of a pool: the scenario's and on top of them the pool's, which replace them all where they
        name a preset."""
        own = self.cluster.pools[index].engine or {}
        return own if "preset" in own else self.engine | own

    @property
    def engine_options(self) -> dict[str, Any]:
        """What the engine itself knows: all but a scheduler of the user's own."""
        return {key: value for key, value in self.engine.items() if key != "scheduler"}

    @property
    def notes(self) -> list[str]:
        """What of the file does not apply, since an override changed the engine's preset."""
        return self._notes

    def at(self, problem: str) -> str:
        """`problem`, which begins with a key path, with the file and line of that key where there are any."""
        return self._file.at(problem) if self._file else problem

    def path_of(self, key: str, value: str, *others: str) -> Path:
        """The path that `value`, given under `key` or an `others` form of it, means: relative to the scenario file, or
        to here for --set."""
        return self._file.folder_of(key, *others) / value if self._file else Path(value)


def load_scenario(
    path: str | Path, overrides: Iterable[str] | Mapping[str, object] = (), serve_args: str | None = None
) -> Scenario:
    """Read and check a scenario file.

    `serve_args`: the line with which an engine is started (`vllm serve ...`), in place of the file's model, engine and
    tp. `overrides`, on top of both: `"engine.max_num_seqs=64"` strings, or a mapping from key path to value. Raises
    ServecastError with every problem, each with file and line, what was found and what is allowed.
    """
    return scenario_of(load_yaml(Path(path)), overrides, serve_args)


def scenario_of(
    file: YamlFile, overrides: Iterable[str] | Mapping[str, object] = (), serve_args: str | None = None
) -> Scenario:
    """The same of a file that was read, into which the changes are written."""
    notes: list[str] = []
    if serve_args is not None:
        changes, notes = put_into(file.data, read_line(serve_args))
        file.change(changes.items(), KEY, [])
    override(file, overrides)
    if file.data.get("name") is None:
        file.data["name"] = file.path.stem
    notes += _leave_out(file)
    try:
        scenario = Scenario.model_validate(file.data)
    except ValidationError as error:
        short_form = isinstance(cluster := file.data.get("cluster"), dict) and "pools" not in cluster
        problems = [p for e in error.errors() for p in _said(e, short_form)]
        raise ServecastError(*map(file.at, problems + _engine_problems(file.data, problems))) from None
    scenario._file, scenario._notes = file, notes
    return scenario


def _leave_out(file: YamlFile) -> list[str]:
    """Take the file's engine options out that the preset of an override does not have; what was left out, in words.

    What was given beside the override stays, to be refused."""
    engine = file.data.get("engine")
    if not isinstance(engine, dict) or not file.places.get("engine.preset", "").startswith("--set"):
        return []
    notes = []
    for key in [key for key in engine if key not in ("preset", "scheduler")]:
        if file.places[f"engine.{key}"].startswith("--set"):
            continue
        try:
            why = refusals({"preset": engine["preset"], key: engine[key]})
        except ServecastError:
            return []  # no such preset, which is said elsewhere
        if why:
            said = "; ".join(each.removeprefix("engine.") for each in why)
            notes.append(f"left out with the change to {engine['preset']}: {said}")
            del engine[key]
    return notes


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
    if isinstance(engine, dict):
        engine = {key: value for key, value in engine.items() if key != "scheduler"}  # the user's own
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
    parts: dict[str, type[Part]] = {
        "cluster": ClusterPart, "split": SplitPart, "failures": FailuresPart, "autoscale": AutoscalePart,
        "events": EventPart, "limits": LimitsPart, "experts": ExpertsPart, "kv_tiers": KvTiersPart, "tiers": TierPart,
        "host": HostPart, "extras": ExtraPart, "memory": MemoryPart, "pools": PoolPart, "workload": WorkloadPart,
        "slo": SloPart, "lengths": LengthsPart, "closed_loop": ClosedLoopPart, "classes": ClassPart,
        "priority": PriorityPart, "prometheus": PrometheusPart, "speculation": SpeculationPart,
        "acceptance": LengthPart,
        "timeout": TimeoutPart, "network": NetworkPart,
        "servegen": ServegenPart, "cost": CostPart, "power": PowerPart, "buy": BuyPart, "api": ApiPart,
    }  # fmt: skip
    innermost = [parts[name] for name in map(str, loc) if name in parts]
    return list((innermost or [Scenario])[-1].model_fields)
