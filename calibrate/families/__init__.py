"""What the options of each engine mean: a file a family, and the dictionary that names them.

Each has `resolve(chosen, layout, gpu, model, preset)`: it fills in the defaults that depend on the machine and the
model, refuses what the engine would refuse at start-up, and returns the fields of `EngineSpec` that the options decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calibrate.families import sglang, small, tensorrt_llm, vllm
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen

Resolve = Callable[[Chosen, Parallelism, Gpu, ModelSpec, Mapping[str, Any]], dict[str, Any]]

RESOLVE: Mapping[str, Resolve] = {
    "vllm": vllm.resolve,
    "sglang": sglang.resolve,
    "tensorrt-llm": tensorrt_llm.resolve,
    "tgi": small.tgi,
    "llama.cpp": small.llama_cpp,
    "mlc-llm": small.mlc_llm,
    "transformers": small.transformers,
    "sarathi": small.sarathi,
    "orca": small.orca,
}
"""Family -> what its options mean."""
