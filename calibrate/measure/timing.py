"""The stopwatch: median seconds of a call, repeated until the median is sure enough or the time is up.

Calls are a list of which each does the same on other data, and are gone through in turn: what a call reads was not
read by the one before. Knows nothing of what they do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

Call = Callable[[], object]

LEAST = 3  # samples, however long they take
ENOUGH = 7  # samples before the median may count as sure
SURE = 0.005  # standard error of the median, as a share of it, at which more samples are not worth their time
CPU_SAMPLE_S = 200e-6  # of calls between two looks at the clock, whose reading takes about 0.1 us
GPU_SAMPLE_S = 1e-3  # of calls in one graph; CUDA events resolve 0.5 us
GRAPH_S = 20e-3  # of calls in one graph at most, for the sake of many data sets
GRAPH_CALLS = 1000


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of one call, (p90 - p10) / median over the samples, their number, and how they were taken."""

    seconds: float
    spread: float
    samples: int
    how: str


def time_cpu(
    calls: Sequence[Call],
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
    wall: Callable[[], float] = time.perf_counter,
) -> Timed:
    """On a clock of the host's, for calls that are done when they return; `limit_s` counts on the clock on the wall."""
    turn, until = cycle(calls), wall() + limit_s
    once = 0.0
    for _ in range(2):  # the first builds what libraries keep; the second, if there is time, tells how long one takes
        if wall() < until:
            start = clock()
            next(turn)()
            once = max(clock() - start, 1e-9)
    inner = max(1, math.ceil(CPU_SAMPLE_S / once))

    def sample() -> float:
        start = clock()
        for _ in range(inner):
            next(turn)()
        return (clock() - start) / inner

    return _repeat(sample, until, "eager", wall)


def time_cuda(torch: Any, calls: Sequence[Call], limit_s: float, graph: bool = True) -> Timed:
    """On the device's clock (events), the calls captured in a CUDA graph: no launches, but the gaps between its nodes.

    Without `graph`, or where the calls cannot be captured, launched one by one: small kernels then show the host's
    time of a launch.
    """
    cuda = torch.cuda
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    turn = cycle(calls)

    def elapsed(run: Call) -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3  # it gives milliseconds

    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):  # libraries choose and build their kernels before a capture
        for _ in range(3):
            next(turn)()
    cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    once = max(elapsed(next(turn)), 1e-6)
    inner = max(math.ceil(GPU_SAMPLE_S / once), min(len(calls), math.ceil(GRAPH_S / once)))
    inner = min(inner, GRAPH_CALLS)

    def launch() -> None:
        for _ in range(inner):
            next(turn)()

    run, how = launch, "launched"
    if graph and (captured := _captured(torch, launch)) is not None:
        run, how = captured.replay, "graph"
    run()
    cuda.synchronize()
    return _repeat(lambda: elapsed(run) / inner, time.perf_counter() + limit_s, how, time.perf_counter)


def _captured(torch: Any, launch: Call) -> Any:
    """A graph of the calls; None where something in them cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _repeat(sample: Callable[[], float], until: float, how: str, wall: Callable[[], float]) -> Timed:
    samples, look = [sample()], ENOUGH
    while len(samples) < LEAST or wall() < until:
        samples.append(sample())
        if len(samples) >= look:
            if _unsure(samples) < SURE:
                break
            look += max(1, look // 4)
    low, middle, high = np.quantile(samples, [0.1, 0.5, 0.9])
    return Timed(float(middle), float((high - low) / middle), len(samples), how)


def _unsure(samples: list[float]) -> float:
    """Standard error of the median as a share of it: 1.25 sigma / sqrt(n), sigma from the middle 68 %."""
    low, middle, high = np.quantile(samples, [0.16, 0.5, 0.84])
    return float(1.25 * (high - low) / 2 / math.sqrt(len(samples)) / middle)
