"""What an engine makes of a layout: which versions share the tokens of a KV cache (decode context parallelism, `dcp`)
or of a step (prefill context parallelism, `pcp`) between GPUs, for which models, and what overlapping halves of steps
need. `check_layout` says what no engine can do."""

from __future__ import annotations

from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import family
from servecast.errors import one_of

NONE = {"dcp": [], "pcp": [], "fp8_latents": False}
KINDS = {"heads": "grouped-query attention", "latent": "latent attention (MLA)"}
"""A word of a preset's `context_parallel` -> the attention of the models that it is for."""


def check_engine_layout(model: ModelSpec, layout: Parallelism, engine: EngineSpec) -> list[str]:
    """Every reason why this engine does not run this (served) model under the layout; empty when it does."""
    has = family(engine.engine)["presets"][engine.preset].get("context_parallel", NONE)
    kind, problems = "latent" if model.latent else "heads", []
    for key, what in (("dcp", "decode"), ("pcp", "prefill")):
        size = getattr(layout, key)
        if size == 1 or kind in has[key]:
            continue
        only = f"has it for models with {one_of(KINDS[word] for word in has[key])}" if has[key] else "cannot run it"
        others = [n for n, p in family("vllm")["presets"].items() if kind in p.get("context_parallel", NONE)[key]]
        which = f", or use a preset that has it ({others[0]} is the first)" if others else ""
        problems.append(f"{key} {size}: {engine.preset} {only} ({what} context parallelism); set {key} to 1{which}")
    if layout.dcp > 1 and (model.windows or model.recurrent):
        what = "see only a part of a sequence" if model.windows else "keep states"
        problems.append(f"dcp {layout.dcp}: layers of {model.name} {what}, which no ranks share; set dcp to 1")
    if layout.dcp > 1 and model.latent and model.kv_dtype == "fp8" and not has["fp8_latents"]:
        problems.append(
            f"dcp {layout.dcp}: {engine.preset} shares no latents in fp8; set engine.kv_cache_dtype to bfloat16, or "
            "use a newer preset"
        )
    return problems + (_overlap(layout) if engine.overlap else [])


def _overlap(layout: Parallelism) -> list[str]:
    """What is missing where halves of a step are to overlap what data parallel ranks send to experts."""
    key = "engine.enable_dbo"
    if layout.dp == 1:
        return [
            f"{key}: halves of a step overlap what data parallel ranks send to experts, and dp is 1; set cluster.dp"
        ]
    if not layout.all2all_backend.startswith("deepep"):
        return [
            f"{key}: only DeepEP's traffic overlaps; set cluster.ep, and cluster.experts.all2all to "
            "deepep_low_latency or deepep_high_throughput"
        ]
    return [f"{key}: is not modelled with {name} above 1" for name in ("pp", "dcp") if getattr(layout, name) > 1]
