"""What a newcomer can name: models, GPUs, presets, and the scenarios that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.resources import files

from calibrate.acceptance import acceptance_names, mean_length, table
from calibrate.hardware import GIB, gpu_ids, load_gpu
from calibrate.models import load_model, model_names
from calibrate.options import family, family_of, preset_names
from calibrate.profile import profile_names
from calibrate.serving import unsimulated
from servecast.costing.prices import price_sets
from workloads.mixes import load_mixes


def models() -> Iterable[str]:
    """Name, parameters and longest sequence of every catalogued model, and why not if it cannot be run in full."""
    for name in model_names():
        model = load_model(name)
        active = f" ({model.active_params / 1e9:.1f} B active)" if model.experts else ""
        why = "".join(f"; not simulated yet: {reason.partition(':')[0]}" for reason in unsimulated(model))
        yield f"{name:<22} {model.params / 1e9:7.2f} B parameters{active}, {model.max_position:,} tokens{why}"


def gpus() -> Iterable[str]:
    """Id, memory and peak rates of every catalogued GPU, and where the times of its kernels come from."""
    profiled = profile_names()
    for gpu_id in gpu_ids():
        gpu = load_gpu(gpu_id)
        tflops = gpu.flops["bf16"] / 1e12
        times = "profile" if gpu_id in profiled else "datasheet"
        yield (
            f"{gpu_id:<15} {gpu.memory_bytes / GIB:6.1f} GiB, {gpu.bandwidth_bytes_per_s / 1e12:5.2f} TB/s, "
            f"{tflops:6.{0 if tflops >= 1 else 2}f} TFLOPS dense bf16, {times}"
        )


def presets() -> Iterable[str]:
    """Name, engine with its version, and scheduler policy of every preset."""
    for name in preset_names():
        preset = family(family_of(name))["presets"][name]
        yield f"{name:<15} {preset['source']}, policy {preset['scheduler']}"


def mixes() -> Iterable[str]:
    """Name and description of every ready-made workload."""
    for name, mix in load_mixes().items():
        yield f"{name:<8} {mix.what}"


def prices() -> Iterable[str]:
    """Every bundled set of prices, and what it asks for GPUs by the hour."""
    for found in price_sets().values():
        note = f" ({found.note})" if found.note else ""
        yield f"{found.name}: {found.what}, dollars per GPU and hour, {found.date}, {found.source}{note}"
        yield from (f"  {gpu:<15} {price:6.2f}" for gpu, price in found.prices.items())


def scenarios() -> Iterable[str]:
    """Path and question (the first comment line) of every bundled scenario."""
    for file in sorted(files("scenarios").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            question = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            yield f"{file}: {question}"


def acceptance() -> Iterable[str]:
    """Every measured table of accepted drafts: the share of steps in which those up to each position were right."""
    for name in acceptance_names():
        rates = table(name)
        said = ", ".join(f"{rate:g}" for rate in rates)
        yield f"{name:<30} {said} (3 drafted: {mean_length(rates[:3]):.2f} tokens a step)"


LISTINGS: dict[str, Callable[[], Iterable[str]]] = {
    "models": models,
    "gpus": gpus,
    "presets": presets,
    "acceptance": acceptance,
    "mixes": mixes,
    "prices": prices,
    "scenarios": scenarios,
}
