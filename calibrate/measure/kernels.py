"""Single kernels as calls to be timed: multiplications, elementwise ones, the device's rates, the host's costs.

One function a family; it takes the point's sizes and gives `Prepared`. It knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from calibrate.measure.kit import Kit, Prepared, each
from calibrate.measure.layers import functions, linear, rope_state
from calibrate.measure.timing import Call
from calibrate.operators import SAMPLING_PASSES
from servecast.errors import ServecastError

Sizes = Mapping[str, Any]

VOCABULARY = 32768  # rows of the embedding that is looked up: any that do not fit a cache
TINY_CALLS = 200  # launches in a row, so that the device is never waited for


def gemm(kit: Kit, sizes: Sizes) -> Prepared:
    """y[m, n] = x[m, k] W with the weights from memory and x where the kernel before left it."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    if sizes["weights"] == "fp8":
        return _gemm_fp8(kit, m, n, k)
    if sizes["weights"] == "fp8_block":
        return _gemm_fp8_block(kit, m, n, k)
    run, x = linear(kit), kit.random(m, k)
    calls: list[Call] = [partial(run.bind(weight), x) for (weight,) in kit.pool().sets((n, k))]
    return Prepared(calls, run.kernel, library=run.library)


def _gemm_fp8(kit: Kit, m: int, n: int, k: int) -> Prepared:
    """torch._scaled_mm with one scale a tensor; x is in fp8 already."""
    torch = kit.torch
    one = torch.ones((), device=kit.device)
    x = kit.random(m, k).to(torch.float8_e4m3fn)

    def multiply(w: Any) -> Any:
        return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=kit.dtype)

    return Prepared(each(multiply, kit.pool(torch.float8_e4m3fn).sets((n, k))), kit.library)


