"""What every kernel is built with: torch, the device, the dtype, and a pool of random numbers to read from.

Knows no kernels. What a call reads besides its activations are views of the pool, another part of it each time, so
that it comes from memory as in a model of many layers, and not from the cache where the last call left it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from calibrate.measure.system import installed
from calibrate.measure.timing import Call

SEED = 7
SCALE = 0.05  # of the random numbers: products of a few thousand of them stay near 1, as in a model
BLOCK = 2**22  # random numbers that are drawn; the pool repeats them
ROTATE = 4  # times the last cache that a rotation reads before it comes back
MOST_SETS = 256
ALIGN = 128  # elements between starts of views
COMPILER = "torch.compile"


class NoRoomError(Exception):
    """The random data of a point do not fit the pool."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Calls that do the same on other data, and whose kernel they run. `graph`: whether they are timed in a CUDA graph
    where there is one; `library`: what to do without (a key of `Kit.failed`) if the kernel does not work."""

    calls: list[Call]
    kernel: str
    graph: bool = True
    library: str | None = None


@dataclass(slots=True)
class Pool:
    """Random numbers in one dtype, as long as the largest data that any point reads. Nothing writes to it."""

    data: Any
    cache_elements: int
    _next: int = 0

    def sets(self, *shapes: Sequence[int]) -> list[list[Any]]:
        """Sets of tensors of these shapes, one after the other, until they fill the caches several times."""
        sizes = [_aligned(math.prod(shape)) for shape in shapes]
        total = sum(sizes)
        if total > len(self.data):
            raise NoRoomError
        count = min(ROTATE * self.cache_elements // total + 2, MOST_SETS, len(self.data) // total)
        found = []
        for number in range(count):
            at, tensors = number * total, []
            for shape, size in zip(shapes, sizes, strict=True):
                tensors.append(self.data[at : at + math.prod(shape)].view(*shape))
                at += size
            found.append(tensors)
        return found

    def following(self, *shape: int) -> Any:
        """A tensor behind the last one that this gave, from the start again where the pool ends: a model's weights."""
        size = math.prod(shape)
        if size > len(self.data):
            raise NoRoomError
        if self._next + size > len(self.data):
            self._next = 0
        at, self._next = self._next, self._next + _aligned(size)
        return self.data[at : at + size].view(*shape)


@dataclass(slots=True)
class Kit:
    """The tools: `dtype` of activations and caches and its name `plain`, `weights` what GEMMs multiply in.

    `failed` collects libraries that are installed but do not work here: "vllm attention" -> why.
    """

    torch: Any
    device: Any
    weights: str
    plain: str
    pool_bytes: int
    cache_bytes: int
    failed: dict[str, str] = field(default_factory=dict)
    _pools: dict[Any, Pool] = field(default_factory=dict)
    _fused: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)

    @property
    def dtype(self) -> Any:
        """torch's dtype of activations."""
        return {"fp32": self.torch.float32, "bf16": self.torch.bfloat16}[self.plain]

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return bool(self.device.type == "cuda")

    @property
    def library(self) -> str:
        """The name of torch's own kernels."""
        return f"torch {self.torch.__version__}"

    def pool(self, dtype: Any = None) -> Pool:
        """The pool of a dtype (None: that of activations), made at its first use."""
        dtype = self.dtype if dtype is None else dtype
        if dtype not in self._pools:
            torch = self.torch
            generator = torch.Generator(self.device).manual_seed(SEED)
            block = torch.randn(BLOCK, generator=generator, device=self.device) * SCALE
            data = torch.empty(self.pool_bytes // dtype.itemsize, dtype=dtype, device=self.device)
            for at in range(0, len(data), BLOCK):
                data[at : at + BLOCK] = block[: len(data) - at].to(dtype)
            self._pools[dtype] = Pool(data, self.cache_bytes // dtype.itemsize)
        return self._pools[dtype]

    def random(self, *shape: int) -> Any:
        """Activations: random numbers of their own, which may be written to."""
        return self.torch.randn(*shape, device=self.device).mul_(SCALE).to(self.dtype)

    def whole(self, values: Sequence[int], dtype: Any = None) -> Any:
        """Whole numbers on the device (int32, or another dtype)."""
        return self.torch.tensor(list(values), dtype=dtype or self.torch.int32, device=self.device)

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """An elementwise function as one kernel: compiled on a GPU that has Triton, as serving engines fuse them; as it
        is on a CPU."""
        if not self.cuda or COMPILER in self.failed or not installed("triton"):
            return function
        if function not in self._fused:
            self._fused[function] = self.torch.compile(function, dynamic=True)
        return self._fused[function]


def each(run: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """A call of `run` for every set of its arguments."""
    return [partial(run, *arguments) for arguments in sets]


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
