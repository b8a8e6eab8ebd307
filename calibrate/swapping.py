"""What it takes to preempt by swapping, as vLLM 0.6 does: room in the memory of the host, and time on the way there.

A block is copied piece by piece, the keys and the values of each layer by a `cudaMemcpyAsync` of their own
(`swap_blocks` in csrc/cache_kernels.cu, called for every layer by worker/cache_engine.py), before the step's kernels,
on their stream. The GPUs of a group copy at once, each its own part. Pinned memory; links that GPUs share with each
other are not modelled.
"""

from __future__ import annotations

from calibrate.engine import EngineSpec
from calibrate.hardware import GIB, Gpu
from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec

COPY_S = 5.0e-6
"""Seconds of a copy besides its bytes. Published: 5 to 7 us (DualPath, arXiv 2602.21548, section 5.2) and 2.3 us on an
H20 (taco-project/FlexKV#193). Copies of 32 KiB, those of Llama-3.1-8B, then reach 5.2 GB/s on an A100; vLLM's own
measurement of swapping 1,250 blocks there, of a size that it does not state, is 3.1 GB/s (vllm-project/vllm#11531)."""


def swap_blocks(engine: EngineSpec, plan: MemoryPlan) -> int:
    """KV blocks that `swap_space`, GiB a GPU, holds (worker/worker.py: `determine_num_available_blocks`)."""
    return int(engine.options["swap_space"] * GIB // plan.block_bytes)


def swap_block_s(model: ModelSpec, gpu: Gpu, plan: MemoryPlan) -> float:
    """Seconds to copy one block to the host, or back."""
    copies = model.attention_layers * (1 if model.latent else 2)
    return copies * COPY_S + plan.block_bytes / gpu.host_bytes_per_s
