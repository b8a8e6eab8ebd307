"""The kernel calls at which profiles are looked at and compared: shapes of catalogued models at a few telling sizes.

All on one GPU that holds a whole model. It knows what a call must compute and move, and how profiles price it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from calibrate.kernel_times import head_shapes
from calibrate.kernels.chunks import pairs
from calibrate.kernels.elementwise import ELEMENT_BYTES
from calibrate.kernels.gemm import ACTIVATION_BYTES, RATES, WEIGHT_BYTES
from calibrate.kernels.heads import WIDEST, HeadShape
from calibrate.kernels.roofline import from_gpu
from calibrate.kernels.routing import loads
from calibrate.layout import Parallelism
from calibrate.model import KINDS
from calibrate.models import load_model, model_names
from calibrate.operator_spec import Operator
from calibrate.operators import attention_groups, step_operators
from calibrate.profile import SKEW, Profile
from reports.words import size_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Heads = tuple[int, int, int, int, int]  # heads, KV heads, elements of keys and of values, window
    Call = tuple[int, int, int, int, int, int, int]  # two sizes, and heads

BOUNDS = ("flops", "bytes")
ROWS = (1, 16, 256, 4096)
PROMPTS = ((128, 0), (1024, 0), (8192, 0))
CHUNKS = ((512, 2048), (512, 16384), (4096, 4096))
"""(new tokens, cached tokens) of one sequence."""
BATCHES = ((1, 16384), (16, 4096), (128, 2048))
"""(sequences, cached tokens of each)."""
BUFFERS = (2**14, 2**20, 2**26)
GROUPS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Points:
    """Calls of one family that belong together: `of` one dtype or operation.

    `names[i]` says the shape and `sizes[i]` the size, of which `flops[i]` FLOPs and `moved[i]` bytes follow; `peak` and
    `bandwidth` are the datasheet's, per second; `bounds` says to which of them such calls may come close. `price` and
    `measured` ask a profile for all calls at once.
    """

    family: str
    of: str
    names: Sequence[str]
    sizes: Sequence[str]
    flops: Floats
    moved: Floats
    peak: float
    bandwidth: float
    bounds: Sequence[str]
    price: Callable[[Profile], Floats]
    measured: Callable[[Profile], Bools]


def telling_points(profile: Profile) -> list[Points]:
    """All of what the profile has measured."""
    return [points for name, build in _BUILD.items() if name in profile.families for points in build(profile)]


@lru_cache(maxsize=1)
def _operators() -> tuple[tuple[str, Operator], ...]:
    """(model, operator) of every catalogued model."""
    return tuple((name, op) for name in model_names() for op in step_operators(load_model(name), Parallelism(1)))


def gemm_shapes(profile: Profile) -> dict[tuple[int, int], str]:
    """(n, k) of the projections of catalogued models that the profile prices -> the first model that has it, and which
    one it is there."""
    shapes: dict[tuple[int, int], str] = {}
    for model, op in _operators():
        shape = op.shape[0], op.shape[-1]
        if op.family == "gemm" and op.name in (*KINDS, "lm_head") and (profile.only is None or shape in profile.only):
            shapes.setdefault(shape, f"{model} {op.name}")
    return shapes


def expert_layers() -> dict[tuple[tuple[int, ...], str], str]:
    """((hidden, inter, experts, topk), weights) of the expert layers of catalogued models -> the first that has it."""
    layers: dict[tuple[tuple[int, ...], str], str] = {}
    for model, op in _operators():
        if op.family == "moe":
            layers.setdefault((op.shape, op.weights), model)
    return layers


@lru_cache(maxsize=2)
def catalogued_heads(family: str) -> Mapping[Heads, str]:
    """The head shapes of catalogued models, as the kernels of an attention family see them -> the first model that has
    it."""
    shapes: dict[Heads, str] = {}
    for name in model_names():
        for group in attention_groups(load_model(name), Parallelism(1)):
            if not group.chunked:
                shape = head_shapes(group)[family == "decode_attention"]
                sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.window)
                shapes.setdefault(sizes, name)
    return shapes


def gemm_moved(weights: str, m: Floats, n: Floats, k: Floats) -> Floats:
    """Bytes of weights, and of activations in and out."""
    return WEIGHT_BYTES[weights] * n * k + ACTIVATION_BYTES * m * (n + k)


def expert_work(weights: str, tokens: Floats, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of a layer of gated experts whose router is as skewed as profiles assume."""
    hidden, inter, experts, topk = shape
    active, rows = loads(SKEW, tokens, experts, topk, 1)
    matrices = 3.0 * hidden * inter
    return 2.0 * matrices * rows, WEIGHT_BYTES[weights] * matrices * active + 2 * ACTIVATION_BYTES * tokens * hidden