def _gemm_fp8_block(kit: Kit, m: int, n: int, k: int) -> Prepared:
    """deep_gemm.fp8_gemm_nt: one scale a token and 128 of k, and a 128x128 block of W; x is in fp8 already."""
    import deep_gemm

    torch = kit.torch
    blocks = -(-k // 128)
    x = kit.random(m, k).to(torch.float8_e4m3fn), torch.ones(m, blocks, device=kit.device)
    scale, out = torch.ones(-(-n // 128), blocks, device=kit.device), kit.random(m, n)
    sets = kit.pool(torch.float8_e4m3fn).sets((n, k))
    name = f"deep_gemm {getattr(deep_gemm, '__version__', '')}".strip()
    return Prepared(each(lambda w: deep_gemm.fp8_gemm_nt(x, (w, scale), out), sets), name)


def elementwise(kit: Kit, sizes: Sizes) -> Prepared:
    """An op of `operators.py` (and kv_cache, qk_norm, greedy) on activations that are where they were left."""
    op, rows, elements = sizes["op"], sizes["rows"], sizes["elements"]
    if op in ("sampling", "greedy"):
        return _sampling(kit, op, rows, elements)
    if op == "embedding":
        return _embedding(kit, rows, elements // 2)
    run = functions(kit)
    if op in ("norms", "final_norm"):
        x, residual, weight = (
            kit.random(rows, elements // 4),
            kit.random(rows, elements // 4),
            kit.random(elements // 4),
        )
        return Prepared([lambda: run.add_norm(x, residual, weight)], run.kernel, library=run.library)
    if op == "activation":
        x = kit.random(rows, elements // 3 * 2)
        return Prepared([lambda: run.activate(x)], run.kernel, library=run.library)
    if op == "kv_cache":
        new, kept = kit.random(rows, elements // 2), kit.random(rows, elements // 2)
        return Prepared([lambda: kept.copy_(new)], kit.library)
    dim = next(dim for dim in (128, 64, 2) if elements // 2 % dim == 0)
    heads = kit.random(rows, elements // 2 // dim, dim)
    if op == "rope":
        state = rope_state(kit, list(range(rows)), dim)
        return Prepared([lambda: run.rope(heads, state)], run.kernel, library=run.library)
    if op == "qk_norm":
        weight, norm = kit.random(dim), kit.fused(kit.torch.nn.functional.rms_norm)
        return Prepared([lambda: norm(heads, (dim,), weight, 1e-6)], kit.library)
    raise ServecastError(f"elementwise: no kernel for op {op!r}")


def _embedding(kit: Kit, rows: int, hidden: int) -> Prepared:
    torch = kit.torch
    words = min(VOCABULARY, len(kit.pool().data) // hidden)
    table = kit.pool().sets((words, hidden))[0][0]
    ids = [[torch.randint(words, (rows,), device=kit.device)] for _ in range(16)]
    return Prepared(each(lambda i: torch.nn.functional.embedding(i, table), ids), kit.library)


def _sampling(kit: Kit, op: str, rows: int, elements: int) -> Prepared:
    logits = kit.random(rows, elements if op == "greedy" else elements // SAMPLING_PASSES)
    chosen: Callable[[Any], Any] = greedy if op == "greedy" else drawn
    return Prepared([lambda: chosen(logits)], kit.library)


def greedy(logits: Any) -> Any:
    """The likeliest token of every row, in fp32 as engines do it."""
    return logits.float().argmax(dim=-1)


def drawn(logits: Any) -> Any:
    """A token of every row drawn by softmax, without a synchronisation: the largest of p / Exp(1)."""
    chances = logits.float().softmax(dim=-1)
    return chances.div_(chances.new_empty(chances.shape).exponential_()).argmax(dim=-1)


def rate(kit: Kit, sizes: Sizes) -> Prepared:
    """The device at its best: a square multiplication, a sum over memory, a copy within it or from and to the host."""
    torch, op, work = kit.torch, sizes["op"], sizes["work"]
    if op == "matmul":
        n = round((work / 2) ** (1 / 3))
        return gemm(kit, {"weights": sizes["weights"], "m": n, "n": n, "k": n})
    item = kit.dtype.itemsize
    if op == "read":
        return Prepared(each(lambda x: x.sum(), kit.pool().sets((work // item,))), kit.library)
    if op == "copy":
        sources = kit.pool().sets((work // 2 // item,))
        there = torch.empty(work // 2 // item, dtype=kit.dtype, device=kit.device)
        return Prepared(each(lambda x: there.copy_(x), sources), kit.library)
    near = torch.empty(work, dtype=torch.uint8, device=kit.device)
    far = torch.zeros(work, dtype=torch.uint8, pin_memory=True)
    give, take = (far, near) if op == "to_device" else (near, far)
    return Prepared([lambda: take.copy_(give, non_blocking=True)], f"{kit.library}, pinned memory", graph=False)


def host(kit: Kit, sizes: Sizes) -> tuple[list[Call], int]:
    """(calls to be timed by the host's clock, what to divide their time by).

    launch_eager: the host's time of one small kernel. launch_graph: of one node of a graph, on the device.
    graph_replay: the host's time to start a graph. sync: to wait for a device that is idle. ids_to_host: to copy
    `sequences` token ids and wait for them; ids_to_device: to send them.
    """
    torch, what, sequences = kit.torch, sizes["what"], sizes["sequences"]
    small = torch.zeros(1, device=kit.device)
    if what == "launch_eager":
        return [lambda: _many(lambda: small.add_(1))], TINY_CALLS
    cuda = torch.cuda
    if what == "sync":
        return [cuda.synchronize], 1
    if what in ("launch_graph", "graph_replay"):
        nodes, graph = TINY_CALLS if what == "launch_graph" else 1, cuda.CUDAGraph()
        small.add_(1)
        cuda.synchronize()
        with cuda.graph(graph):
            for _ in range(nodes):
                small.add_(1)
        if what == "graph_replay":
            return [lambda: _many(graph.replay)], TINY_CALLS

        def replay() -> None:
            graph.replay()
            cuda.synchronize()

        return [replay], TINY_CALLS
    near = torch.zeros(sequences, dtype=torch.int64, device=kit.device)
    far = torch.zeros(sequences, dtype=torch.int64, pin_memory=True)
    give, take = (near, far) if what == "ids_to_host" else (far, near)

    def copy() -> None:
        take.copy_(give, non_blocking=True)
        cuda.current_stream().synchronize()

    return [copy], 1


def _many(call: Call) -> None:
    for _ in range(TINY_CALLS):
        call()
