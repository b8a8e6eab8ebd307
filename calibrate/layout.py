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
    sizes = [("attention heads", model.heads), ("padded vocabulary", model.padded_vocab)]
    if model.dense_layers:
        sizes.insert(1, ("MLP's intermediate size", model.intermediate))
    if experts := model.experts:
        sizes += [("experts' intermediate size", experts.inter), ("shared experts' size", experts.shared_inter)]
    clashes = [f"does not divide the {what} {size}" for what, size in sizes if size % tp]
    if model.latent is None and model.kv_heads % tp and tp % model.kv_heads:
        clashes.append(f"neither divides the {model.kv_heads} KV heads nor is a multiple of them")
    return clashes or _cut_blocks(model, tp)


def _cut_blocks(model: ModelSpec, tp: int) -> list[str]:
    """The first projection of which the split would cut a block of weights that share a scale, which vLLM refuses."""
    for projection in model.projections(tp) if tp > 1 else ():
        rows, columns = projection.storage.rows, projection.storage.columns
        outputs, inputs = projection.split == "outputs", projection.split == "inputs"
        cuts = [(n, rows) for n in projection.parts if outputs and rows and n % rows]
        cuts += [(projection.k, columns)] if inputs and columns and projection.k % columns else []
        if cuts and projection.storage.weights != "mxfp4":  # which is padded instead
            size, block = cuts[0]
            return [f"cuts {projection.name} to {size} a GPU, no multiple of the {block} weights that share a scale"]
    return []
