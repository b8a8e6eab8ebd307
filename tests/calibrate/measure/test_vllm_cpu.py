"""vLLM's kernels on a CPU: our calls against stand-ins with its signatures, and against vLLM where it is installed."""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import pytest

from calibrate.measure import kernels, vllm_cpu
from calibrate.measure.attention import attention
from calibrate.measure.kit import Kit
from calibrate.measure.layers import functions, linear
from calibrate.measure.stack import Stack
from calibrate.measure.wrapped import Batch
from tests.calibrate.measure.test_kernels import BATCHES, unpaged
from tests.calibrate.measure.tiny import TINY, close


@pytest.fixture
def mine(kit: Kit) -> Kit:
    """A kit of its own: what failed in another test is not known."""
    return Kit(kit.torch, kit.device, kit.weights, kit.plain, kit.pool_bytes, kit.cache_bytes)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, torch: Any) -> list[str]:
    """A stand-in for vLLM's CPU build; the list of what was called."""
    called: list[str] = []

    def plan(**given: Any) -> Any:
        assert given["isa"] == f"isa of {given['dtype']}"
        return given

    def attend(scheduler_metadata: Any, **given: Any) -> None:
        called.append("attention")
        starts, lengths = given["query_start_loc"], given["seq_lens"]
        assert scheduler_metadata["seq_lens"] is lengths
        assert scheduler_metadata["query_start_loc"] is starts
        assert scheduler_metadata["num_heads"] == given["query"].shape[1]
        (q,) = {b - a for a, b in pairwise(starts.tolist())}
        cached = given["key_cache"].transpose(1, 2), given["value_cache"].transpose(1, 2)
        given["output"].copy_(unpaged(given["query"], cached, given["block_table"].tolist(), lengths.tolist(), q))

    def pack(layer: Any, remove_weight: bool) -> None:
        called.append("pack")
        assert not remove_weight
        packed = layer.weight.t().contiguous()
        if layer.bias is not None:
            layer.bias.data = layer.bias.to(torch.float32)
        layer.cpu_linear = lambda x, weight, bias: x @ packed + (0 if bias is None else bias)

    def add_norm(x: Any, residual: Any, weight: Any, eps: float, size: None) -> Any:
        called.append("norm")
        total = x + residual
        return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total

    def module(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__version__="9.9", **members))

    ops = types.SimpleNamespace(
        cpu_attn_get_scheduler_metadata=plan,
        cpu_attention_with_kv_cache=attend,
        rotary_embedding=lambda *_: called.append("rope"),
    )
    norm = types.SimpleNamespace(maybe_inplace=add_norm)
    module("vllm", _custom_ops=ops, ir=types.SimpleNamespace(ops=types.SimpleNamespace(fused_add_rms_norm=norm)))
    module("vllm.v1.attention.backends.cpu_attn", _get_attn_isa=lambda dtype, block, dim: f"isa of {dtype}")
    module("vllm.model_executor.layers.utils", dispatch_cpu_unquantized_gemm=pack)
    for user in ("attention", "layers"):
        monkeypatch.setattr(f"calibrate.measure.{user}.installed", lambda name: name == "vllm")
    monkeypatch.setattr(vllm_cpu, "BLOCK", 32)
    return called


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_gets_the_blocks_of_every_sequence(mine: Kit, vllm: list[str], batch: Batch) -> None:
    chosen, name = attention(mine, batch)
    assert (name, chosen.kernel) == ("vllm", "vllm 9.9 cpu_attn, paged")
    starts = [0, *accumulate(-(-length // 32) for length in batch.lengths)]
    cache = chosen.caches[0][0]
    assert cache.shape == (starts[-1], batch.kv_heads, 64, batch.dim)
    query = mine.random(len(batch.lengths) * batch.q, batch.heads, batch.dim) * 20
    rows = [list(range(a, b)) for a, b in pairwise(starts)]
    cached = (cache[:, :, :32].transpose(1, 2), cache[:, :, 32:].transpose(1, 2))
    close(chosen.run(query, [cache]), unpaged(query, cached, rows, batch.lengths, batch.q))
    assert vllm == ["attention"]


def test_multiplications_have_packed_weights(mine: Kit, vllm: list[str]) -> None:
    prepared = kernels.gemm(mine, {"m": 3, "n": 32, "k": 64, "weights": "fp32"})
    assert (prepared.kernel, prepared.library) == ("vllm 9.9", "vllm linear")
    assert vllm == ["pack"] * len(prepared.calls)
    ((weight,), *_) = mine.pool().sets((32, 64))
    x, bias = mine.random(3, 64), mine.random(32)
    close(linear(mine).bind(weight, bias)(x), mine.torch.nn.functional.linear(x, weight, bias))


def test_a_step_runs_them_all(mine: Kit, vllm: list[str]) -> None:
    stack = Stack(mine, TINY, (1, 4, 12, 2, 20))
    assert stack.kernel == "vllm 9.9 cpu_attn, paged + vllm 9.9"
    assert vllm.count("pack") == 4 * TINY.layers + 1
    assert stack.step().shape == (3,)
    counts = {what: vllm.count(what) for what in ("attention", "norm", "rope")}
    assert counts == {"attention": 2 * TINY.layers, "norm": 2 * TINY.layers + 1, "rope": TINY.layers}
    x = mine.random(3, 8)
    close(functions(mine).activate(x), mine.torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_without_a_cpu_build_of_vllm_torch_does_it(mine: Kit, vllm: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.layers.utils"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace())
    assert attention(mine, BATCHES[0])[1] == "torch"
    assert linear(mine).kernel == mine.library
    assert mine.failed.keys() == {"vllm attention", "vllm linear"}


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM (its CPU build) is not installed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vllm_s_own_kernels_compute_what_torch_s_do(torch: Any, dtype: str) -> None:
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kit = Kit(torch, torch.device("cpu"), dtype, dtype, 2**24, 2**16)
    batch = Batch(((2, 150),), 5, 4, 2, 64)
    chosen = vllm_cpu.attend(kit, batch)
    cache = torch.zeros_like(chosen.caches[0][0])
    keys, values = cache.chunk(2, dim=2)
    pages = [(0, 1), (2, 3)]
    new, had = ([kit.random(155, 2, 64) * 20 for _ in pages] for _ in "kv")
    for (first, _), k, v in zip(pages, new, had, strict=True):
        slots = torch.arange(155) + first * vllm_cpu.BLOCK
        isa = _get_attn_isa(kit.dtype, vllm_cpu.BLOCK, 64)
        _custom_ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)
    query = kit.random(10, 4, 64) * 20
    got = chosen.run(query, [cache]).float()
    whole = tuple(torch.stack(kept).float() for kept in (new, had))
    expected = unpaged(query.float(), whole, [[0], [1]], [155, 155], 5)
    assert float((got - expected).abs().max()) < 0.02 * float(expected.abs().max())
    weight, bias, x = kit.random(96, 64), kit.random(96), kit.random(7, 64)
    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert float((vllm_cpu.linear(kit).bind(weight, bias)(x).float() - exact).abs().max()) < 0.02 * exact.abs().max()
