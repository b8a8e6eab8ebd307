"""The naive engine that states the semantics, and how it plans: a counterpart for every scheduler policy."""

from __future__ import annotations

from sim import schedulers
from tests.sim.oracle.llama_cpp import LlamaCpp
from tests.sim.oracle.mlc import MlcLlm
from tests.sim.oracle.orca import Orca
from tests.sim.oracle.parts import Naive
from tests.sim.oracle.sarathi import SarathiServe
from tests.sim.oracle.sglang import Sglang
from tests.sim.oracle.speculative import Speculative
from tests.sim.oracle.static_batching import StaticBatching
from tests.sim.oracle.tensorrt_llm import TensorrtLlm
from tests.sim.oracle.tgi import Tgi
from tests.sim.oracle.vllm_v0 import VllmV0
from tests.sim.oracle.vllm_v1 import VllmV1

__all__ = ["Naive", "oracle"]

COUNTERPARTS = {
    "sglang": Sglang,
    "tensorrt-llm": TensorrtLlm,
    "vllm-v1": VllmV1,
    "vllm-v0": VllmV0,
    "sarathi": SarathiServe,
    "orca": Orca,
    "llama.cpp": LlamaCpp,
    "mlc-llm": MlcLlm,
    "static": StaticBatching,
    "tgi": Tgi,
}


def oracle(policy, *args, **kwargs):
    """The naive engine that plans as `policy` should."""
    if "drafting" in kwargs:
        return Speculative(policy, *args, **kwargs)
    name = next(name for name, cls in schedulers.SCHEDULERS.items() if cls is type(policy))
    return COUNTERPARTS[name](policy, *args, **kwargs)
