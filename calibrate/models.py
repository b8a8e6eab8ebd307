"""Which models there are: the catalogue's, and those that a Hugging Face config.json describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.catalog import read
from calibrate.hf_config import read_config
from calibrate.model import KINDS, ModelSpec
from calibrate.parts import Experts, Latent, Quantized, Recurrent, Window
from calibrate.storage import FORMATS
from servecast.errors import ServecastError, nearest, one_of

ABOUT = ("params", "bytes", "count", "source")  # what the catalogue says beside the sizes


def model_names() -> list[str]:
    """The catalogue's names, in its order."""
    return list(read("models")["models"])


def load_model(name_or_path: str) -> ModelSpec:
    """A catalogue model, or the one that a `config.json` (or the folder that holds it) describes.

    Raises `ServecastError` for an unknown name, a bad file, and an architecture that is not priced yet, with the
    reason.
    """
    catalogue = read("models")
    entry: dict[str, Any] | None = catalogue["models"].get(name_or_path)
    if entry is not None:
        return _spec(name_or_path, {key: value for key, value in entry.items() if key not in ABOUT})
    if name_or_path in catalogue["unpriced"]:
        raise ServecastError(
            f"model: {name_or_path!r} is not priced yet: {catalogue['unpriced'][name_or_path]}. "
            f"Priced are: {one_of(model_names())}"
        )
    if "/" in name_or_path or name_or_path.endswith(".json") or Path(name_or_path).exists():
        return read_config(Path(name_or_path))
    hint = nearest(name_or_path.lower(), [*model_names(), *catalogue["unpriced"]])
    raise ServecastError(
        f"model: {name_or_path!r} is neither in the catalogue{hint} nor a path to a config.json; "
        f"catalogue: {one_of(model_names())}"
    )


def quantize(model: ModelSpec, formats: str | dict[str, str], method: str) -> ModelSpec:
    """`model` with all its projections stored in one of `storage.FORMATS`, or each named kind in its own."""
    layers = {"experts" if p.name.startswith("experts") else p.name: p for p in model.projections(1)}
    copies = model.experts.count if model.experts else 1
    quantized = []
    for kind in KINDS:
        wanted = formats if isinstance(formats, str) else formats.get(kind)
        if wanted and kind in layers:
            count = layers[kind].count // (copies if kind == "experts" else 1)
            quantized.append(Quantized(kind, FORMATS[wanted], count))
    return replace(model, quantized=tuple(quantized), method=method)


def _spec(name: str, fields: dict[str, Any]) -> ModelSpec:
    formats = fields.pop("quantized", None)
    parts: dict[str, Any] = {"windows": tuple(Window(**window) for window in fields.pop("windows", ()))}
    if "experts" in fields:
        parts["experts"] = Experts(**fields.pop("experts"))
    if "latent" in fields:
        parts["latent"] = Latent(**fields.pop("latent"))
    if "recurrent" in fields:
        parts["recurrent"] = Recurrent(**fields.pop("recurrent"))
    spec = ModelSpec(**{"name": name, "head_dim": fields["hidden"] // fields["heads"], **fields, **parts})
    return quantize(spec, formats, spec.method) if formats else spec
