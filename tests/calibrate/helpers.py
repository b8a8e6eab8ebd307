"""Short ways to the objects that these tests need."""

from __future__ import annotations

from calibrate.cost import CompiledCost, compile_cost
from calibrate.datasheet import Datasheet
from calibrate.engine import EngineSpec, resolve_engine
from calibrate.fixes import require_fit
from calibrate.hardware import Gpu, load_gpu
from calibrate.layout import Parallelism
from calibrate.memory import MemoryPlan
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.serving import served


def parts(
    model: str, gpu: str, tp: int = 1, preset: str = "vllm-0.19", **options: object
) -> tuple[ModelSpec, Parallelism, Gpu, EngineSpec]:
    """Model (as the engine serves it), layout, GPU and engine by name."""
    spec, card = load_model(model), load_gpu(gpu)
    engine = resolve_engine({"preset": preset, **options}, card, spec, Parallelism(tp))
    return served(spec, engine), Parallelism(tp), card, engine


def cost(model: str = "llama-3.1-8b", gpu: str = "h100-sxm", **others: object) -> CompiledCost:
    spec, layout, card, engine = parts(model, gpu, **others)  # type: ignore[arg-type]
    return compile_cost(spec, layout, engine, Datasheet(card))


def plan(model: str = "llama-3.1-8b", gpu: str = "h100-sxm", **others: object) -> MemoryPlan:
    return require_fit(*parts(model, gpu, **others))  # type: ignore[arg-type]
