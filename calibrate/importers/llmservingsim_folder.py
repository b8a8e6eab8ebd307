"""Where LLMServingSim's profiles lie: a GPU's folders, the models' sizes. It reads no table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.model import ModelSpec
from servecast.errors import ServecastError, one_of

GPUS = {
    "rtx4090": "rtx-4090",
    "rtxpro6000": "rtx-pro-6000",
    "h100": "h100-sxm",
    "a6000": "a6000",
    "rtx3090": "rtx-3090",
}
"""Folder (in lower case) -> id of the catalogue."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One folder of tables: of one model at one tensor-parallel degree. `vllm` is empty in the older format."""

    folder: Path
    model: str
    tp: int
    vllm: str
    device: str
    taken: str


def gpu_folder(path: Path, gpu: str | None) -> tuple[Path, str]:
    """(folder to read, id): `path` itself where it or a parent is a GPU's folder, else the one in it that is meant."""
    above = next((p for p in (path, *path.parents) if p.name.lower() in GPUS), None)
    if above is not None:
        gpu_id = GPUS[above.name.lower()]
        if gpu not in (None, gpu_id):
            raise ServecastError(f"{path}: holds {gpu_id}, but gpu is {gpu!r}; leave gpu out or give another folder")
        return path, gpu_id
    here = {GPUS[f.name.lower()]: f for f in sorted(path.glob("*")) if f.name.lower() in GPUS}
    if not here:
        raise ServecastError(f"{path}: no folder of a GPU of the catalogue in it; expected {one_of(GPUS)}")
    if gpu is None and len(here) == 1:
        gpu = next(iter(here))
    if gpu not in here:
        raise ServecastError(f"{path}: {'say which GPU' if gpu is None else f'no {gpu!r}'}; it holds {one_of(here)}")
    return here[gpu], gpu


def profiles(folder: Path, problems: list[str]) -> list[Profile]:
    """Every tp<N> folder with tables."""
    found = []
    for tables in sorted({file.parent for name in ("dense", "layers") for file in folder.rglob(f"{name}.csv*")}):
        if not (tables.name.startswith("tp") and tables.name[2:].isdigit() and int(tables.name[2:])):
            problems.append(f"{tables}: expected a folder named tp<N>, N being the tensor-parallel degree")
        elif list(tables.glob("layers.csv*")):
            found.append(Profile(tables, tables.parent.name, int(tables.name[2:]), "", "not stated", "not stated"))
        elif meta := _meta(tables.parent, problems):
            model, vllm, device = (str(meta.get(key, "not stated")) for key in ("model", "vllm_version", "gpu"))
            taken = str(meta.get("profiled_at", "not stated")).split("T")[0]
            found.append(Profile(tables, model, int(tables.name[2:]), vllm, device, taken))
            if meta.get("variant") not in (None, "bf16"):
                problems.append(f"{tables.parent}: variant {meta['variant']!r} is not imported; expected bf16")
    return found


def _meta(folder: Path, problems: list[str]) -> dict[str, Any]:
    for name in ("meta.json", "meta.yaml"):
        if (folder / name).is_file():
            return _mapping(folder / name, problems)
    problems.append(f"{folder}: no meta.json or meta.yaml in it; expected one that says model, gpu and vllm_version")
    return {}


def _mapping(file: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON or YAML file's mapping; empty, with a problem, where it holds none."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text("utf-8"))  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        data = str(error)
    if isinstance(data, dict) and data:
        return data
    problems.append(f"{file}: expected a JSON or YAML mapping, found {str(data)[:80]!r}")
    return {}


def model_config(profile: Profile, problems: list[str]) -> dict[str, Any]:
    """The model's config.json, from `model_configs/` or `configs/model/` beside the folder or the nearest parent."""
    name = f"{profile.model.rsplit('/', 1)[-1]}.json"
    for parent in profile.folder.parents:
        for root in (parent / "model_configs", parent / "configs" / "model"):
            for file in sorted(root.rglob("*.json")):
                if file.name.lower() == name.lower():
                    return _mapping(file, problems)
    problems.append(
        f"{profile.folder}: the sizes of {profile.model} are not known; put its config.json, named {name}, into a "
        "folder model_configs beside this one or a parent of it"
    )
    return {}


def sizes(profile: Profile, config: dict[str, Any], problems: list[str]) -> ModelSpec | None:
    """The model's sizes; `intermediate` of a mixture of experts is one expert's."""
    needed = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    if wrong := [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]:
        problems.append(f"{profile.folder}: the config.json of {profile.model} has no usable {one_of(wrong)}")
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if heads % profile.tp:
        problems.append(f"{profile.folder}: the {heads} heads of {profile.model} do not divide over {profile.tp} GPUs")
        return None
    return ModelSpec(
        name=profile.model,
        hidden=hidden,
        layers=1,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        vocab=config["vocab_size"],
        max_position=1,
        dtype="bf16",
    )
