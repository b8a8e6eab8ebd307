"""What a dense decoder-only transformer is made of: its sizes, and what they weigh in parameters and KV cache.

Knows how the sizes shard under tensor parallelism, nothing of time: `operators.py` lists the work, `cost.py` prices
it. `models.py` finds one by name or path.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
VOCAB_PADDING = 64  # vLLM pads the vocabulary of embedding and output weights to a multiple of this


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a dense MHA/GQA/MQA transformer with RMS norms and rotary positions. All counts are whole-model.

    `dtype` is the weights' (bf16, fp16, fp32), and the KV cache's too. `max_position` is the longest sequence the
    config allows, in tokens. `qkv_bias`, `o_bias`, `mlp_bias` say which projections add a bias, `qk_norm` that
    queries and keys are normalised per head, `gated_mlp` that the MLP has a gate beside its up projection.
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
    qk_norm: bool = False

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight, activation or KV element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and output weights as vLLM allocates them."""
        return -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def params(self) -> int:
        """The exact parameter count: embeddings (once when tied), norms and biases included."""
        return self._params(tp=1, vocab=self.vocab)

    def heads_per_rank(self, tp: int) -> int:
        """Query heads on one of `tp` GPUs."""
        return self.heads // tp

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads on one of `tp` GPUs: replicated when there are more GPUs than KV heads."""
        return max(1, self.kv_heads // tp)

    def weight_bytes(self, tp: int) -> int:
        """Bytes of weights on one of `tp` GPUs: projections and (padded) vocabulary sharded, norms replicated."""
        return self._params(tp, self.padded_vocab) * self.dtype_bytes

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV cache bytes of one token on one of `tp` GPUs: 2 (K and V) x layers x KV heads x head_dim x dtype."""
        return 2 * self.layers * self.kv_heads_per_rank(tp) * self.head_dim * self.dtype_bytes

    def _params(self, tp: int, vocab: int) -> int:
        q = self.heads_per_rank(tp) * self.head_dim
        qkv = q + 2 * self.kv_heads_per_rank(tp) * self.head_dim
        inner = self.intermediate // tp
        ups = 2 if self.gated_mlp else 1
        layer = self.hidden * (qkv + q + (ups + 1) * inner) + 2 * self.hidden
        layer += qkv * self.qkv_bias + self.hidden * self.o_bias
        layer += (ups * inner + self.hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        embeddings = (1 if self.tied_embeddings else 2) * (vocab // tp) * self.hidden
        return self.layers * layer + embeddings + self.hidden
