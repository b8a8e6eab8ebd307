"""Which points are measured, in which order, and how they are timed."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from calibrate.layout import Parallelism
from calibrate.measure.grids import CPU, GPU, Grid
from calibrate.measure.points import rounds_of
from calibrate.measure.timing import LEAST, time_cpu, time_cuda
from calibrate.measurements import FAMILIES, VALUES, checked
from calibrate.models import load_model
from calibrate.operators import step_work
from tests.calibrate.measure.tiny import every


@pytest.mark.parametrize(
    ("grid", "device", "dtype"), [(GPU, "cuda", "bf16"), (GPU, "cuda", "fp8"), (CPU, "cpu", "fp32")]
)
def test_points_are_rows_of_their_families(grid: Grid, device: str, dtype: str) -> None:
    points = every(grid, [load_model("qwen3-0.6b"), load_model("llama-3.1-70b")], device, dtype, gpus=8)
    assert len({(p.family, p.values) for p in points}) == len(points)
    expected = {"gemm", "prefill_attention", "decode_attention", "decode_skew", "moe", "elementwise", "host"}
    expected |= {"step", "mode", "rate"} | ({"collective"} if device == "cuda" else set())
    assert {p.family for p in points} == expected
    for family in expected:
        rows = [(*p.values, 1e-3, 0.0, "x") for p in points if p.family == family]
        table = pl.DataFrame(rows, schema=[*FAMILIES[family], *VALUES], orient="row", infer_schema_length=None)
        assert checked(family, table, family) == []


def test_points_hold_the_shapes_of_models_and_tile_edges() -> None:
    model = load_model("llama-3.1-8b")
    points = every(GPU, [model], "cuda", "bf16")
    gemms = {p.values[1:] for p in points if p.family == "gemm"}
    for m in (255, 256, 257, 1023, 1025, 16384):
        assert (m, 6144, 4096) in gemms  # qkv
        assert (m, 2 * 14336 // 8, 4096) in gemms  # gate_up of tp 8
    assert (128, 128256 // 4, 4096) in gemms  # lm_head of tp 4: rows are samples
    assert (2048, 128256, 4096) not in gemms
    assert {p.sizes()["kv_heads"] for p in points if p.family == "decode_attention"} == {1, 2, 4, 8}
    norms = {p.sizes()["elements"] for p in points if p.family == "elementwise" and p.values[0] == "norms"}
    assert norms == {4 * 4096}


def test_points_know_their_work() -> None:
    points = every(CPU, [load_model("llama-3.2-1b")])
    model = replace(load_model("llama-3.2-1b"), dtype="fp32")
    gemm = next(p for p in points if p.family == "gemm" and p.values == ("fp32", 64, 8192 * 2, 2048))
    assert gemm.flops == 2 * 64 * 16384 * 2048
    assert gemm.moved == 4 * (64 * 16384 + 64 * 2048 + 16384 * 2048)
    mixed = next(p for p in points if p.family == "step" and p.values[2:] == (1, 64, 256, 8, 2048))
    work = step_work(model, Parallelism(tp=1), [(64, 256)], 8, 2048)
    assert (mixed.flops, mixed.moved) == (work.flops, work.hbm_bytes)


def test_a_cut_round_has_touched_everything() -> None:
    """Wherever the time runs out in the coarse round, the families and the sizes of each have had their share."""
    _, coarse, *_ = rounds_of(CPU, [load_model("qwen2.5-0.5b"), load_model("llama-3.2-1b")], "cpu", "fp32")
    half = coarse[: len(coarse) // 2]
    assert {p.family for p in half} == {p.family for p in coarse}
    for column in ("m", "n"):
        sizes = {p.sizes()[column] for p in coarse if p.family == "gemm"}
        assert len({p.sizes()[column] for p in half if p.family == "gemm"}) >= 0.7 * len(sizes)


class Clock:
    """A clock that the calls set: each takes the next of `costs` seconds."""

    def __init__(self, costs: list[float]) -> None:
        self.now, self.costs, self.calls = 0.0, costs, 0

    def __call__(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += self.costs[self.calls % len(self.costs)]
        self.calls += 1


def test_the_median_and_the_spread() -> None:
    clock = Clock([1.0, 1.0, 10.0, 2.0, 3.0, 1.0, 4.0, 9.0])  # the first two warm up
    timed = time_cpu([clock.call], 21.5, clock, clock)
    assert timed.samples == 5  # 10, 2, 3, 1 and 4 s: the time is up
    assert timed.seconds == 3.0
    assert timed.spread == pytest.approx((7.6 - 1.4) / 3.0)


def test_sure_medians_stop_early_and_slow_calls_are_repeated_all_the_same() -> None:
    steady = Clock([1e-3])
    assert time_cpu([steady.call], 100.0, steady, steady).samples < 10
    slow = Clock([50.0])
    assert time_cpu([slow.call], 0.1, slow, slow).samples == LEAST


def test_short_calls_are_timed_in_rows_and_take_turns() -> None:
    clock, seen = Clock([1e-6]), [0, 0, 0]

    def call(number: int) -> None:
        seen[number] += 1
        clock.call()

    timed = time_cpu([lambda n=n: call(n) for n in range(3)], 0.01, clock, clock)
    assert timed.seconds == pytest.approx(1e-6)
    assert max(seen) - min(seen) <= 1
    assert sum(seen) / timed.samples >= 100


class FakeCuda:
    """torch.cuda as far as the stopwatch uses it: a graph holds calls, each taking `cost` seconds on the device."""

    def __init__(self, cost: float, capturable: bool = True) -> None:
        self.now, self.cost, self.capturable = 0.0, cost, capturable
        self.graphs: list[list[int]] = []
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            held = 0

            def replay(self) -> None:
                fake.now += self.held * fake.cost

        class graph:  # noqa: N801
            def __init__(self, into: CUDAGraph) -> None:
                self.into = into

            def __enter__(self) -> None:
                self.before, fake.capturing = fake.calls, True

            def __exit__(self, *error: object) -> None:
                self.into.held, fake.capturing = fake.calls - self.before, False

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        self.Event, self.CUDAGraph, self.graph, self.Stream = Event, CUDAGraph, graph, Stream
        self.calls, self.capturing = 0, False

    def current_stream(self) -> Any:
        return self.Stream()

    def stream(self, side: object) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def synchronize(self) -> None: ...

    def call(self) -> None:
        self.calls += 1
        if self.capturing:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
        else:
            self.now += self.cost


@pytest.mark.parametrize(
    ("capturable", "graph", "how"), [(True, True, "graph"), (False, True, "launched"), (True, False, "launched")]
)
def test_cuda_times_are_of_one_call(capturable: bool, graph: bool, how: str) -> None:
    cuda = FakeCuda(20e-6, capturable)
    fake = types.SimpleNamespace(cuda=cuda, OutOfMemoryError=MemoryError)
    timed = time_cuda(fake, [cuda.call] * 70, 0.01, graph)
    assert timed.seconds == pytest.approx(20e-6)
    assert timed.how == how
