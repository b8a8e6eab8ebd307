"""A profile: what one GPU's kernels cost, fitted to measurements, with where they come from and how far the fit is off.

One JSON file, one row of a table a line. Knows how to price kernels, nothing of models or engines; a family that nobody
measured on this GPU is priced from its datasheet, and always outside what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from calibrate.datasheet import Datasheet
from calibrate.hardware import Gpu, gpu_ids, load_gpu
from calibrate.kernels.chunks import ChunkPrices
from calibrate.kernels.collective import CollectiveModel
from calibrate.kernels.decode import DecodeModel
from calibrate.kernels.elementwise import ElementwiseModel
from calibrate.kernels.gemm import GemmModel
from calibrate.kernels.heads import HeadShape
from calibrate.kernels.lines import KvLines
from calibrate.kernels.moe import MoeModel
from calibrate.kernels.plain import field, many, number, text, whole
from calibrate.kernels.prefill import PrefillModel
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.kernels.routing import Skew

    Floats = NDArray[np.float64]

T = TypeVar("T")
FORMAT = 1
FOLDER = Path(__file__).with_name("profiles")
MODELS: Mapping[str, Any] = {
    "gemm": GemmModel,
    "prefill_attention": PrefillModel,
    "decode_attention": DecodeModel,
    "moe": MoeModel,
    "elementwise": ElementwiseModel,
    "collective": CollectiveModel,
}
SKEW = "power_law_1.01"
"""How tokens spread over many experts. Real routers are between balanced and the heavier power law; NVIDIA's tables
offer this as the lighter one."""
FEW_EXPERTS = 16
"""Up to so many, none is much preferred (Mixtral of Experts, arXiv 2401.04088, section 5), so tokens are taken to draw
them at random; by the power law one of 8 would get 37 % of the tokens."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a family's measurements come from; the fields are those of `calibrate.measurements.Device`."""

    families: tuple[str, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Residual:
    """Median and p90 of |relative error| on `points` that were held out of the fit; `what` was held out."""

    family: str
    kind: str
    what: str
    median: float
    p90: float
    points: int


@dataclass(frozen=True, slots=True)
class Profile:
    """See `calibrate.prices.Prices`. `families` holds fitted models by name (of MODELS). `only`: the GEMM shapes (n, k)
    that it prices, where they are those of one model; None where any."""

    gpu: Gpu
    families: Mapping[str, Any]
    sources: tuple[Source, ...]
    residuals: tuple[Residual, ...]
    only: tuple[tuple[int, int], ...] | None = None

    @property
    def missing(self) -> list[str]:
        """Families that were not measured on this GPU."""
        return sorted(MODELS.keys() - self.families.keys())

    @property
    def provenance(self) -> Mapping[str, object]:
        """See `Prices`."""
        off = [r for r in self.residuals if r.what == "rows"]
        return {
            "kind": "profile",
            "gpu": self.gpu.id,
            "measured": sorted(self.families),
            "from_datasheet": self.missing,
            "residuals": {f"{r.family} {r.kind}".strip(): {"median": r.median, "p90": r.p90} for r in off},
            "sources": {name: _said(source.facts) for source in self.sources for name in source.families},
            "accuracy": f"kernels off by {self._medians()} (medians, held out of the fit); of runs: docs/accuracy.md",
        }

    def gemm_s(self, weights: str, rows: Floats, n: int, k: int) -> Floats:
        """See `Prices`. Raises `ServecastError` for a shape that is not one of `only`."""
        if self.only is not None and (n, k) not in self.only:
            raise ServecastError(
                f"the profile of {self.gpu.id} was fitted to the layers of one model alone, on one GPU, and would only "
                f"guess a {n} x {k} matrix; set cluster.profile: datasheet, or measure the GPU (servecast calibrate)"
            )
        if weights == "fp32" or "gemm" not in self.families:
            return self._datasheet.gemm_s(weights, rows, n, k)
        seconds: Floats = self.families["gemm"].seconds(weights, rows, n, k)
        return seconds

    def moe_s(
        self,
        weights: str,
        rows: Floats,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        tp: int,
        ep: int = 1,
        skew: Skew = "",
    ) -> Floats:
        """See `Prices`. Experts of a dtype that was not measured are priced from the datasheet."""
        if not self._has_experts(weights):
            return self._datasheet.moe_s(weights, rows, hidden, inter, experts, topk, tp, ep, skew)
        skew = skew or self.skew(experts)
        seconds: Floats = self.families["moe"].seconds(weights, rows, hidden, inter, experts, topk, tp, ep, skew)
        return seconds

    def skew(self, experts: int) -> str:
        """See `Prices`: at random between few, by the lighter power law between many."""
        return "uniform" if experts <= FEW_EXPERTS else SKEW

    def elementwise_s(self, op: str, rows: Floats, elements: int) -> Floats:
        """See `Prices`."""
        if "elementwise" not in self.families:
            return self._datasheet.elementwise_s(op, rows, elements)
        seconds: Floats = self.families["elementwise"].seconds(op, rows, elements)
        return seconds

    def collective_s(self, op: str, size: Floats, gpus: int) -> Floats:
        """See `Prices`."""
        point = self.families["collective"].point(op, size, gpus) if "collective" in self.families else None
        if point is None:
            return self._datasheet.collective_s(op, size, gpus)
        seconds: Floats = self.families["collective"].seconds(*point)
        return seconds

    def fused_allreduce_s(self, size: Floats, gpus: int) -> Floats | None:
        """See `Prices`."""
        if "collective" not in self.families:
            return self._datasheet.fused_allreduce_s(size, gpus)
        model = self.families["collective"]
        if not model.has_fused(gpus):
            return None
        seconds: Floats = model.seconds("all_reduce", "fused", gpus, size)
        return seconds

    def prefill(self, shape: HeadShape, max_q: int, max_chunks: int) -> ChunkPrices:
        """See `Prices`."""
        if "prefill_attention" not in self.families:
            return self._datasheet.prefill(shape, max_q, max_chunks)
        compiled: ChunkPrices = self.families["prefill_attention"].compile(shape, max_q, max_chunks)
        return compiled

    def decode(self, shape: HeadShape, max_sequences: int) -> KvLines:
        """See `Prices`."""
        if "decode_attention" not in self.families:
            return self._datasheet.decode(shape, max_sequences)
        lines: KvLines = self.families["decode_attention"].compile(shape, max_sequences)
        return lines

    def inside(self, family: str, *point: object) -> NDArray[np.bool_]:
        """See `Prices`."""
        unmeasured = (
            point[0] == "fp32" if family == "gemm" else family == "moe" and not self._has_experts(str(point[0]))
        )
        if family not in self.families or unmeasured:
            return self._datasheet.inside(family, *point)
        measured = self.families[family].point(*point) if family == "collective" else point
        if measured is None:
            return self._datasheet.inside(family, *point)
        found: NDArray[np.bool_] = self.families[family].inside(*measured)
        return found

    def to_text(self) -> str:
        """What `load_profile` reads; the same profile gives the same text."""
        data = {
            "format": FORMAT,
            "gpu": self.gpu.id,
            "sources": [{"families": list(s.families), **s.facts} for s in self.sources],
            "residuals": [
                [r.family, r.kind, r.what, _round(r.median), _round(r.p90), r.points] for r in self.residuals
            ],
            "families": {name: model.to_json() for name, model in self.families.items()},
        } | ({} if self.only is None else {"only": [list(shape) for shape in self.only]})
        return _lines(data) + "\n"

    def _has_experts(self, weights: str) -> bool:
        return "moe" in self.families and bool(self.families["moe"].has(weights))

    def _medians(self) -> str:
        """For every family the median error of points inside its grid; of kinds, the worst."""
        worst: dict[str, float] = {}
        for r in self.residuals:
            if r.what == "rows" and (r.kind == "all" or r.family == "gemm"):
                worst[r.family] = max(worst.get(r.family, 0.0), r.median)
        return ", ".join(f"{name.replace('_', ' ')} {100 * off:.1f} %" for name, off in worst.items())

    @property
    def _datasheet(self) -> Datasheet:
        return Datasheet(self.gpu)


class _Families(Mapping[str, Any]):
    """The families of a file, each read when it is first asked for: most runs need few of them."""

    def __init__(self, path: str, data: Mapping[str, Any]) -> None:
        self._path = path
        self._data = data
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = MODELS[name].from_json(self._data[name], f"{self._path}: families.{name}")
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def profile_names() -> list[str]:
    """GPUs for which a profile is shipped."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises `ServecastError` with what is wrong, where, and what to do."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ServecastError(f"{path}: is not a profile: not JSON ({error}); it may have been cut off") from None
    return _read(str(path), data)


def _read(path: str, data: Any) -> Profile:
    version = field(data, "format", path, whole)
    if version > FORMAT:
        raise ServecastError(f"{path}: has format {version}; this servecast reads {FORMAT}: install a newer one")
    gpu = field(data, "gpu", path, text)
    if gpu not in gpu_ids():
        raise ServecastError(f"{path}: gpu {gpu!r} is not in the catalogue{nearest(gpu, gpu_ids())}")
    found = field(data, "families", path, _mapping)
    for name in found:
        if name not in MODELS:
            raise ServecastError(
                f"{path}: family {name!r} is not known{nearest(name, MODELS)}; known: {one_of(MODELS)}"
            )
    families = _Families(path, found)
    sources = field(data, "sources", path, many(_source))
    residuals = field(data, "residuals", path, many(_residual))
    only = field(data, "only", path, many(_shape)) if "only" in data else None
    return Profile(load_gpu(gpu), families, sources, residuals, only)


def _shape(value: Any, where: str) -> tuple[int, int]:
    n, k = many(whole)(value, where)
    return n, k


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServecastError(f"{where}: expected a mapping of keys to values")
    return value


def _source(value: Any, where: str) -> Source:
    facts = dict(_mapping(value, where))
    for key in ("source", "licence", "software", "device", "measured_by", "taken"):
        field(facts, key, where, text)
    return Source(field(facts, "families", where, many(text)), {k: v for k, v in facts.items() if k != "families"})


def _residual(value: Any, where: str) -> Residual:
    if not isinstance(value, list) or len(value) != 6:
        raise ServecastError(f"{where}: expected family, kind, what was held out, median, p90 and points")
    family, kind, what = (text(word, where) for word in value[:3])
    return Residual(family, kind, what, number(value[3], where), number(value[4], where), whole(value[5], where))


def _said(facts: Mapping[str, Any]) -> str:
    return f"{facts['source']} ({facts['licence']}): {facts['software']}, on {facts['device']}"


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _lines(value: Any, indent: str = "") -> str:
    """JSON with one line an innermost list or mapping: a change of a row is a change of a line."""
    flat = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    inner: Sequence[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(each, (dict, list)) for each in inner):
        return flat
    deeper = indent + " "
    if isinstance(value, dict):
        rows = [f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_lines(each, deeper)}" for key, each in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{deeper}{_lines(each, deeper)}" for each in inner) + f"\n{indent}]"
