"""What the GPUs of a replica send each other in a step, as operators: collectives between groups of them.

It knows who needs what, nothing of links or time. Of data parallel ranks that share experts as vLLM runs them
(vllm/distributed/device_communicators/all2all.py, `use_sequence_parallel_moe` of vllm/config/parallel.py).
"""

from __future__ import annotations

from typing import Literal

from calibrate.layout import Group, Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Collective, Operator

ROUTE_BYTES = 8  # of one choice of an expert: its number and its weight
SCALED = 128  # elements that share a scale of four bytes where fp8 is sent


def collectives(model: ModelSpec, layout: Parallelism) -> list[Operator]:
    """All of a model's layers and its logits (of pipeline stages, what `model` has)."""
    tp, size, hidden, vocab = layout.tp, model.dtype_bytes, model.hidden, model.padded_vocab // layout.tp
    routed = model.experts is not None and model.experts.layers > 0
    found = _expert_traffic(model, layout) if routed and layout.dp * layout.pcp > 1 else []
    if tp == 1:
        return found
    ring = 2 * (tp - 1) / tp  # of the buffer: what each rank sends in an all-reduce

    def allreduce(name: str, elements: int, kernels: int) -> Operator:
        moved = kernels * elements * size * ring
        return Operator(name, "allreduce", "tokens", kernels, (elements,), 0, 0, moved)

    # a norm over all heads needs the two sums of squares of all ranks, in fp32
    norm = [allreduce("qk_norm_allreduce", 2 * 4 // size, model.layers)] if model.qk_norm == "all" else []
    # where each GPU brings its own share of the tokens to the experts, these are gathered after them, not reduced
    split = model.experts.layers if model.experts and layout.dp > 1 and layout.ep else 0
    reduces = 2 * model.layers - split
    gather = Operator("logits_allgather", "allgather", "samples", 1, (tp * vocab,), 0, 0, vocab * size * (tp - 1))
    return [*norm, allreduce("allreduce", hidden, reduces), *found, gather]


def _expert_traffic(model: ModelSpec, layout: Parallelism) -> list[Operator]:
    """What brings the tokens of all data parallel, or prefill context parallel, ranks to the experts and back.

    With expert parallelism the GPUs of a data parallel rank's tensor parallel group, which all have the group's tokens,
    take a share of them each, and put them together again afterwards.
    """
    experts = model.experts
    assert experts is not None
    layers, hidden, size = experts.layers, model.hidden, model.dtype_bytes
    split = layout.tp if layout.ep and layout.pcp == 1 else 1
    if layout.all2all_backend == "allgather_reducescatter":
        group: Group = "pcp" if layout.pcp > 1 else "experts" if layout.ep else "dp"
        route = hidden + experts.topk * ROUTE_BYTES // size
        found = [
            _gathered("dispatch", "allgather", layers, route, layout, group, size),
            _gathered("combine", "reducescatter", layers, hidden, layout, group, size),
        ]
    else:
        found = _all_to_all(model, layout, split)
    if split > 1:
        moved = layers * hidden * size * (split - 1) / split
        found.append(Operator("experts_allgather", "allgather", "tokens", layers, (hidden,), 0, 0, moved))
    return found


def _gathered(
    name: str,
    family: Literal["allgather", "reducescatter"],
    layers: int,
    elements: int,
    layout: Parallelism,
    group: Group,
    size: int,
) -> Operator:
    ranks = len(layout.ranks(group))
    moved = layers * elements * size * (ranks - 1) / ranks
    return Operator(name, family, "group", layers, (elements,), 0, 0, moved, group=group)


def _all_to_all(model: ModelSpec, layout: Parallelism, split: int) -> list[Operator]:
    """DeepEP's: for low latency a token goes to each of its experts, for high throughput once to each GPU that has any
    of them (the mean of random choices). It goes there in the experts' own dtype if that is fp8 in blocks."""
    experts = model.experts
    assert experts is not None
    ranks, topk, hidden, layers = layout.expert_ep, experts.topk, model.hidden, experts.layers
    low = layout.all2all_backend == "deepep_low_latency"
    copies = topk if low else places(ranks, topk)
    stored = {p.storage.weights for p in model.projections(1) if p.name == "experts_up"}
    there = hidden + hidden // SCALED * 4 if stored == {"fp8_block"} else hidden * model.dtype_bytes
    back = hidden * model.dtype_bytes
    families: tuple[Collective, Collective] = ("dispatch_high_throughput", "combine_high_throughput")
    if low:
        families = ("dispatch_low_latency", "combine_low_latency")
    return [
        Operator(name, family, "tokens", layers, (hidden, topk), 0, 0, layers * copies * each / split, group="experts")
        for name, family, each in zip(("dispatch", "combine"), families, (there, back), strict=True)
    ]


def places(places: int, choices: int) -> float:
    """Of so many places, how many that many choices at random hit on average."""
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)
