"""Parts that not every transformer has: routed experts, latent attention, windows, recurrent layers. Sizes only;
`model.py` adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calibrate.storage import Storage


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose MLP is a router and `count` gated experts of width `inter`, of which every token runs `topk`.

    `layers` of the model's layers are such; the others have its dense MLP. `shared_inter` is the width of all shared
    experts together (every token runs them), `shared_gate` says that a sigmoid gate scales them. `bias` says that the
    router and the experts add biases, `score_bias` that the router corrects its scores with one fp32 a expert.
    `router_bytes` is the size of one router weight, whatever the model's dtype (0: the model's own).
    """

    count: int
    topk: int
    inter: int
    layers: int
    shared_inter: int = 0
    shared_gate: bool = False
    bias: bool = False
    score_bias: bool = False
    router_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values of all heads are made from one cached latent a token.

    `q_rank` is the width of the queries' own latent (0: they are projected directly), `kv_rank` that of the cached
    latent; a head's key has `nope` elements made from it and `rope` shared ones that are cached beside it, its value
    `value`. DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def key(self) -> int:
        """Elements of one head's query or key."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Elements that one token has in the KV cache of a layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True, slots=True)
class Window:
    """`layers` layers in which a query sees only near tokens: the last `size`, itself included, or, when `chunked`,
    those of its own chunk of `size` tokens."""

    layers: int
    size: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Recurrent:
    """`layers` layers that carry one state a sequence instead of keys and values: Mamba 2, gated delta nets.

    They project a token to `inputs` elements and `inner` ones back, convolve `channels` of them over `kernel` tokens,
    and keep the last `kernel` - 1 of these in the model's dtype beside `state` elements of `state_bytes` bytes
    (`MambaStateShapeCalculator` of vLLM). Tensor parallelism divides all of it.
    """

    layers: int
    inputs: int
    inner: int
    channels: int
    kernel: int
    state: int
    state_bytes: int

    def bytes_on_rank(self, tp: int, dtype_bytes: int) -> int:
        """Bytes of one sequence's state in one layer on one of `tp` ranks."""
        return (self.channels // tp) * (self.kernel - 1) * dtype_bytes + self.state // tp * self.state_bytes


@dataclass(frozen=True, slots=True)
class Quantized:
    """The projections of a `kind` (`model.KINDS`) of `layers` layers are stored as `storage`, not in the model's
    dtype."""

    kind: str
    storage: Storage
    layers: int


@dataclass(frozen=True, slots=True)
class Projection:
    """`count` matrices of the model that are alike on one rank.

    Each is made of `parts` matrices with so many outputs, which the engine multiplies as one, and `k` inputs, and adds
    `bias` elements. `split` says what tensor parallelism divides: outputs, inputs or nothing.
    """

    name: str
    parts: tuple[int, ...]
    k: int
    count: int
    storage: Storage
    bias: int = 0
    split: Literal["outputs", "inputs", ""] = ""

    @property
    def n(self) -> int:
        """Outputs of the matrix."""
        return sum(self.parts)

    @property
    def params(self) -> int:
        """Parameters of all of them."""
        return self.count * (self.n * self.k + self.bias)

    def size(self, bias_bytes: int) -> int:
        """Bytes of all of them with their scales, a bias taking `bias_bytes`."""
        return self.count * (sum(self.storage.size(n, self.k) for n in self.parts) + self.bias * bias_bytes)