def peak_of(profile: Profile, weights: str) -> float:
    """The datasheet's FLOP/s of a multiplication with such weights."""
    return profile.gpu.flops.get(RATES[weights], profile.gpu.flops["bf16"])


def _gemm(profile: Profile) -> Iterator[Points]:
    shapes = gemm_shapes(profile)
    m, n, k = _columns([(m, *shape) for m in ROWS for shape in shapes])
    names = [f"{name}, n {n:,}, k {k:,}" for _ in ROWS for (n, k), name in shapes.items()]
    sizes = [f"m {m:,}" for m in ROWS for _ in shapes]

    def measured(asked: Profile, weights: str) -> Bools:
        inside: Bools = asked.families["gemm"].inside(weights, m, n, k)
        priced = gemm_shapes(asked)
        return inside & [(a, b) in priced for a, b in zip(n, k, strict=True)]

    def of(weights: str) -> Points:
        return Points(
            "gemm", weights, names, sizes, 2 * m * n * k, gemm_moved(weights, m, n, k),
            peak_of(profile, weights), profile.gpu.bandwidth_bytes_per_s, BOUNDS,
            lambda asked: asked.families["gemm"].seconds(weights, m, n, k),
            lambda asked: measured(asked, weights),
        )  # fmt: skip

    return map(of, profile.families["gemm"].tables if shapes else ())


def _prefill(profile: Profile) -> Iterator[Points]:
    for dtype, calls, names in _head_calls(profile, "prefill_attention", PROMPTS):
        yield _prompts(profile, dtype, calls, names, f"{dtype} KV", BOUNDS[:1])
    for dtype, calls, names in _head_calls(profile, "prefill_attention", CHUNKS):
        yield _prompts(profile, dtype, calls, names, f"{dtype} KV, after cached", ())  # derived, not measured


def _prompts(
    profile: Profile, dtype: str, calls: Sequence[Call], names: Sequence[str], of: str, bounds: Sequence[str]
) -> Points:
    q, context, *heads = _columns(calls)
    shapes = [HeadShape(dtype, *call[2:]) for call in calls]
    met = np.array([float(pairs(a, c, shape.window)) for a, c, shape in zip(q, context, shapes, strict=True)])
    seen = q + [min(c, shape.window or c) for c, shape in zip(context, shapes, strict=True)]
    kv, query, flops = _per_token(shapes)
    return Points(
        "prefill_attention", of, names, [f"{a:,} tokens" + (f" after {b:,}" if b else "") for a, b, *_ in calls],
        met * flops, seen * kv + q * query, shapes[0].peak(from_gpu(profile.gpu)), profile.gpu.bandwidth_bytes_per_s,
        bounds,
        lambda asked: asked.families["prefill_attention"].seconds(dtype, 1, q, context, *heads),
        lambda asked: asked.families["prefill_attention"].inside(dtype, 1, q, *heads),
    )  # fmt: skip


def _decode(profile: Profile) -> Iterator[Points]:
    for dtype, calls, names in _head_calls(profile, "decode_attention", BATCHES):
        yield _batches(profile, dtype, calls, names)


def _batches(profile: Profile, dtype: str, calls: Sequence[Call], names: Sequence[str]) -> Points:
    number, context, *heads = _columns(calls)
    shapes = [HeadShape(dtype, *call[2:]) for call in calls]
    seen = np.array([min(c + 1, shape.window or np.inf) for c, shape in zip(context, shapes, strict=True)])
    kv, query, flops = _per_token(shapes)
    return Points(
        "decode_attention", f"{dtype} KV", names, [f"{a:,} x {b:,} tokens" for a, b, *_ in calls],
        number * seen * flops, number * (seen * kv + query),
        shapes[0].peak(from_gpu(profile.gpu)), profile.gpu.bandwidth_bytes_per_s, BOUNDS[1:],
        lambda asked: asked.families["decode_attention"].seconds(dtype, number, context, *heads),
        lambda asked: asked.families["decode_attention"].inside(dtype, number, context, *heads),
    )  # fmt: skip


def _head_calls(
    profile: Profile, family: str, sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, list[Call], list[str]]]:
    """(KV dtype, calls, their names) of the measured kinds."""
    kinds = profile.families[family].kinds
    for dtype in dict.fromkeys(kind.split("/")[0] for kind in kinds):
        shapes = {s: name for s, name in catalogued_heads(family).items() if HeadShape(dtype, *s).kind in kinds}
        if shapes:
            calls = [(*size, *shape) for size in sizes for shape in shapes]
            names = [f"{name}, {heads_text(*shape)}" for shape, name in shapes.items()] * len(sizes)
            yield dtype, calls, names


def _columns(calls: Sequence[tuple[int, ...]]) -> list[Floats]:
    return list(np.array(calls, np.float64).T)


