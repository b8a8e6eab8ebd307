"""Scheduler policies: one a file, and the dictionary that names them.

`plan(state) -> Batch` makes one step's batch and takes its blocks, through the verbs of `sim.state.State`; it sees the
queue, the running requests and the KV cache, never a true output length. What else a policy can say: `policy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.schedulers.llama_cpp import LlamaCpp
from sim.schedulers.mlc import MlcLlm
from sim.schedulers.orca import Orca
from sim.schedulers.policy import Scheduler
from sim.schedulers.sarathi import SarathiServe
from sim.schedulers.sglang import Sglang
from sim.schedulers.sglang_split import SglangDecode, SglangPrefill
from sim.schedulers.static_batching import StaticBatching
from sim.schedulers.tensorrt_llm import TensorrtLlm
from sim.schedulers.tgi import Tgi
from sim.schedulers.vllm_v0 import VllmV0
from sim.schedulers.vllm_v1 import VllmV1

if TYPE_CHECKING:
    from calibrate.engine import EngineSpec

__all__ = ["SCHEDULERS", "SIDES", "Scheduler", "scheduler_of"]

SCHEDULERS: dict[str, type[Scheduler]] = {
    "vllm-v1": VllmV1,
    "vllm-v0": VllmV0,
    "sarathi": SarathiServe,
    "orca": Orca,
    "sglang": Sglang,
    "llama.cpp": LlamaCpp,
    "mlc-llm": MlcLlm,
    "static": StaticBatching,
    "tgi": Tgi,
    "tensorrt-llm": TensorrtLlm,
}
"""Policy name -> class; its fields are what the engine's `policy` gives it."""


SIDES: dict[tuple[str, str], type[Scheduler]] = {
    ("sglang", "prefill"): SglangPrefill,
    ("sglang", "decode"): SglangDecode,
}
"""Where prefill and decode are apart: (policy name, side) -> class, of those that plan otherwise there."""


def scheduler_of(engine: EngineSpec, role: str = "unified") -> Scheduler:
    """The policy of an engine, with its options."""
    return SIDES.get((engine.scheduler, role), SCHEDULERS[engine.scheduler])(**engine.policy)
