"""What an engine drafts with: the model that does it, as one more model whose kernels and memory are known.

A draft layer of the target's own (multi-token prediction), or a head trained for it (EAGLE), is one layer of the
target's sizes with a projection before it, which puts hidden states and embeddings together. It shares the target's
embeddings, and its output weights too, but those of EAGLE-3, which has a vocabulary of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from calibrate.engine import EngineSpec
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism, check_layout
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.weights import rank_weights
from servecast.errors import ServecastError

EAGLE3_VOCAB = 32_000
"""Tokens that EAGLE-3 heads draft from, taken of all: `draft_vocab_size` of the heads published by the authors
(github.com/SafeAILab/EAGLE) for Llama 3.1 and 3.3."""
KEY = "engine.speculative_config"


@dataclass(frozen=True, slots=True)
class Draft:
    """`model` drafts. `fused`: vectors of the hidden size that a projection before it puts together (0: it has none).
    `shares`: tables that are the target's. `beside`: they are hidden states of the target, put together once a step,
    and the layer reads embeddings beside them in every pass (EAGLE-3: vllm/model_executor/models/llama_eagle3.py)."""

    model: ModelSpec
    fused: int
    shares: Literal["", "embeddings", "all"]
    beside: bool = False

    def outputs_beside(self, tp: int) -> int:
        """What embeddings beside the hidden states are multiplied to, on one of `tp` GPUs."""
        return sum(p.n for p in self.model.projections(tp) if p.name.startswith("qkv")) if self.beside else 0

    def weight_bytes(self, layout: Parallelism) -> int:
        """On one GPU."""
        weights = rank_weights(self.model, layout)
        shared = {"": (), "embeddings": ("embeddings",), "all": ("embeddings", "output weights")}[self.shares]
        inputs = self.fused * self.model.hidden + self.outputs_beside(layout.tp)
        fusing = inputs * self.model.hidden * self.model.dtype_bytes
        return sum(size for name, size in weights.items() if name not in shared) + fusing


def draft_of(model: ModelSpec, engine: EngineSpec) -> Draft | None:
    """What drafts for a served model; None where no model does. Raises ServecastError where it is not known."""
    how = engine.speculation
    if how is None or how.method == "ngram":
        return None
    if how.method == "mtp":
        return Draft(_one_layer(model, f"{model.name}'s draft layer"), 2, "all")
    named = None if how.model is None else _named(how.model, model)
    if how.method == "draft_model":
        assert named is not None, "the engine's start-up check"
        if named.vocab != model.vocab:
            raise ServecastError(
                f"{KEY}.model: {named.name} has {named.vocab:,} tokens in its vocabulary and {model.name} has "
                f"{model.vocab:,}; vLLM takes draft models with the same"
            )
        return Draft(named, 0, "")
    if named is None and (model.experts or model.latent):
        raise ServecastError(
            f"{KEY}.model: an EAGLE head for {model.name} has sizes of its own; give its config.json (a path)"
        )
    head = _one_layer(named or replace(model, quantized=()), f"an EAGLE head of {model.name}")  # heads are 16 bit
    if how.method == "eagle3":
        vocab = min(EAGLE3_VOCAB, head.vocab)
        return Draft(replace(head, vocab=vocab, tied_embeddings=False), 3, "embeddings", beside=True)
    return Draft(head, 2, "all")


def check_draft(draft: Draft, layout: Parallelism, gpu: Gpu) -> list[str]:
    """Why these GPUs cannot hold what drafts."""
    return [f"{KEY}: {draft.model.name}: {problem}" for problem in check_layout(draft.model, layout, gpu)]


def _named(word: str, target: ModelSpec) -> ModelSpec:
    try:
        model = load_model(word)
    except ServecastError as error:
        raise ServecastError(*(f"{KEY}.model: {p.removeprefix('model: ')}" for p in error.problems)) from None
    if model.windows or model.recurrent:
        raise ServecastError(
            f"{KEY}.model: {model.name} has layers with windows or states, which are not modelled here"
        )
    return replace(model, dtype=target.dtype, kv_dtype=target.kv_dtype)


def _one_layer(model: ModelSpec, name: str) -> ModelSpec:
    """The last layer alone."""
    experts = None if model.experts is None else replace(model.experts, layers=1)
    kinds = {p.name for p in replace(model, layers=1, experts=experts, quantized=()).projections(1)}
    kinds |= {"experts"} if experts else set()
    quantized = tuple(replace(q, layers=1) for q in model.quantized if q.kind in kinds)
    return replace(model, name=name, layers=1, experts=experts, quantized=quantized, left_out="")
