"""What a decoder-only transformer is made of: its sizes, and what they weigh in parameters, bytes and KV cache.

Knows how the sizes shard under tensor parallelism, nothing of time: `operators.py` lists the work, `cost.py` prices
it. `models.py` finds one by name or path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calibrate.parts import Experts, Latent, Projection, Quantized, Recurrent, Window
from calibrate.storage import KV_FORMATS, PLAIN, Storage

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
VOCAB_PADDING = 64  # vLLM pads the vocabulary of embedding and output weights to a multiple of this
KINDS = ("qkv", "qkv_a", "q_b", "kv_b", "o_proj", "gate_up", "down", "experts", "shared_gate_up", "shared_down",
         "recurrent_in", "recurrent_out")  # fmt: skip
"""Kinds of projections that may be quantised; embedding, output weights, norms and routers never are."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a transformer with RMS norms and rotary positions. All counts are whole-model.

    `dtype` is that of activations and unquantised weights (bf16, fp16, fp32); `quantized` says what is stored
    otherwise, `method` how the checkpoint calls that; `kv_dtype` is the KV cache's where it is not `dtype` (fp8).
    `max_position` is the longest sequence the config allows, in tokens. `qkv_bias`, `o_bias`, `mlp_bias` say which
    projections add a bias. `qk_norm`: queries and keys are normalised per head ("head"), over all heads ("all") or
    per head without weights ("plain"). `gated_mlp`: the dense MLP has a gate beside its up projection. `norms` of
    hidden size has a layer. `sinks`: attention has a learned logit a head. `attn_gate`: queries are projected with a
    gate of the same width. `experts`, `latent`, `windows` and `recurrent` are for models that have them: layers that
    neither a window nor `recurrent` names attend to everything. `left_out` names what the description lacks.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    dtype: str
    tied_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all", "plain"] = ""
    norms: int = 2
    sinks: bool = False
    attn_gate: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    windows: tuple[Window, ...] = ()
    recurrent: Recurrent | None = None
    quantized: tuple[Quantized, ...] = ()
    method: str = ""
    left_out: str = ""
    kv_dtype: str = ""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one activation or unquantised weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def plain(self) -> Storage:
        """How unquantised weights are stored."""
        return PLAIN[self.dtype]

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and output weights as vLLM allocates them."""
        return -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers - (self.recurrent.layers if self.recurrent else 0)

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def params(self) -> int:
        """The exact parameter count: embeddings (once when tied), norms and biases included, scales not."""
        return sum(p.params for p in self.projections(1)) + self.vectors(1) + self.score_biases + self.tables(1)

    @property
    def active_params(self) -> int:
        """Parameters without the experts that a token does not choose; embeddings are counted."""
        routed = sum(p.params for p in self.projections(1) if p.name in ("experts_up", "experts_down"))
        return self.params - (routed - routed * self.experts.topk // self.experts.count if self.experts else 0)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all weights and scales as a checkpoint stores them."""
        stored = sum(projection.size(self.dtype_bytes) for projection in self.projections(1))
        return stored + (self.vectors(1) + self.tables(1)) * self.dtype_bytes + 4 * self.score_biases

    def heads_per_rank(self, tp: int) -> int:
        """Query heads on one of `tp` GPUs."""
        return self.heads // tp

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on one of `tp` GPUs: replicated when there are more GPUs than KV heads."""
        return max(1, self.kv_heads // tp)

    def kv_layer_bytes(self, tp: int) -> int:
        """KV cache bytes of one token in one attention layer on one of `tp` GPUs: 2 (K and V) x KV heads x head_dim x
        dtype; of latent attention cached elements x dtype, on every GPU."""
        size = KV_FORMATS[self.kv_dtype or self.dtype]
        return size(self.latent.cached) if self.latent else 2 * self.kv_heads_per_rank(tp) * size(self.head_dim)

    def kv_bytes_per_token(self, tp: int) -> int:
        """The same in all layers. Windows do not make it less."""
        return self.attention_layers * self.kv_layer_bytes(tp)

    def projections(self, tp: int) -> tuple[Projection, ...]:
        """Every matrix of the layers as one of `tp` GPUs holds it, in the order in which a layer multiplies them."""
        found: list[Projection] = []

        def add(
            name: str,
            parts: tuple[int, ...],
            k: int,
            layers: int = self.attention_layers,
            split: Literal["outputs", "inputs", ""] = "",
            bias: bool = False,
            kind: str = "",
            copies: int = 1,
        ) -> None:
            for storage, alike in self._storages(kind or name, layers):
                found.append(Projection(name, parts, k, alike * copies, storage, sum(parts) * bias, split))

        heads = self.heads_per_rank(tp)
        if latent := self.latent:
            add("qkv_a", (latent.q_rank, latent.cached) if latent.q_rank else (latent.cached,), self.hidden)
            add("q_b", (heads * latent.key,), latent.q_rank or self.hidden, split="outputs")
            add("kv_b", (heads * (latent.nope + latent.value),), latent.kv_rank, split="outputs")
            add("o_proj", (self.hidden,), heads * latent.value, split="inputs", bias=self.o_bias)
        else:
            q, kv = heads * self.head_dim, self.kv_heads_per_rank(tp) * self.head_dim
            add("qkv", (q + q * self.attn_gate, kv, kv), self.hidden, split="outputs", bias=self.qkv_bias)
            add("o_proj", (self.hidden,), q, split="inputs", bias=self.o_bias)
        if recurrent := self.recurrent:
            add("recurrent_in", (recurrent.inputs // tp,), self.hidden, recurrent.layers, "outputs")
            add("recurrent_out", (self.hidden,), recurrent.inner // tp, recurrent.layers, "inputs")
        if dense := self.dense_layers:
            inner, ups = self.intermediate // tp, 2 if self.gated_mlp else 1
            add("gate_up", (inner,) * ups, self.hidden, dense, "outputs", bias=self.mlp_bias)
            add("down", (self.hidden,), inner, dense, "inputs", bias=self.mlp_bias)
        if experts := self.experts:
            wide = experts.router_bytes == DTYPE_BYTES["fp32"]
            router = Storage("fp32" if wide else "bf16", 8 * (experts.router_bytes or self.dtype_bytes))
            found.append(
                Projection(
                    "router", (experts.count,), self.hidden, experts.layers, router, experts.count * experts.bias
                )
            )
            inner, bias, copies = experts.inter // tp, experts.bias, experts.count
            add("experts_up", (inner, inner), self.hidden, experts.layers, "outputs", bias, "experts", copies)
            add("experts_down", (self.hidden,), inner, experts.layers, "inputs", bias, "experts", copies)
            if shared := experts.shared_inter // tp:
                add("shared_gate_up", (shared, shared), self.hidden, experts.layers, "outputs")
                add("shared_down", (self.hidden,), shared, experts.layers, "inputs")
            if experts.shared_gate:
                add("shared_gate", (1,), self.hidden, experts.layers)
        return tuple(found)

    def _storages(self, kind: str, layers: int) -> list[tuple[Storage, int]]:
        """(how, in how many layers) the projections of a kind are stored, of the `layers` that have it."""
        found = [(q.storage, q.layers) for q in self.quantized if q.kind == kind]
        left = layers - sum(count for _, count in found)
        return found + ([(self.plain, left)] if left else [])

    @property
    def score_biases(self) -> int:
        """Elements of the routers' corrections."""
        return self.experts.layers * self.experts.count if self.experts and self.experts.score_bias else 0

    def vectors(self, tp: int) -> int:
        """Elements of norms and attention sinks on a rank."""
        q, kv = self.heads_per_rank(tp) * self.head_dim, self.kv_heads_per_rank(tp) * self.head_dim
        attention = {"head": 2 * self.head_dim, "all": q + kv}.get(self.qk_norm, 0)
        attention += self.heads_per_rank(tp) * self.sinks
        attention += self.latent.q_rank + self.latent.kv_rank if self.latent else 0
        recurrent = self.recurrent
        convolved = recurrent.layers * recurrent.channels // tp * recurrent.kernel if recurrent else 0
        return self.layers * self.norms * self.hidden + self.attention_layers * attention + convolved + self.hidden

    def tables(self, tp: int) -> int:
        """Elements of embedding and output weights on a rank, without the padding of the vocabulary."""
        return (1 if self.tied_embeddings else 2) * (self.vocab // tp) * self.hidden
