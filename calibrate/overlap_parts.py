"""What the parts of half a step take, asked of the prices of its kernels: `calibrate.overlap` puts them together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibrate.cost import longer_by, lookups
from calibrate.engine import EngineSpec
from calibrate.kernel_times import layer_launches
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operator_spec import Operator
from calibrate.operators import step_operators
from calibrate.overlap import Halves, Parts
from calibrate.prices import Prices

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTSIDE = ("embedding", "final_norm", "gate_up", "down")
SHARED = ("shared_gate_up", "shared_down", "shared_gate", "shared_add")
ROUTED = ("router_input", "router", "router_topk", "experts_allgather")
TRAFFIC = {"dispatch": "there", "experts": "experts", "combine": "back"}
"""Operators by where they are; others are in all layers alike, and activations where what is before them is."""
COMM_SMS = 20
SMS = {"hopper": 132, "blackwell": 148}
"""Multiprocessors that DeepEP for high throughput takes from kernels (VLLM_DBO_COMM_SMS), and those of a GPU."""


def halves_of(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, padded: Sequence[Sequence[int]]
) -> Halves:
    """What the halves of steps take, of which `padded` are the tokens, with prompts on any rank and without."""
    assert engine.overlap is not None
    assert model.experts is not None
    routed, host = model.experts.layers, engine.host
    each = host.launching_s(engine.enforce_eager, True, layer_launches(model, layout, engine))
    whole = "FULL" in str(engine.options.get("cudagraph_mode"))  # graphs of halves have whole steps
    return Halves(
        rule=engine.overlap,
        layers=routed,
        dense=model.layers - routed,
        mixed=_parts(model, layout, engine, prices, max(padded[0]), decoding=False),
        decode=_parts(model, layout, engine, prices, max(padded[1]), decoding=True),
        graph=max(engine.graphs.decode, default=0) if whole else 0,
        launch_s=2 * model.layers * each,
    )


def _parts(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices, most: int, decoding: bool
) -> Parts:
    import numpy as np

    assert model.experts is not None
    way = layout.all2all(decoding)
    hooks = way.all2all_backend == "deepep_low_latency"
    tokens = np.arange(-(-most // 2) + 1, dtype=np.float64)
    rows = {"tokens": tokens, "group": layout.dp * tokens}
    groups: dict[str, list[Operator]] = {}
    place = ""
    for op in step_operators(model, way):
        if op.name != "activation":
            words = {**dict.fromkeys(OUTSIDE, "outside"), **dict.fromkeys(SHARED, "shared"),
                     **dict.fromkeys(ROUTED, "routed"), **TRAFFIC}  # fmt: skip
            place = words.get(op.name, "all")
        groups.setdefault(place, []).append(op)
    slower = np.ones(len(tokens))
    if not decoding:
        slower *= [longer_by(engine.long_step_factor, 2 * n) for n in tokens]
    sms = SMS.get(prices.gpu.architecture, 0)
    computing = slower * (sms / (sms - COMM_SMS) if sms and not hooks and not decoding else 1.0)

    def seconds(place: str) -> NDArray[np.float64]:
        found = lookups(groups.get(place, []), way, engine, prices, rows)
        total: NDArray[np.float64] = found["tokens"] + found["group"]
        return total * (slower if place in ("there", "back") else computing)

    routed = model.experts.layers
    every = seconds("all") / model.layers
    found = {name: seconds(name) / routed for name in ("shared", *TRAFFIC.values())}
    found["before"] = every + seconds("routed") / routed
    found["outside"] = seconds("outside") + every * (model.layers - routed)
    return Parts(**{name: array("d", values) for name, values in found.items()}, hooks=hooks)
