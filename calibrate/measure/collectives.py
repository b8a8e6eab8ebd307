"""Collectives among the GPUs of this machine by torch.distributed: a process a GPU, timed on the host of the first.

The NCCL path needs several CUDA devices and was not run where this was written; the same code was run with gloo on a
CPU. Calls follow each other without a graph: small messages show the host's launches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from calibrate.measure.kit import NoRoomError
from calibrate.measure.machine import load_torch
from calibrate.measure.timing import LEAST, Timed

CALLS = 10  # in a row, between two looks at the clock
REPEATS = 12
PATIENCE_S = 300.0

Job = tuple[str, int]
"""The operation and the bytes of the larger buffer of a rank."""


def collectives(gpus: int, jobs: Iterable[Job], backend: str = "nccl") -> dict[Job, Timed]:
    """Seconds of each job among `gpus` ranks. `RuntimeError` with the first lines of what failed."""
    torch = load_torch()
    context = torch.multiprocessing.get_context("spawn")
    told: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        arguments = (gpus, meet, list(jobs), backend, told)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(gpus)]
        for rank in ranks:
            rank.start()
        until = time.monotonic() + PATIENCE_S
        while told.empty() and time.monotonic() < until and all(rank.exitcode in (None, 0) for rank in ranks):
            time.sleep(0.05)
        answer = "a rank ended, or ran on, without an answer" if told.empty() else told.get()
        for rank in ranks:
            rank.join(1.0)
            if rank.is_alive():
                rank.terminate()
    if isinstance(answer, str):
        raise RuntimeError(f"collectives among {gpus} ranks with {backend}: {answer}")
    return {job: Timed(*timed) for job, timed in answer}


def _rank(rank: int, gpus: int, meet: str, jobs: list[Job], backend: str, told: Any) -> None:
    torch = load_torch()
    import torch.distributed as dist

    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=gpus)
        found = [(job, _timed(torch, dist, device, gpus, *job)) for job in jobs]
        if rank == 0:
            told.put(found)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError, NoRoomError) as error:
        told.put(f"{type(error).__name__}: {error}".splitlines()[0])


def operation(torch: Any, dist: Any, device: Any, gpus: int, op: str, size: int) -> Callable[[], Any]:
    """The call of one collective whose larger buffer on a rank is `size` bytes of bf16."""
    elements = max(size // 2 // gpus, 1)
    whole = torch.ones(elements * gpus, dtype=torch.bfloat16, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_to_all":
        there = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(there, whole)
    part = whole[:elements].clone()
    if op == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        return lambda: gather(whole, part)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(part, whole)


def _timed(torch: Any, dist: Any, device: Any, gpus: int, op: str, size: int) -> tuple[float, float, int, str]:
    import numpy as np

    run = operation(torch, dist, device, gpus, op, size)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samples = []
    for number in range(LEAST + REPEATS):
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        wait()
        if number >= LEAST:  # the first build channels
            samples.append((time.perf_counter() - start) / CALLS)
    low, middle, high = np.quantile(samples, [0.1, 0.5, 0.9])
    return float(middle), float((high - low) / middle), len(samples), "launched"