def _per_token(shapes: Sequence[HeadShape]) -> tuple[Floats, Floats, Floats]:
    """Bytes of a cached token and of a query, FLOPs of a pair."""
    kv, query, flops = (
        np.array([getattr(shape, name) for shape in shapes])
        for name in ("kv_token_bytes", "query_token_bytes", "pair_flops")
    )
    return kv, query, flops


def heads_text(heads: int, kv_heads: int, head_dim: int, value_dim: int, window: int) -> str:
    """A head shape for people."""
    kv = f"{kv_heads} KV head{'s' * (kv_heads > 1)} of {head_dim}" if head_dim <= WIDEST else f"latents of {head_dim}"
    return f"{heads} heads, {kv}" + (f", window {window:,}" if window else "")


def _moe(profile: Profile) -> Iterator[Points]:
    shapes: dict[tuple[int, ...], str] = {}
    for (shape, _), name in expert_layers().items():
        shapes.setdefault(shape, name)
    tokens = np.array(ROWS, np.float64)
    names = [f"{name}, {s[2]} experts of {s[0]:,} x {s[1]:,}, top {s[3]}" for s, name in shapes.items() for _ in ROWS]
    sizes = [f"{t:,} token{'s' * (t > 1)}" for _ in shapes for t in ROWS]
    join = np.concatenate

    def of(weights: str) -> Points:
        work = [expert_work(weights, tokens, shape) for shape in shapes]
        flops, moved = (np.concatenate(side) for side in zip(*work, strict=True))
        return Points(
            "moe", weights, names, sizes, flops, moved, peak_of(profile, weights), profile.gpu.bandwidth_bytes_per_s,
            BOUNDS,
            lambda asked: join([asked.families["moe"].seconds(weights, tokens, *s, skew=SKEW) for s in shapes]),
            lambda asked: join([asked.families["moe"].inside(weights, tokens, *s) for s in shapes]),
        )  # fmt: skip

    return map(of, dict.fromkeys(variant.weights for variant in profile.families["moe"].variants))


def _elementwise(profile: Profile) -> Iterator[Points]:
    widths: dict[str, dict[int, str]] = {}
    for model, op in _operators():
        if op.family == "elementwise":
            widths.setdefault(op.name, {}).setdefault(op.shape[0], model)

    def of(name: str) -> Points:
        calls = [(rows, width) for rows in ROWS for width in widths[name]]
        rows, elements = _columns(calls)
        return Points(
            "elementwise", name, [f"{widths[name][w]}, {w:,} elements a row" for _, w in calls],
            [f"{r:,} row{'s' * (r > 1)}" for r, _ in calls], np.zeros(len(calls)), ELEMENT_BYTES * rows * elements,
            1.0, profile.gpu.bandwidth_bytes_per_s, BOUNDS[1:],
            lambda asked: asked.families["elementwise"].seconds(name, rows, elements),
            lambda asked: asked.families["elementwise"].inside(name, rows, elements),
        )  # fmt: skip

    return map(of, dict.fromkeys(op for op, _ in profile.families["elementwise"].curves if op in widths))


def _collective(profile: Profile) -> Iterator[Points]:
    if not has_allreduce(profile):
        return
    calls = [(buffer, gpus) for buffer in BUFFERS for gpus in GROUPS]

    def measured(asked: Profile) -> Bools:
        model = asked.families["collective"]
        return np.array([bool(model.inside("all_reduce", model.allreduce_backend(g), g, b)) for b, g in calls])

    yield Points(
        "collective", "all_reduce", [f"{gpus} GPUs" for _, gpus in calls], [size_text(b) for b, _ in calls],
        np.zeros(len(calls)), np.array([ring_bytes(b, g) for b, g in calls]),
        1.0, profile.gpu.link.bandwidth_bytes_per_s, BOUNDS[1:],
        lambda asked: np.concatenate([asked.families["collective"].allreduce_seconds([b], g) for b, g in calls]),
        measured,
    )  # fmt: skip


def has_allreduce(profile: Profile) -> bool:
    """Whether an all-reduce was measured."""
    return "collective" in profile.families and any(
        op == "all_reduce" for op, _, _ in profile.families["collective"].curves
    )


def ring_bytes(buffer: float, gpus: int) -> float:
    """Bytes that a GPU sends when a ring reduces a buffer: what bus bandwidth counts."""
    return 2 * (gpus - 1) / gpus * buffer


_BUILD: Mapping[str, Callable[[Profile], Iterator[Points]]] = {
    "gemm": _gemm,
    "prefill_attention": _prefill,
    "decode_attention": _decode,
    "moe": _moe,
    "elementwise": _elementwise,
    "collective": _collective,
}
