"""What a plan chooses from: GPUs, how a replica lies on them, and limits of the engine. A candidate has no number of
replicas yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from calibrate.hardware import Gpu, load_gpu
from servecast.errors import ServecastError
from servecast.scenario import Scenario

SIZES = (1, 2, 4, 8)
"""GPUs of a tensor parallel group, and pipeline stages, that are tried where nobody says."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kind of replica: `gpu`, `tp` and `pp`, and the scenario's keys that it changes beside them. With a `split` it
    is a unit of so many prefill and decode replicas, each of that kind."""

    gpu: str
    tp: int = 1
    pp: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    split: tuple[int, int] | None = None

    @property
    def hardware(self) -> tuple[str, int, int, tuple[int, int] | None]:
        """What has to be bought: two candidates with the same differ in limits only."""
        return self.gpu, self.tp, self.pp, self.split

    @property
    def gpus(self) -> int:
        """GPUs of one replica, or unit."""
        return self.tp * self.pp * (sum(self.split) if self.split else 1)

    def overrides(self, cluster: Mapping[str, Any], replicas: int = 1) -> dict[str, Any]:
        """The changed keys of the scenario whose `cluster` that is, with so many replicas, or units."""
        kept = {key: value for key, value in cluster.items() if key not in ("gpu", "tp", "pp", "replicas", "profile")}
        if cluster.get("gpu") == self.gpu and "profile" in cluster:
            kept["profile"] = cluster["profile"]
        pool = {"gpu": self.gpu, "tp": self.tp, "pp": self.pp}
        kept.setdefault("router", "least-outstanding")
        if self.split is None:
            kept.pop("split", None)
            changed: dict[str, Any] = kept | pool | {"replicas": replicas}
        else:
            reads, answers = self.split
            changed = kept | {
                "split": kept.get("split") or {"router": "least-outstanding"},
                "pools": [
                    pool | {"role": "prefill", "replicas": reads * replicas},
                    pool | {"role": "decode", "replicas": answers * replicas},
                ],
            }
        return {"cluster": changed} | dict(self.settings)

    def __str__(self) -> str:
        layout = f", tp {self.tp}" * (self.tp > 1) + f", pp {self.pp}" * (self.pp > 1)
        split = f", {self.split[0]} prefill : {self.split[1]} decode" if self.split else ""
        limits = "".join(f", {key.removeprefix('engine.')} {value}" for key, value in self.settings)
        return f"{self.gpu}{layout}{split}{limits}"


def candidates(
    scenario: Scenario,
    gpus: Iterable[str],
    settings: Mapping[str, Iterable[Any]],
    *,
    tps: Iterable[int] = SIZES,
    pps: Iterable[int] = (1,),
    splits: Iterable[tuple[int, int] | None] = (None,),
) -> Iterator[Candidate]:
    """Every combination; whether it can run is found when it is set up. Layouts that need more GPUs than a link joins
    are left out, unless the scenario has a network. Raises ServecastError for a scenario with several pools, and for
    unknown GPUs."""
    if len(scenario.cluster.pools) > 1:
        raise ServecastError(
            "cluster.pools: a plan finds the pools; give the short form, cluster: {gpu: ...}, of one of them"
        )
    pool = scenario.cluster.pools[0]
    if changing := [key for key in ("autoscale", "failures") if getattr(pool, key) is not None]:
        changing = [f"cluster.{key}" for key in changing]
    if scenario.cluster.events:
        changing.append("cluster.events")
    if changing:
        why = "a plan is for a fixed number of replicas; take it out (null), and run the answer with it"
        raise ServecastError(*(f"{key}: {why}" for key in changing))
    if pool.dp > 1:
        raise ServecastError("cluster.dp: engines that share experts are not planned yet; compare layouts with a sweep")
    known = known_gpus(gpus)
    keys = list(settings)
    tps, pps, splits = list(tps), list(pps), list(splits)
    for gpu in known:
        for tp, pp, split in product(tps, pps, splits):
            if (tp * pp > gpu.link_gpus and pool.network is None) or (split and pp > 1):
                continue
            for values in product(*settings.values()):
                chosen = tuple((k, v) for k, v in zip(keys, values, strict=True) if v is not None)
                yield Candidate(gpu.id, tp, pp, chosen, split)


def known_gpus(names: Iterable[str]) -> list[Gpu]:
    """Raises ServecastError for every name that is no GPU of the catalogue."""
    known, problems = list[Gpu](), list[str]()
    for name in names:
        try:
            known.append(load_gpu(name))
        except ServecastError as error:
            problems += [f"--gpus: {problem}" for problem in error.problems]
    if problems:
        raise ServecastError(*problems)
    return known


def limits_of(scenario: Scenario) -> dict[str, list[Any]]:
    """The limits of the engine that are tried where nobody says: None is the scenario's own value, or the default."""
    from calibrate.options import family_of, find_preset

    name, _ = find_preset(scenario.engine["preset"])
    kind = family_of(name)
    if kind == "vllm":
        return {"engine.max_num_batched_tokens": [None, 2048, 4096, 16384], "engine.max_num_seqs": [None, 64]}
    return {}
