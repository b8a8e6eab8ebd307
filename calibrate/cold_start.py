"""How long an engine takes from its start until it serves: an estimate, for who has not measured it.

Published start-ups of vLLM differ by a factor of three, by disk, cache and version; a measured time is better. What a
machine or an image takes before the engine starts is not in it.
"""

from __future__ import annotations

from calibrate.engine import EngineSpec
from calibrate.memory import MemoryPlan

PROCESS_S = 25.0
"""Imports, processes, groups. vLLM issue 20264: 59 s in all, of which 34 s in the engine and 1 s for weights; 44881:
16 s until the engine is configured."""
WEIGHTS_BYTES_S = 1e9
"""Of each GPU. Issue 44881: 21.8 GiB in 18 s; 19824: 70 GB on 8 GPUs in 10 s from the page cache; 38820: 12.7 GiB in
25 s, and PR 44106 7.6 GiB in 27 s, from slower disks."""
COMPILE_S = 40.0
"""torch.compile and the profiling run. Kubernetes' gateway-api-inference-extension, PR 550 (8B, H100): 34 s; model
streamer of Run:ai, issue 67: 46 s; vLLM issue 19824 (70B, 8 GPUs): 85 s; with a warm cache 8 to 20 s (20264)."""
CAPTURE_S = 25.0
"""CUDA graphs. Run:ai 67: 37 s; vLLM 20264: 17 s; 19824: 60 s; 3 s for a 2 GiB model in 0.11 (PR 29335)."""


def cold_start_s(engine: EngineSpec, memory: MemoryPlan) -> float | None:
    """Seconds from the start of an engine's process; None for engines of which no start-up was found."""
    if engine.engine != "vllm":
        return None
    ready = 0.0 if engine.enforce_eager else COMPILE_S + CAPTURE_S
    return PROCESS_S + memory.weight_bytes / WEIGHTS_BYTES_S + ready
