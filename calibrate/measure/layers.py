"""The functions of a transformer layer beside attention and experts: torch's own, vLLM's or FlashInfer's.

`functions` picks a library for those that are not multiplications, `linear` for these; single kernels and whole layers
run what they give. Calls of the libraries follow vllm._custom_ops and flashinfer's documentation; those for GPUs were
not run where this was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from calibrate.measure.kit import COMPILER, Kit
from calibrate.measure.system import installed
from calibrate.measure.wrapped import EPS, Functions, Linear, Rope

ROPE_BASE = 10000.0
Made = TypeVar("Made")


def functions(kit: Kit) -> Functions:
    """The first library that is installed and has not failed."""
    makers: dict[str, Callable[[Kit], Functions]] = {"vllm": _vllm, "flashinfer": _flashinfer}
    return _first(kit, makers if kit.cuda else {"vllm": _vllm_cpu}, "elementwise") or plain_functions(kit)


def linear(kit: Kit) -> Linear:
    """Of 16 or 32 bit: vLLM's on a CPU that has it, else torch's, which are cuBLAS's on a GPU, as engines' are."""
    found = None if kit.cuda else _first(kit, {"vllm": _vllm_cpu_linear}, "linear")
    multiply = kit.torch.nn.functional.linear
    return found or Linear(kit.library, None, lambda weight, bias=None: partial(multiply, weight=weight, bias=bias))


def _first(kit: Kit, makers: Mapping[str, Callable[[Kit], Made]], what: str) -> Made | None:
    """What the first library gives that is installed and has not failed."""
    for name, make in makers.items():
        if f"{name} {what}" not in kit.failed and installed(name):
            try:
                return make(kit)
            except (ImportError, AttributeError, OSError) as error:
                kit.failed[f"{name} {what}"] = str(error)
    return None


def plain_functions(kit: Kit) -> Functions:
    """torch's: as they are on a CPU, compiled (each to one kernel) on a GPU."""
    functional = kit.torch.nn.functional

    def add_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        residual = residual + x
        return functional.rms_norm(residual, (residual.shape[-1],), weight, EPS), residual

    def rotate(heads: Any, cos: Any, sin: Any) -> Any:
        one, two = heads.chunk(2, dim=-1)
        return kit.torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    def activate(x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    rotated = kit.fused(rotate)
    compiled = kit.fused(activate) is not activate
    return Functions(
        kit.library + (" compiled" if compiled else ""),
        COMPILER if compiled else None,
        kit.fused(add_norm),
        lambda heads, state: rotated(heads, state.cos, state.sin),
        kit.fused(activate),
    )


def rope_state(kit: Kit, positions: list[int], head_dim: int) -> Rope:
    """Of a step whose tokens stand at `positions`."""
    torch = kit.torch
    powers = torch.arange(0, head_dim, 2, device=kit.device, dtype=torch.float32) / head_dim
    at = torch.arange(max(positions) + 1, device=kit.device, dtype=torch.float32)
    angles = torch.outer(at, ROPE_BASE**-powers)
    exact = torch.cat((angles.cos(), angles.sin()), dim=-1)
    table = exact.to(kit.dtype)
    here = kit.whole(positions, torch.int64)
    cos, sin = table[here].unsqueeze(1).chunk(2, dim=-1)
    return Rope(here, exact, table, cos, sin)


def _vllm(kit: Kit) -> Functions:
    from vllm import __version__, _custom_ops

    empty = kit.torch.empty

    def add_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        _custom_ops.fused_add_rms_norm(x, residual, weight, EPS)  # in place: x is normed, residual the sum
        return x, residual

    def rope(heads: Any, state: Rope) -> Any:
        query, key = heads[:, :-1].flatten(1), heads[:, -1:].flatten(1)  # views: any split rotates the same
        _custom_ops.rotary_embedding(state.positions, query, key, heads.shape[-1], state.table, True)
        return heads

    def activate(x: Any) -> Any:
        out = empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        kit.torch.ops._C.silu_and_mul(out, x)
        return out

    return Functions(f"vllm {__version__}", "vllm elementwise", add_norm, rope, activate)


def _vllm_cpu(kit: Kit) -> Functions:
    from calibrate.measure import vllm_cpu

    return vllm_cpu.functions(kit)


def _vllm_cpu_linear(kit: Kit) -> Linear:
    from calibrate.measure import vllm_cpu

    return vllm_cpu.linear(kit)


def _flashinfer(kit: Kit) -> Functions:
    import flashinfer

    def add_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, EPS)  # in place, as vLLM's
        return x, residual

    def rope(heads: Any, state: Rope) -> Any:
        query, key = heads[:, :-1].flatten(1), heads[:, -1:].flatten(1)
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
            state.positions, query, key, heads.shape[-1], state.exact, is_neox=True
        )
        return heads

    name, activate = f"flashinfer {flashinfer.__version__}", flashinfer.activation.silu_and_mul
    return Functions(name, "flashinfer elementwise", add_norm, rope, activate)
