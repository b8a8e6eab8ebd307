"""What the engine's profiling run needs beside the weights: the peak of one forward pass of `max_num_batched_tokens`
tokens and of sampling `max_num_seqs` tokens afterwards, on one GPU (`profile_run` and `_dummy_sampler_run` of
vllm/v1/worker/gpu_model_runner.py).

The two are not there at the same time: the larger one counts. Checked against start-up logs: docs/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import family

FEW_ROWS = 128  # PyTorch sorts fewer rows than this all at once
SORT_BYTES, FEW_SORT_BYTES = 36, 48
"""Bytes that sorting (for top-p) takes for every logit beside the logit: its fp32 copy 4, sorted values and int64
indices 12, indices to begin with 8, and the radix sort's second set of keys and indices 12; few rows are sorted twice,
by pairs of indices (aten/src/ATen/native/cuda/SortStable.cu of PyTorch)."""
SAMPLERS = {"sort": SORT_BYTES, "triton": 12, "gumbel": 0}
"""How a preset's profiling run samples -> bytes a logit beside the logit: "triton" filters the fp32 copy in place and
makes probabilities and noise (`apply_top_k_top_p_triton`), "gumbel" samples what it is given (vllm/v1/worker/gpu)."""

PLAIN = {"sampler": "triton", "keeps_workspaces": False, "chunk_tokens": None}
"""Of engines of which nobody said how much they need: assumed."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of one GPU: of the `forward` pass, and of `sampling` with what is still there of the pass."""

    forward: int
    sampling: int

    @property
    def total(self) -> int:
        """What the profiling run finds: the larger."""
        return max(self.forward, self.sampling)


def profile_peaks(model: ModelSpec, layout: Parallelism, engine: EngineSpec, stage: int = 0) -> Peaks:
    """The peaks on one GPU of pipeline stage `stage`, of which the last one samples."""
    preset = family(engine.engine)["presets"][engine.preset].get("profile_run", PLAIN)
    tokens = engine.max_num_batched_tokens
    workspace = _workspace_bytes(model, layout, min(tokens * layout.dp, preset["chunk_tokens"] or tokens * layout.dp))
    widest = model.intermediate // layout.tp if model.dense_layers else 0
    if model.experts:
        widest = max(widest, model.experts.shared_inter // layout.tp)
    hidden = model.hidden * model.dtype_bytes
    forward = 3 * (widest * model.dtype_bytes + hidden) * tokens
    if model.experts:
        forward = max(forward, workspace + 3 * hidden * tokens)
    if latent := model.latent:
        keys = model.heads_per_rank(layout.tp) * (latent.nope + latent.value)
        forward = max(forward, context_tokens(engine) * keys * model.dtype_bytes)
    if stage < layout.pp - 1:
        return Peaks(forward, 0)
    left = hidden * (tokens + engine.max_num_seqs) + (workspace if preset["keeps_workspaces"] else 0)
    return Peaks(forward, left + _sampling_bytes(model, layout, engine.max_num_seqs, preset["sampler"]))


def _workspace_bytes(model: ModelSpec, layout: Parallelism, tokens: int) -> int:
    """The two workspaces of the fused experts, as wide as their widest tensors, `topk` times a token
    (`workspace_shapes` of vLLM's fused experts)."""
    if not (experts := model.experts):
        return 0
    inner = experts.inter // layout.expert_tp
    return experts.topk * (max(inner, model.hidden) + max(2 * inner, model.hidden)) * tokens * model.dtype_bytes


def _sampling_bytes(model: ModelSpec, layout: Parallelism, sequences: int, sampler: str) -> int:
    """Logits, which every GPU has in whole, and what is made of them. Gathering them takes a second copy."""
    beside = FEW_SORT_BYTES if sampler == "sort" and sequences < FEW_ROWS else SAMPLERS[sampler]
    gathered = model.dtype_bytes if layout.tp > 1 else 0
    return sequences * model.padded_vocab * (model.dtype_bytes + max(beside, gathered))


def context_tokens(engine: EngineSpec) -> int:
    """Cached tokens whose keys and values latent attention makes at a time
    (`determine_chunked_prefill_workspace_size` of vLLM)."""
    pages = engine.max_num_seqs * engine.block_size
    return max(min(max(8 * engine.max_model_len, 4 * pages), 64 * 1024), pages)
