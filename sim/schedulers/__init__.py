"""Scheduler policies: one a file, and the dictionary that names them.

A policy says whether the queue goes `by_priority`, and has two methods. `plan(state) -> Batch` makes one step's batch
and takes its blocks, through the verbs of `sim.state.State`; it sees the queue, the running requests and the KV cache,
never a true output length. `arrival_matters(state)` says whether one more waiting request could change the next plan
while nothing but decoding happens: when not, the replica need not stop for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sim.schedulers.vllm_v1 import VllmV1
from sim.state import Batch, State

if TYPE_CHECKING:
    from calibrate.engine import EngineSpec


class Scheduler(Protocol):
    """What the replica asks of a policy."""

    @property
    def by_priority(self) -> bool:
        """Whether requests wait by their priority, not as they came."""
        ...

    def plan(self, state: State) -> Batch:
        """The next step's batch."""
        ...

    def arrival_matters(self, state: State) -> bool:
        """Whether an arrival could change the next plan of a replica that only decodes."""
        ...


SCHEDULERS = {"vllm-v1": VllmV1}
"""Policy name -> class; its fields are what the engine's `policy` gives it."""


def scheduler_of(engine: EngineSpec) -> Scheduler:
    """The policy of an engine, with its options."""
    return SCHEDULERS[engine.scheduler](**engine.policy)
