"""GPUs and their links as the datasheets state them, with the efficiencies that kernels are assumed to reach.

Knows nothing of models or engines: what a kernel costs on a GPU is `cost.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.catalog import read
from servecast.errors import ServecastError, nearest, one_of

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """How the GPUs of one node reach each other.

    `bandwidth_bytes_per_s` is per direction and GPU; `allreduce_share` is the share of it that a large all-reduce
    reaches, by number of GPUs; `latency_s` is the time of the smallest all-reduce.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    allreduce_share: Mapping[int, float]

    def share(self, gpus: int) -> float:
        """The share for the smallest measured group that holds `gpus` (the largest one beyond it)."""
        return self.allreduce_share[
            min((n for n in self.allreduce_share if n >= gpus), default=max(self.allreduce_share))
        ]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What kernels reach: shares of the peak FLOP/s or bandwidth (0..1], and the fixed seconds of one kernel."""

    gemm_flops: float
    gemm_bandwidth: float
    gemm_fixed_s: float
    prefill_flops: float
    prefill_fixed_s: float
    decode_bandwidth: float
    decode_fixed_s: float
    elementwise_bandwidth: float
    elementwise_fixed_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Power:
    """What a GPU draws: `tdp_w` watts at most (None: no datasheet is known), and the shares of that, 0..1, while it
    holds a model and idles, in steps of decodes alone, and in steps with prompts. Evidence: gpus.yaml."""

    tdp_w: float | None
    idle: float
    decode: float
    prompt: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `architecture` names its class in gpus.yaml; `flops` maps a dtype (bf16, fp8, int8, fp4) to the DENSE
    tensor rate in FLOP/s; `fp32_flops` is the rate of 32-bit floats outside the tensor cores.

    `l2_bytes` is the last cache, 0 where nothing asks for it; `memory_bytes` is the datasheet's figure, `visible_bytes`
    what the driver reports as the total, of which `gpu_memory_utilization` takes its share; `host_bytes_per_s` is what
    large copies to or from the memory of the host reach. `link` joins `link_gpus` GPUs, which may be those of several
    nodes.
    """

    id: str
    name: str
    vendor: str
    architecture: str
    l2_bytes: int
    memory_bytes: int
    visible_bytes: int
    bandwidth_bytes_per_s: float
    flops: Mapping[str, float]
    fp32_flops: float
    link: Link
    host_bytes_per_s: float
    gpus_per_node: int
    link_gpus: int
    efficiency: Efficiency
    power: Power
    source: str


def gpu_ids() -> list[str]:
    """The canonical ids of the catalogue, in its order."""
    return list(read("gpus")["gpus"])


def load_gpu(gpu_id: str) -> Gpu:
    """The GPU with this canonical id; `ServecastError` for any other word."""
    data = read("gpus")
    found: dict[str, Any] | None = data["gpus"].get(gpu_id)
    if found is None:
        variants = [known for known in gpu_ids() if known.startswith(f"{str(gpu_id).lower()}-")]
        hint = f" (did you mean {variants[0]!r}?)" if variants else nearest(str(gpu_id).lower(), gpu_ids())
        raise ServecastError(f"gpu: {gpu_id!r} is not in the catalogue{hint}; known: {one_of(gpu_ids())}")
    link = data["links"][found["link"]]
    shares = dict(data["efficiencies"][found["class"]])
    memory = round(found["memory_gib"] * GIB)
    visible = (
        round(found["visible_gib"] * GIB) if "visible_gib" in found else round(memory * data["default_visible_share"])
    )
    return Gpu(
        id=gpu_id,
        name=found["name"],
        vendor=found["vendor"],
        architecture=found["class"],
        l2_bytes=round(found.get("l2_mib", 0) * 2**20),
        memory_bytes=memory,
        visible_bytes=visible,
        bandwidth_bytes_per_s=found["bandwidth"],
        flops={dtype: tera * 1e12 for dtype, tera in found["tflops"].items()},
        fp32_flops=found["fp32_tflops"] * 1e12,
        link=Link(link["name"], link["bandwidth"], link["latency"], link["efficiency"]),
        host_bytes_per_s=data["host_links"][found["class"]],
        gpus_per_node=found["gpus_per_node"],
        link_gpus=found.get("link_gpus", found["gpus_per_node"]),
        efficiency=Efficiency(**{f"{k}_s" if k.endswith("_fixed") else k: v for k, v in shares.items()}),
        power=Power(found.get("tdp_w"), **data["power"][found.get("dram", "hbm")]),
        source=found["source"],
    )
