"""`measure`: the points, one after the other, until they are done or the time is up; everything written as it comes.

A folder that holds measurements already is gone on with. It knows no kernels: which there are stands in BUILDERS.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from calibrate.measure import kernels
from calibrate.measure.attention import measured_attention
from calibrate.measure.collectives import collectives
from calibrate.measure.experts import moe
from calibrate.measure.grids import CPU, GPU, Grid
from calibrate.measure.kit import ROTATE, Kit, NoRoomError, Prepared
from calibrate.measure.machine import Cpu, Cuda, open_machine
from calibrate.measure.points import Point, plain_dtype, rounds_of
from calibrate.measure.record import Record
from calibrate.measure.stack import mode, step
from calibrate.measure.timing import LEAST, Timed, time_cpu
from calibrate.measurements import Measurements
from calibrate.model import ModelSpec
from calibrate.models import load_model
from servecast.errors import ServecastError

MODELS = {
    "cuda": ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-0.6b", "mistral-small-24b"),
    "cpu": ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b"),
}
"""Whose shapes are measured where none are named; the first is also run layer by layer in every mode."""

BUILDERS: Mapping[str, Callable[[Kit, Mapping[str, Any]], Prepared]] = {
    "rate": kernels.rate,
    "gemm": kernels.gemm,
    "elementwise": kernels.elementwise,
    "prefill_attention": measured_attention,
    "decode_attention": measured_attention,
    "decode_skew": measured_attention,
    "moe": moe,
}
OF_MODELS = {"step": step, "mode": mode}

SHARE = 0.03  # of the budget that one point may take, a whole step twice it; dearer ones are left out and counted
COMPILE_S = 30.0  # that torch.compile takes for a layer
POINT_S = (0.02, 1.0)  # least and most seconds of repeating one point
SAVE_S = 2.0
CHECKS = 15  # of the reference in one budget...
CHECK_S = 10.0  # ...but not more often
DRIFT = 0.05
CPU_POOL_BYTES = 4 * 2**30
GIVE_UP = 20  # points that fail in a row: the device no longer works

Progress = Callable[[str, int, int, float], None]


def measure(
    device: str,
    out: Path,
    budget_s: float,
    dtype: str | None = None,
    models: Sequence[str] = (),
    progress: Progress | None = None,
    grid: Grid | None = None,
) -> Measurements:
    """Measure kernels on a "cuda" or "cpu" device for about `budget_s` seconds into the folder `out`.

    `dtype` is what multiplications run in (None: bf16 on a GPU, fp32 on a CPU); `models` (names of the catalogue, paths
    of a config.json) give the shapes. What `out` holds already, of the same device and software, is kept and gone on
    with: stopped at any time it can be called again. `progress(family, done, of, seconds left)` is told of every point.
    Raises `ServecastError` for what cannot be measured, with every reason.
    """
    problems = []
    if not budget_s > 0:
        problems.append(f"budget_s: found {budget_s!r}; expected more than 0 seconds")
    specs = []
    for name in models or MODELS.get(device, ()):
        try:
            specs.append(load_model(name))
        except ServecastError as error:
            problems += error.problems
    if problems:
        raise ServecastError(*problems)
    machine, chosen = open_machine(device, dtype)
    sizes = grid or (GPU if device == "cuda" else CPU)
    session = Session(machine, chosen, specs, Record(machine, Path(out)), budget_s, sizes)
    return session.run(progress or (lambda family, done, of, left: None))


@dataclass(slots=True)
class Session:
    """One call of `measure`: what it leaves out, what fails, what its looks at the reference took (seconds), and what
    held the clocks then.

    `slow` is how much longer the last points of each family took than their FLOPs and bytes at the device's best rates.
    """

    machine: Cpu | Cuda
    dtype: str
    models: list[ModelSpec]
    record: Record
    budget_s: float
    grid: Grid
    left_out: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[str]] = field(default_factory=dict)
    references: list[float] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    slow: dict[str, deque[float]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def run(self, progress: Progress) -> Measurements:
        """Everything, and the measurements of this and earlier calls."""
        machine = self.machine
        self.record.resume(plain_dtype(self.dtype))
        self.record.say(machine.notes(self.dtype))
        rounds = rounds_of(self.grid, self.models, machine.kind, self.dtype, machine.gpus)
        kit = self._kit([point for points in rounds for point in points])
        limit = self.budget_s / 4 / sum(len(points) for points in rounds[:2])
        limit = min(max(limit, POINT_S[0]), POINT_S[1])
        waiting = [p for points in rounds for p in points if not self.record.has(p)]
        try:
            with machine.torch.inference_mode():
                self._every(kit, waiting, limit, progress)
        finally:
            self.record.say([*machine.afterwards(), *self._notes(kit, len(waiting))])
            self.record.save()
        if not self.record.rows:
            raise ServecastError(f"nothing could be measured in {self.budget_s:g} s", *self.record.said)
        return self.record.measurements()

    def _every(self, kit: Kit, waiting: list[Point], limit: float, progress: Progress) -> None:
        reference = self._reference(kit)
        checked, bad, stretch = self._check(kit, reference), 0, 1.0
        for number, point in enumerate(waiting):
            if self.record.has(point):
                continue  # a collective that came with another
            cost = self._estimate(point) * (LEAST + 2) * stretch
            if point.family == "mode" and "compiled" in point.values:
                cost += COMPILE_S
            if why := self._why_not(kit, point, cost, limit):
                self.left_out[why] += 1
                continue
            bad = 0 if self._point(kit, point, waiting[number:], limit) else bad + 1
            if bad == GIVE_UP:
                self.record.say([f"stopped after {GIVE_UP} failures in a row: does the device still work?"])
                break
            progress(point.family, number + 1, len(waiting), self._left())
            if time.monotonic() - self.record.saved > SAVE_S:
                self.record.save()
            if time.monotonic() - checked > max(CHECK_S, self.budget_s / CHECKS):
                checked, stretch = self._check(kit, reference), self.machine.stretch()
        if len(self.references) > 1:
            self._check(kit, reference)

    def _why_not(self, kit: Kit, point: Point, cost: float, limit: float) -> str:
        """A key of the reasons for leaving a point out; nothing where it is to be measured."""
        if point.held > kit.pool_bytes or point.made > 0.8 * self.machine.free_bytes():
            return "memory"
        share = 2 * SHARE if point.family == "step" else SHARE
        if point.family != "rate" and cost > max(share * self.budget_s, limit):
            return "dear"
        return "time" if cost > self._left() else ""

    def _point(self, kit: Kit, point: Point, waiting: list[Point], limit: float) -> bool:
        """Measure one point; whether it worked."""
        torch = self.machine.torch
        try:
            if point.family == "collective":
                self._collectives([p for p in waiting if p.family == "collective" and p.values[2] == point.values[2]])
                return True
            timed, kernel = self._timed(kit, point, limit)
        except (NoRoomError, MemoryError, torch.OutOfMemoryError):
            self.left_out["memory"] += 1
            if kit.cuda:
                torch.cuda.empty_cache()
            return True
        except Exception as error:  # kernels of any library, which raise what they like: said, and others go on
            lines = str(error).splitlines() or [type(error).__name__]
            self.failures.setdefault(point.family, []).append(lines[0])
            return False
        self.record.add(point, timed, kernel)
        roofline = self._roofline(point)
        if roofline > 0:
            self.slow.setdefault(point.family, deque(maxlen=9)).append(max(timed.seconds / roofline, 1.0))
        return True

    def _timed(self, kit: Kit, point: Point, limit: float) -> tuple[Timed, str]:
        sizes = point.sizes()
        if point.family == "host":
            calls, times = kernels.host(kit, sizes)
            timed = time_cpu(calls, limit) if kit.cuda else self.machine.time(calls, limit)
            return replace(timed, seconds=timed.seconds / times), kit.library
        prepared = self._prepared(kit, point.family, sizes)
        timed = self.machine.time(prepared.calls, limit, prepared.graph)
        return timed, prepared.kernel + (f", {timed.how}" if kit.cuda else "")

    def _prepared(self, kit: Kit, family: str, sizes: Mapping[str, Any]) -> Prepared:
        """The point's calls, of a library that runs them: one that is installed but fails is done without from then."""
        while True:
            if family in OF_MODELS:
                model = next(model for model in self.models if model.name == sizes["model"])
                return OF_MODELS[family](kit, sizes, replace(model, dtype=kit.plain))
            prepared = BUILDERS[family](kit, sizes)
            if prepared.library is None:
                return prepared
            try:
                prepared.calls[0]()
                return prepared
            except (NoRoomError, self.machine.torch.OutOfMemoryError):
                raise
            except Exception as error:
                kit.failed[prepared.library] = (str(error).splitlines() or [type(error).__name__])[0]

    def _collectives(self, points: list[Point]) -> None:
        jobs = {(str(p.values[0]), int(p.values[3])): p for p in points}
        for job, timed in collectives(points[0].values[2], jobs).items():
            version = ".".join(str(part) for part in self.machine.torch.cuda.nccl.version())
            self.record.add(jobs[job], timed, f"NCCL {version}, {timed.how}")

    def _left(self) -> float:
        return self.budget_s - (time.monotonic() - self.began)

    def _estimate(self, point: Point) -> float:
        """Seconds of a call, from what the family's last points took beside their rooflines."""
        return self._roofline(point) * median(self.slow.get(point.family, [1.5]))

    def _roofline(self, point: Point) -> float:
        best = {"matmul": 0.0, "read": 0.0, "copy": 0.0}
        for (op, _, work), (seconds, *_) in self.record.rows.get("rate", {}).items():
            best[op] = max(best.get(op, 0.0), work / seconds)
        rates = ((point.flops, best["matmul"]), (point.moved, max(best["read"], best["copy"])))
        return max(amount / rate if rate else 0.0 for amount, rate in rates)

    def _reference(self, kit: Kit) -> Prepared:
        """What is timed now and then to see the clock change: the smallest square multiplication."""
        n = min(self.grid.square)
        return kernels.rate(kit, {"op": "matmul", "weights": kit.plain, "work": 2 * n**3})

    def _check(self, kit: Kit, reference: Prepared) -> float:
        self.references.append(self.machine.time(reference.calls, 0.1).seconds)
        if held := self.machine.clocks():
            self.held.setdefault(held.split("held by ")[-1], held)
        return time.monotonic()

    def _kit(self, points: list[Point]) -> Kit:
        machine = self.machine
        free, cache = machine.free_bytes(), machine.cache_bytes
        most = free // 3 if machine.kind == "cuda" else min(free // 2, CPU_POOL_BYTES)
        wanted = max([p.held for p in points if p.held <= most], default=0.0)
        size = int(min(max(wanted * 1.01, 2 * ROTATE * cache), most)) // 4096 * 4096
        return Kit(machine.torch, machine.device, self.dtype, plain_dtype(self.dtype), size, cache)

    def _notes(self, kit: Kit, waiting: int) -> Iterator[str]:
        """What was left out, and what disturbed."""
        words = {
            "time": "not reached in the time: run it again to go on",
            "dear": f"left out: each would take more than {SHARE:.0%} (a whole step {2 * SHARE:.0%}) of the budget of "
            f"{self.budget_s:g} s",
            "memory": "left out: they do not fit the memory",
        }
        yield from (f"{count:,} of {waiting:,} points {words[why]}" for why, count in self.left_out.items())
        for family, lines in self.failures.items():
            yield f"{family}: {len(lines):,} points failed, the first with: {lines[0]}"
        yield from (f"{name} is installed but was done without: {why}" for name, why in kit.failed.items())
        yield from (f"the device was slowed down: {held}" for held in self.held.values())
        first, *later = self.references or [1.0]
        low, high = (extreme(later, default=first) for extreme in (min, max))
        if max(high / first, first / low) > 1 + DRIFT:
            yield (
                f"a reference multiplication took {first * 1e3:.3g} ms at the start and {low * 1e3:.3g} to "
                f"{high * 1e3:.3g} ms ({low / first - 1:+.0%} to {high / first - 1:+.0%}) in {len(later)} later looks: "
                "clocks or other load changed, and times are as uncertain"
            )
