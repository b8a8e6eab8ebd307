"""Scheduler policies: one a file, and the dictionary that names them.

A policy says whether the queue goes `by_priority`, and has two methods. `plan(state) -> Batch` makes one step's batch
and takes its blocks, through the verbs of `sim.state.State`; it sees the queue, the running requests and the KV cache,
never a true output length. `arrival_matters(state)` says whether one more waiting request could change the next plan
while nothing but decoding happens: when not, the replica need not stop for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.schedulers.policy import Scheduler
from sim.schedulers.tensorrt_llm import TensorrtLlm
from sim.schedulers.vllm_v1 import VllmV1

if TYPE_CHECKING:
    from calibrate.engine import EngineSpec


__all__ = ["SCHEDULERS", "Scheduler", "scheduler_of"]

SCHEDULERS: dict[str, type[Scheduler]] = {"tensorrt-llm": TensorrtLlm, "vllm-v1": VllmV1}
"""Policy name -> class; its fields are what the engine's `policy` gives it."""


def scheduler_of(engine: EngineSpec) -> Scheduler:
    """The policy of an engine, with its options."""
    return SCHEDULERS[engine.scheduler](**engine.policy)
