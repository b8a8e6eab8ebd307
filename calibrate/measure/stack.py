"""A whole model, or one layer of it, as an engine's step runs it: the check of sums of kernels, and execution modes.

Fused qkv and gate_up, grouped attention over caches, norms that add the residual. Weights and caches are views of the
pool of random numbers, which they go round where the model is larger; new keys and values are written beside it.
Attention of prompts and of decodes are two calls. It knows no engine's batching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.measure.attention import attention, naive_attention
from calibrate.measure.kernels import drawn
from calibrate.measure.kit import Kit, Prepared, each
from calibrate.measure.layers import functions, linear, rope_state
from calibrate.measure.wrapped import Attention, Batch, Functions, Rope
from calibrate.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: the weights of its norms, its multiplications as calls, and which of the caches it reads."""

    norm: Any
    qkv: Callable[[Any], Any]
    qk_norm: Any
    o_proj: Callable[[Any], Any]
    norm_2: Any
    gate_up: Callable[[Any], Any]
    down: Callable[[Any], Any]
    number: int


@dataclass(frozen=True, slots=True)
class Work:
    """A step's tokens: prompts first, then decodes. Of each part (tokens, its attention)."""

    tokens: int
    samples: Any
    rope: Rope
    parts: tuple[tuple[int, Attention], ...]


class Stack:
    """`layers` layers of `model` (None: all of them, with embedding and output) for one step's `batch`, (sequences, q,
    context, decodes, kv_tokens) as family `step` has them."""

    def __init__(
        self,
        kit: Kit,
        model: ModelSpec,
        batch: tuple[int, int, int, int, int],
        layers: int | None = None,
        attend: Callable[[Kit, Batch], Attention] | None = None,
    ) -> None:
        self.kit, self.model, self.run, self.linear = kit, model, functions(kit), linear(kit)
        self.whole = layers is None
        self.layers = [self._layer(number) for number in range(model.layers if layers is None else layers)]
        self.work = self._work(batch, attend or (lambda kit, batch: attention(kit, batch)[0]))
        width = 2 * model.kv_heads * model.head_dim
        self.new_cache = kit.random(self.work.tokens, width)
        self.first = kit.random(self.work.tokens, model.hidden)  # of a single layer
        if self.whole:
            self.table = kit.pool().following(model.padded_vocab, model.hidden)
            output = self.table if model.tied_embeddings else kit.pool().following(*self.table.shape)
            self.output = self.linear.bind(output)
            self.last_norm = kit.random(model.hidden)
            generator = kit.torch.Generator(kit.device).manual_seed(1)
            size = (self.work.tokens,)
            self.ids = kit.torch.randint(model.vocab, size, generator=generator, device=kit.device)

    @property
    def kernel(self) -> str:
        """The libraries of its kernels."""
        attention = [part.kernel for _, part in self.work.parts]
        return " + ".join(dict.fromkeys([*attention, self.linear.kernel, self.run.kernel]))

    def step(self) -> Any:
        """The next token of every prompt and decode, or the activations behind a single layer."""
        functional = self.kit.torch.nn.functional
        x = functional.embedding(self.ids, self.table) if self.whole else self.first
        residual = self.kit.torch.zeros_like(x)
        for layer in self.layers:
            x, residual = self._forward(layer, x, residual, self.run)
        if not self.whole:
            return x
        x, _ = self.run.add_norm(x[self.work.samples], residual[self.work.samples], self.last_norm)
        return drawn(self.output(x))

    def _forward(self, layer: Layer, x: Any, residual: Any, run: Functions) -> tuple[Any, Any]:
        model = self.model
        heads = model.heads + model.kv_heads
        x, residual = run.add_norm(x, residual, layer.norm)
        qkv = layer.qkv(x).view(len(x), -1, model.head_dim)
        asked, values = qkv[:, :heads], qkv[:, heads:]  # queries and keys are rotated together
        if layer.qk_norm is not None:
            asked = self.kit.torch.nn.functional.rms_norm(asked, (model.head_dim,), layer.qk_norm, 1e-6)
        asked = run.rope(asked, self.work.rope)
        query, keys = asked[:, : model.heads], asked[:, model.heads :]
        kept = self.new_cache.view(len(x), 2, model.kv_heads, model.head_dim)
        kept[:, 0].copy_(keys)
        kept[:, 1].copy_(values)
        at, attended = 0, []
        for tokens, part in self.work.parts:
            attended.append(part.run(query[at : at + tokens], part.caches[layer.number % len(part.caches)]))
            at += tokens
        out = attended[0] if len(attended) == 1 else self.kit.torch.cat(attended)
        x, residual = run.add_norm(layer.o_proj(out.reshape(len(x), -1)), residual, layer.norm_2)
        return layer.down(run.activate(layer.gate_up(x))), residual

    def _layer(self, number: int) -> Layer:
        model, take, bind = self.model, self.kit.pool().following, self.linear.bind
        query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        return Layer(
            norm=take(model.hidden),
            qkv=bind(take(query + 2 * kv, model.hidden), take(query + 2 * kv) if model.qkv_bias else None),
            qk_norm=take(model.head_dim) if model.qk_norm else None,
            o_proj=bind(take(model.hidden, query)),
            norm_2=take(model.hidden),
            gate_up=bind(take(2 * model.intermediate, model.hidden)),
            down=bind(take(model.hidden, model.intermediate)),
            number=number,
        )

    def _work(self, batch: tuple[int, int, int, int, int], attend: Callable[[Kit, Batch], Attention]) -> Work:
        sequences, q, context, decodes, kv_tokens = batch
        model, kit = self.model, self.kit
        shape = (model.heads, model.kv_heads, model.head_dim)
        parts, positions, samples = [], [], []
        if sequences:
            parts.append((sequences * q, attend(kit, Batch(((sequences, context),), q, *shape))))
            positions += [*range(context, context + q)] * sequences
            samples += [q * (i + 1) - 1 for i in range(sequences)]
        if decodes:
            each = kv_tokens // decodes
            parts.append((decodes, attend(kit, Batch(((decodes, each),), 1, *shape))))
            samples += [sequences * q + i for i in range(decodes)]
            positions += [each] * decodes
        rope = rope_state(kit, positions, model.head_dim)
        return Work(len(positions), kit.whole(samples, kit.torch.int64), rope, tuple(parts))


def step(kit: Kit, sizes: Mapping[str, Any], model: ModelSpec) -> Prepared:
    """A whole step; on a GPU in a graph, without the host's time."""
    stack = Stack(kit, model, _batch(sizes))
    return Prepared([stack.step], stack.kernel)


def mode(kit: Kit, sizes: Mapping[str, Any], model: ModelSpec) -> Prepared:
    """One layer in a mode of execution, or its attention naive and fused."""
    batch, how = _batch(sizes), sizes["mode"]
    if sizes["what"] == "layer":
        stack = Stack(kit, model, batch, layers=1)
        run = kit.torch.compile(stack.step) if how == "compiled" else stack.step
        return Prepared([run], stack.kernel, graph=how != "eager")
    attend = naive_attention if how == "naive" else None
    work = Stack(kit, model, batch, layers=1, attend=attend).work
    query = kit.random(work.tokens, model.heads, model.head_dim)
    (tokens, chosen), *_ = work.parts
    return Prepared(each(chosen.run, [(query[:tokens], cache) for cache in chosen.caches]), chosen.kernel)


def _batch(sizes: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    return sizes["sequences"], sizes["q"], sizes["context"], sizes["decodes"], sizes["kv_tokens"]
