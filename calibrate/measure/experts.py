"""Layers of experts: tokens sorted by expert, the experts' two multiplications, the results weighed and summed.

vLLM's fused kernel, torch's grouped multiplication on a GPU, or a loop over the experts; the router is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calibrate.measure.kit import SEED, Kit, Prepared, each
from calibrate.measure.layers import plain_functions
from calibrate.measure.system import installed
from calibrate.measure.timing import Call


def moe(kit: Kit, sizes: Mapping[str, Any]) -> Prepared:
    """Calls of a row of moe."""
    for name, make in LIBRARIES.items():
        there = name == "torch" or (kit.cuda and installed(name.split()[0]))
        if there and f"{name} moe" not in kit.failed:
            try:
                return make(kit, sizes)
            except (ImportError, AttributeError, NotImplementedError, OSError) as error:
                kit.failed[f"{name} moe"] = str(error)
    raise AssertionError("torch is always there")


def routing(torch: Any, tokens: int, experts: int, topk: int, skew: str) -> Any:
    """The experts of every token, [tokens, topk] int64 on the host, no expert twice for one token.

    "balanced": in turn; "uniform": drawn at random; "touched=N": in turn over the first N.
    """
    if skew == "uniform":
        generator = torch.Generator().manual_seed(SEED)
        return torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices
    among = int(skew.partition("=")[2]) if skew.startswith("touched=") else experts
    return torch.arange(tokens * topk).view(tokens, topk) % among


def _weights(kit: Kit, sizes: Mapping[str, Any]) -> list[list[Any]]:
    inner = sizes["inter"] // sizes["tp"]
    up, down = (sizes["experts"], 2 * inner, sizes["hidden"]), (sizes["experts"], sizes["hidden"], inner)
    return kit.pool().sets(up, down)


def _vllm(kit: Kit, sizes: Mapping[str, Any]) -> Prepared:
    import vllm
    from vllm.model_executor.layers.fused_moe import fused_experts

    chosen = routing(kit.torch, sizes["tokens"], sizes["experts"], sizes["topk"], sizes["skew"])
    ids = chosen.to(kit.torch.int32).to(kit.device)
    share = kit.torch.full(ids.shape, 1 / sizes["topk"], device=kit.device)
    x = kit.random(sizes["tokens"], sizes["hidden"])
    calls = each(lambda up, down: fused_experts(x, up, down, share, ids), _weights(kit, sizes))
    return Prepared(calls, f"vllm {vllm.__version__} fused_experts", library="vllm moe")


def _grouped(kit: Kit, sizes: Mapping[str, Any]) -> Prepared:
    """torch's grouped multiplication: all experts in one kernel, rows of each up to `offsets`."""
    torch = kit.torch
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    x, ids, counts = _routed(kit, sizes)
    offsets = counts.cumsum(0).to(torch.int32).to(kit.device)

    def multiply(rows: Any, up: Any, down: Any, activate: Callable[[Any], Any]) -> Any:
        inner = activate(grouped(rows, up.transpose(1, 2), offs=offsets))
        return grouped(inner, down.transpose(1, 2), offs=offsets)

    return Prepared(_calls(kit, sizes, x, ids, multiply), f"{kit.library} grouped_mm", library="torch grouped moe")


def _loop(kit: Kit, sizes: Mapping[str, Any]) -> Prepared:
    torch = kit.torch
    x, ids, counts = _routed(kit, sizes)
    sizes_of = counts.tolist()
    linear = torch.nn.functional.linear

    def multiply(rows: Any, up: Any, down: Any, activate: Callable[[Any], Any]) -> Any:
        parts = [
            linear(activate(linear(part, up[expert])), down[expert])
            for expert, part in enumerate(rows.split(sizes_of))
            if len(part)
        ]
        return torch.cat(parts)

    return Prepared(_calls(kit, sizes, x, ids, multiply), f"{kit.library} loop of experts")


def _routed(kit: Kit, sizes: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Activations, the experts of every token on the device, and the rows of every expert on the host."""
    chosen = routing(kit.torch, sizes["tokens"], sizes["experts"], sizes["topk"], sizes["skew"])
    counts = chosen.flatten().bincount(minlength=sizes["experts"])
    return kit.random(sizes["tokens"], sizes["hidden"]), chosen.to(kit.device), counts


def _calls(kit: Kit, sizes: Mapping[str, Any], x: Any, ids: Any, multiply: Callable[..., Any]) -> list[Call]:
    activate, topk = plain_functions(kit).activate, sizes["topk"]

    def layer(up: Any, down: Any) -> Any:
        order = ids.flatten().argsort()
        token = order // topk
        out = multiply(x[token], up, down, activate).mul_(1 / topk)
        return x.new_zeros(x.shape).index_add_(0, token, out)

    return each(layer, _weights(kit, sizes))


LIBRARIES: dict[str, Callable[[Kit, Mapping[str, Any]], Prepared]] = {
    "vllm": _vllm,
    "torch grouped": _grouped,
    "torch": _loop,
}
"""In order of preference."""
