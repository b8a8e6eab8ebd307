"""Bytes of weights on one GPU of a replica, by what they are, as vLLM holds them.

Projections, experts and (padded) vocabulary are cut; norms, routers and rotary tables lie on every GPU. Pipeline stages
are taken to have all kinds of layers alike.
"""

from __future__ import annotations

from dataclasses import replace

from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.parts import Projection

MXFP4_MULTIPLES = (256, 128)  # vLLM's Marlin kernels round the experts' hidden size and inter / tp up to these
NAMES = {"experts": "experts", "shared": "shared experts", "router": "norms, routers", "gate_up": "MLP", "down": "MLP",
         "recurrent": "recurrent layers"}  # fmt: skip
"""The first word of a projection's name -> what it belongs to; attention otherwise."""


def rank_weights(model: ModelSpec, layout: Parallelism, stage: int = 0) -> dict[str, int]:
    """What -> bytes on one GPU of pipeline stage `stage`.

    Quantised latent attention also keeps what its keys and values are made with in 16 bit, for decoding; experts in
    MXFP4 are padded to what their kernels need. Rotary tables hold a cosine and a sine for every position.
    """
    found: dict[str, int] = {}
    for projection in _projections(model, layout):
        name = next((what for word, what in NAMES.items() if projection.name.startswith(word)), "attention")
        size = _padded(projection).size(model.dtype_bytes)
        if projection.name == "kv_b" and projection.storage.bits < 16:
            size += 2 * projection.params
        found[name] = found.get(name, 0) + size
    vectors = model.vectors(layout.tp) * model.dtype_bytes + 4 * model.score_biases
    found["norms, routers"] = found.get("norms, routers", 0) + vectors
    stages = layout.stages(model.layers)
    found = {name: size * stages[stage] // model.layers for name, size in found.items()}
    table = model.padded_vocab // layout.tp * model.hidden * model.dtype_bytes
    if stage == 0:
        found["embeddings"] = table
    if stage == layout.pp - 1 and (stage or not model.tied_embeddings):
        found["output weights"] = table
    rotary = model.latent.rope if model.latent else model.head_dim
    return found | {"rotary tables": model.max_position * rotary * model.dtype_bytes}


def weight_bytes(model: ModelSpec, layout: Parallelism, stage: int = 0) -> int:
    """All of it."""
    return sum(rank_weights(model, layout, stage).values())


def _projections(model: ModelSpec, layout: Parallelism) -> list[Projection]:
    """The matrices of one GPU: experts are cut over more GPUs than the rest, or dealt out whole."""
    experts = [p for p in model.projections(layout.expert_tp) if p.name.startswith("experts")]
    if model.experts:
        count = model.experts.count
        experts = [replace(p, count=p.count // count * layout.experts_here(count)) for p in experts]
    return [p for p in model.projections(layout.tp) if not p.name.startswith("experts")] + experts


def _padded(projection: Projection) -> Projection:
    """The projection as its kernels need it."""
    if projection.storage.weights != "mxfp4" or not projection.name.startswith("experts"):
        return projection
    hidden, inner = MXFP4_MULTIPLES
    out, into = (inner, hidden) if projection.split == "outputs" else (hidden, inner)
    parts = tuple(-(-n // out) * out for n in projection.parts)
    bias = sum(parts) if projection.bias else 0
    return replace(projection, parts=parts, k=-(-projection.k // into) * into, bias=bias)
