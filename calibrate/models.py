"""Which models there are: the catalogue's, and those that a Hugging Face config.json describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate.catalog import read
from calibrate.hf_config import read_config
from calibrate.model import ModelSpec
from servecast.errors import ServecastError, nearest, one_of


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
        fields = {k: v for k, v in entry.items() if k not in ("params", "count", "source")}
        return ModelSpec(**{"name": name_or_path, "head_dim": fields["hidden"] // fields["heads"], **fields})
    if name_or_path in catalogue["unpriced"]:
        raise ServecastError(
            f"model: {name_or_path!r} is not priced yet: {catalogue['unpriced'][name_or_path]}. "
            f"Priced are dense models with full attention: {one_of(model_names())}"
        )
    if "/" in name_or_path or name_or_path.endswith(".json") or Path(name_or_path).exists():
        return read_config(Path(name_or_path))
    hint = nearest(name_or_path.lower(), [*model_names(), *catalogue["unpriced"]])
    raise ServecastError(
        f"model: {name_or_path!r} is neither in the catalogue{hint} nor a path to a config.json; "
        f"catalogue: {one_of(model_names())}"
    )
