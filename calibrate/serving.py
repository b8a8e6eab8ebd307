"""A model as an engine serves it: dtypes and quantisation resolved, windows that never bind dropped; and what of it
cannot be simulated yet.
"""

from __future__ import annotations

from dataclasses import replace

from calibrate.engine import EngineSpec
from calibrate.model import ModelSpec
from calibrate.models import quantize
from calibrate.storage import KV_FORMATS
from servecast.errors import ServecastError, one_of

DTYPES = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32"}
METHODS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
"""Values of `quantization` that name a kernel -> the checkpoints' method that it is for."""


def served(model: ModelSpec, engine: EngineSpec) -> ModelSpec:
    """`model` with the engine's `dtype`, `quantization`, `kv_cache_dtype` and `max_model_len` applied; applying it
    again changes nothing.

    fp8 quantises a checkpoint that is not quantised, as vLLM does while loading: all projections of the layers, one
    scale a matrix. Raises `ServecastError` for options that contradict the checkpoint.
    """
    dtype = DTYPES.get(engine.dtype, "bf16" if model.dtype == "fp32" else model.dtype)
    wanted = METHODS.get(engine.quantization or "", engine.quantization)
    # vLLM serves fp32 checkpoints in 16 bit unless told otherwise
    model = replace(model, dtype=dtype)
    if wanted and model.method and model.method != wanted:
        raise ServecastError(
            f"engine.quantization: {engine.quantization} does not match {model.name}, whose weights are quantised by "
            f"{model.method}: leave it out"
        )
    if wanted and not model.method:
        if wanted != "fp8":
            raise ServecastError(
                f"engine.quantization: {engine.quantization} needs a checkpoint of that kind, and {model.name} is not "
                "quantised: name one (a path to its config.json), or use fp8, which quantises while loading"
            )
        model = quantize(model, "fp8", "fp8")
    if dtype == "fp32" and model.quantized:
        raise ServecastError(f"engine.dtype: {engine.dtype} does not go with quantised weights ({model.name})")
    return replace(
        model,
        kv_dtype=_kv_dtype(model, engine),
        windows=tuple(window for window in model.windows if window.size < engine.max_model_len),
    )


def unsimulated(model: ModelSpec) -> list[str]:
    """What of a (served) model cannot be simulated yet, by name and with what helps; empty when all can."""
    reasons = []
    if model.recurrent:
        reasons.append("recurrent layers (Mamba, linear attention): their kernels and states are not simulated yet")
    if model.kv_dtype not in ("", "fp8"):
        reasons.append(f"a KV cache in {model.kv_dtype}: no table holds the kernels that read it")
    if model.left_out:
        reasons.append(f"{model.left_out}: neither its weights nor its work are known")
    return reasons + sorted({q.storage.unpriced for q in model.quantized if q.storage.unpriced})


def check_simulated(model: ModelSpec) -> None:
    """Raises `ServecastError` with all that of a served model cannot be simulated yet."""
    if reasons := unsimulated(model):
        raise ServecastError(*(f"model: {model.name!r} is not priced yet: {reason}" for reason in reasons))


def checked_windows(model: ModelSpec, engine: EngineSpec) -> ModelSpec:
    """The served model; raises `ServecastError` where the engine's memory for its windows is not simulated."""
    if model.windows and engine.scheduler != "vllm-v1":
        sizes = one_of(sorted({f"{w.size:,}" for w in model.windows}))
        raise ServecastError(
            f"engine.preset: {engine.preset}'s KV cache of layers that see only a part of a sequence, as "
            f"{model.name}'s do, is not simulated yet; with {engine.name_of('max_model_len')} at most {sizes} they see "
            "all of it, or use a preset of vLLM"
        )
    return model


def _kv_dtype(model: ModelSpec, engine: EngineSpec) -> str:
    if engine.kv_cache_dtype in KV_FORMATS:
        return engine.kv_cache_dtype
    if engine.kv_cache_dtype.startswith("fp8"):
        return "fp8"
    follows = engine.kv_cache_dtype == "auto" and engine.follows_checkpoint_kv
    return model.kv_dtype if follows else ""
