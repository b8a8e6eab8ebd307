"""Which layers of a model a pipeline stage holds. Knows counts, nothing of what a layer costs or weighs.

Where a model has layers of several kinds (windows, experts, recurrent ones, other weights), of which `ModelSpec` says
only how many there are, they are taken to take turns as evenly as they can; all stages together hold them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibrate.layout import Parallelism
from calibrate.model import ModelSpec


def stage_model(model: ModelSpec, layout: Parallelism, stage: int) -> ModelSpec:
    """The model with the layers of one stage. Its windows stay as many, of no layers where the stage has none."""
    if layout.pp == 1:
        return model
    sizes = layout.stages(model.layers)
    first = sum(sizes[:stage])
    here = slice(first, first + sizes[stage])

    def of(count: int) -> list[bool]:
        return [kind == 0 for kind in _in_turn([count, model.layers - count])]

    windows = _in_turn([*(w.layers for w in model.windows), model.layers - sum(w.layers for w in model.windows)])
    experts, recurrent = model.experts, model.recurrent
    routed = of(experts.layers if experts else 0)
    states = of(recurrent.layers if recurrent else 0)
    layers_of = {"experts": routed, "shared": routed, "recurrent": states, "dense": [not x for x in routed]}
    quantized = []
    for kind in dict.fromkeys(q.kind for q in model.quantized):
        word = "dense" if kind in ("gate_up", "down") else kind.partition("_")[0]
        mine = layers_of.get(word, [not x for x in states])  # attention's otherwise
        same = [q for q in model.quantized if q.kind == kind]
        alike = _in_turn([*(q.layers for q in same), sum(mine) - sum(q.layers for q in same)])
        part = alike[sum(mine[:first]) : sum(mine[: here.stop])]
        quantized += [replace(q, layers=part.count(i)) for i, q in enumerate(same) if i in part]
    return replace(
        model,
        layers=sizes[stage],
        windows=tuple(replace(w, layers=windows[here].count(i)) for i, w in enumerate(model.windows)),
        experts=experts and replace(experts, layers=sum(routed[here])),
        recurrent=recurrent and replace(recurrent, layers=sum(states[here])),
        quantized=tuple(quantized),
    )


def _in_turn(counts: Sequence[int]) -> list[int]:
    """Numbers of kinds, so many of each, such that after any number of them each kind has about its share."""
    total, given, order = sum(counts), [0] * len(counts), []
    for place in range(1, total + 1):
        late = [count * place / total - had for count, had in zip(counts, given, strict=True)]
        kind = max(range(len(counts)), key=lambda k: (late[k], -k))
        given[kind] += 1
        order.append(kind)
    return order
