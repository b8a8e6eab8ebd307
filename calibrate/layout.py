"""How one model instance is spread over GPUs: tensor parallelism, with vLLM's rules for what divides what.

Pipeline, data and expert parallelism are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from calibrate.hardware import Gpu
from calibrate.model import ModelSpec
from servecast.errors import one_of


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The layout of one replica: `tp` GPUs that each hold a slice of every layer."""

    tp: int

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp


def check_layout(model: ModelSpec, layout: Parallelism, gpu: Gpu) -> list[str]:
    """Every reason why `model` cannot run under `layout` on nodes of `gpu`; empty when it can."""
    tp = layout.tp
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        return [f"tp is {tp!r}; expected a whole number of at least 1"]
    allowed = [n for n in range(1, gpu.gpus_per_node + 1) if not _clashes(model, n)]
    fix = f"; {model.name} on {gpu.id} allows tp {one_of(map(str, allowed))}"
    problems = [f"tp {tp} {clash}{fix}" for clash in _clashes(model, tp)]
    if tp > gpu.gpus_per_node:
        problems.append(f"tp {tp} exceeds the {gpu.gpus_per_node} GPUs of a {gpu.id} node{fix}")
    return problems


def _clashes(model: ModelSpec, tp: int) -> list[str]:
    clashes = [
        f"does not divide the {what} {size}"
        for what, size in (
            ("attention heads", model.heads),
            ("MLP's intermediate size", model.intermediate),
            ("padded vocabulary", model.padded_vocab),
        )
        if size % tp
    ]
    if model.kv_heads % tp and tp % model.kv_heads:
        clashes.append(f"neither divides the {model.kv_heads} KV heads nor is a multiple of them")
    return clashes
