"""Seconds of collectives between the GPUs of one node, by operation, library and number of GPUs. Knows no models.

Backend "custom_graph" is the all-reduce that vLLM itself would run, captured in a CUDA graph. Its dispatch (vLLM 0.19,
vllm/distributed/device_communicators: cuda_communicator.py, all_reduce_utils.py, symm_mem.py): with 2, 4, 6 or 8 GPUs
of one node (more than 2 only where all are joined by NVLink) the custom kernel below a size, 8 MiB or less where
symmetric memory works (sm_90: 8, 8, 0.5, 0.25 MiB for 2, 4, 6, 8 GPUs; sm_100: 2, 2, 1, 1; sm_103: 4, 4, 8, 4); then
symmetric memory (sm_90: 64, 32, 64, 64 MiB; sm_100: 8, 32, 128, 128; sm_103: 4, 32, 32, 64); then NCCL. "custom_eager"
is the same outside a graph: in published tables with the launches and a copy of the input that no engine makes. "fused"
is TensorRT-LLM's, which FlashInfer runs in one kernel with the norm after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.heldout import split
from calibrate.kernels.plain import field, many, text, whole
from calibrate.kernels.ramp import Ramp, fit_ramp, octaves, read_ramp
from calibrate.kernels.roofline import Roofline
from calibrate.kernels.tally import Tally
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

KEY = ("op", "backend", "gpus")
MANY_SIZES = 40  # beyond it knots are octaves, not the measured sizes
STEP = 1.35  # times what the slope before it says: there the engine changed the library, not the wire its speed
PRICED_BY: Mapping[str, tuple[str, str]] = {
    "allgather": ("all_gather", "nccl"),
    "reducescatter": ("reduce_scatter", "nccl"),
    "sendrecv": ("send_recv", "nccl"),
    "dispatch_low_latency": ("dispatch", "deepep_low_latency"),
    "combine_low_latency": ("combine", "deepep_low_latency"),
    "dispatch_high_throughput": ("dispatch", "deepep_high_throughput"),
    "combine_high_throughput": ("combine", "deepep_high_throughput"),
}
"""Collective -> the operation and library that price it where they were measured."""
ACROSS = ("dispatch", "combine")  # what was measured over several nodes too, where other links decide
CUSTOM_GPUS = (2, 4, 6, 8)  # what vLLM's custom all-reduce is built for; other groups get NCCL


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """`curves[op, backend, gpus]`: seconds over the bytes of the whole buffer of one rank."""

    curves: Mapping[tuple[str, str, int], Ramp]

    def seconds(self, op: str, backend: str, gpus: int, size: ArrayLike) -> Floats:
        """Seconds of one call for every `size` in bytes (an array of any shape).

        Groups of a size that was not measured: between two measured ones on the straight line in log(gpus),
        log(seconds); beyond them the latency of the nearest one follows the trend of the last two, and the rest the
        bytes a rank sends in a ring: 2 (n - 1) / n of an all-reduce's buffer, (n - 1) / n of the others'.
        """
        x = np.asarray(size, np.float64)
        known = self._gpus(op, backend)
        if gpus < 2:
            raise ServecastError(f"{op}: found a group of {gpus}; expected at least 2 GPUs")
        if gpus in known:
            return self.curves[op, backend, gpus](x)
        below, above = [n for n in known if n < gpus], [n for n in known if n > gpus]
        if below and above:
            low, high = below[-1], above[0]
            share = np.log(gpus / low) / np.log(high / low)
            logs = [np.log(self.curves[op, backend, n](x)) for n in (low, high)]
            return np.asarray(np.exp((1 - share) * logs[0] + share * logs[1]))
        near, next_one = (below[-1], below[-2:][0]) if below else (above[0], above[:2][-1])
        first = {n: self.curves[op, backend, n].seconds[0] for n in (near, next_one)}
        power = 0.5
        if next_one != near:
            power = float(np.clip(np.log(first[near] / first[next_one]) / np.log(near / next_one), 0.0, 1.0))
        moving = _sent(op, gpus) / _sent(op, near)
        return self.curves[op, backend, near].times((gpus / near) ** power, moving)(x)

    def inside(self, op: str, backend: str, gpus: int, size: ArrayLike) -> NDArray[np.bool_]:
        """Whether the group was measured and the size lies between its smallest and largest."""
        x = np.asarray(size, np.float64)
        curve = self.curves.get((op, backend, gpus))
        return np.zeros(x.shape, np.bool_) if curve is None else (x >= curve.at[0]) & (x <= curve.at[-1])

    def point(self, op: str, size: Any, gpus: int) -> tuple[str, str, int, Any] | None:
        """(operation, library, GPUs, bytes) of the measured collective that prices one of `traffic.Collective`; None
        where nobody measured one."""
        key = ("all_reduce", self.allreduce_backend(gpus)) if op == "allreduce" else PRICED_BY[op]
        return (*key, gpus, size) if any(curve[:2] == key for curve in self.curves) else None

    def allreduce_backend(self, gpus: int) -> str:
        """The library whose times an all-reduce of vLLM takes: its own dispatch where that was measured, else NCCL."""
        known = {backend for op, backend, _ in self.curves if op == "all_reduce"}
        order = ("custom_graph", "nccl") if gpus in CUSTOM_GPUS else ("nccl", "custom_graph")
        for backend in (*order, *sorted(known)):
            if backend in known:
                return backend
        raise ServecastError("no all-reduce was measured on this GPU")

    def allreduce_seconds(self, size: ArrayLike, gpus: int) -> Floats:
        """Seconds on the GPU of the all-reduce that vLLM runs on `size` bytes, captured in a CUDA graph or not."""
        return self.seconds("all_reduce", self.allreduce_backend(gpus), gpus, size)

    def has_fused(self, gpus: int) -> bool:
        """Whether an all-reduce that norms its result too was measured among so many GPUs."""
        return ("all_reduce", "fused", gpus) in self.curves

    def to_json(self) -> list[dict[str, Any]]:
        """One row a curve."""
        return [dict(zip(KEY, key, strict=True)) | curve.to_json() for key, curve in self.curves.items()]

    @classmethod
    def from_json(cls, data: Any, where: str = "collective") -> CollectiveModel:
        """What `to_json` gave; `ServecastError` with the key where it is something else."""
        return cls(dict(many(_curve)(data, where)))

    def _gpus(self, op: str, backend: str) -> list[int]:
        known = sorted(n for o, b, n in self.curves if (o, b) == (op, backend))
        if not known:
            there = sorted({f"{o} by {b}" for o, b, _ in self.curves})
            raise ServecastError(f"collective: {op!r} by {backend!r} was not measured; known: {one_of(there)}")
        return known


def fit_collective(table: pl.DataFrame, roofline: Roofline) -> CollectiveModel:
    """Curves through the measured sizes that never fall; beyond the largest the last slope, no faster than memory."""
    curves = {}
    for key, rows in table.sort(*KEY, "bytes").group_by(KEY, maintain_order=True):
        op, backend, gpus = str(key[0]), str(key[1]), int(key[2])
        size, seconds = rows["bytes"].to_numpy().astype(np.float64), rows["seconds"].to_numpy()
        sizes = np.unique(size)
        curve = fit_ramp(
            size,
            seconds,
            sizes if len(sizes) <= MANY_SIZES else octaves(size),
            least_tail=1 / roofline.bandwidth_bytes_per_s,
        )
        curves[op, backend, gpus] = _stepped(curve) if backend.startswith("custom") else curve
    return CollectiveModel(curves)


def evaluate(table: pl.DataFrame, roofline: Roofline, seed: int = 0) -> list[tuple[str, str, float, float, int]]:
    """(what, operation and backend, median, p90, points): |relative error| on what was held out of the fit.

    "rows": a fifth of the points, where they lie between others; "gpus": each number of GPUs but the smallest, in
    turn; "largest": sizes above an eighth of the largest.
    """
    import polars as pl

    tally = Tally()

    def ask(what: str, kept: pl.DataFrame, held: pl.DataFrame) -> None:
        model = fit_collective(kept, roofline)
        there = {(op, backend) for op, backend, _ in model.curves}
        for key, rows in held.group_by(KEY, maintain_order=True):
            op, backend, gpus = str(key[0]), str(key[1]), int(key[2])
            if (op, backend) not in there:
                continue
            size, seconds = rows["bytes"].to_numpy().astype(np.float64), rows["seconds"].to_numpy()
            use = model.inside(op, backend, gpus, size) if what == "rows" else np.ones(len(size), np.bool_)
            if use.any():
                tally.add(what, f"{op} {backend}", model.seconds(op, backend, gpus, size[use]), seconds[use])

    ask("rows", *split(table, None, 0.2, seed))
    one_node = table.filter(~pl.col("op").is_in(ACROSS))
    for gpus in one_node["gpus"].unique().sort()[1:]:
        ask("gpus", one_node.filter(pl.col("gpus") != gpus), one_node.filter(pl.col("gpus") == gpus))
    large = pl.col("bytes") * 8 > pl.col("bytes").max().over(KEY)
    ask("largest", table.filter(~large), table.filter(large))
    return tally.found()


def _sent(op: str, gpus: int) -> float:
    """Buffers that a rank sends in a ring of `gpus`."""
    if op == "send_recv":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (gpus - 1) / gpus


def _stepped(curve: Ramp) -> Ramp:
    """The curve with a step instead of a slope where the dispatch changes.

    vLLM compares `size < limit` with limits that are powers of two, as the measured sizes are: so the times of the
    library before hold until one byte before the size whose time jumps.
    """
    at, seconds = list(curve.at[:2]), list(curve.seconds[:2])
    for i in range(2, len(curve.at)):
        x, y = curve.at[i], curve.seconds[i]
        slope = (curve.seconds[i - 1] - curve.seconds[i - 2]) / (curve.at[i - 1] - curve.at[i - 2])
        before = curve.seconds[i - 1] + slope * (x - curve.at[i - 1])
        if y > STEP * before and x - 1 > at[-1]:
            at.append(x - 1)
            seconds.append(before)
        at.append(x)
        seconds.append(y)
    return Ramp(tuple(at), tuple(seconds), curve.tail)


def _curve(data: Any, where: str) -> tuple[tuple[str, str, int], Ramp]:
    key = field(data, "op", where, text), field(data, "backend", where, text), field(data, "gpus", where, whole)
    return key, read_ramp(data, where)
