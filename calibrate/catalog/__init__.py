"""Data, not code: GPUs, models and engine presets as YAML, each figure with its source; to add one, add lines there.

This module only reads the files; what the keys mean is known by `hardware.py`, `model.py` and `engine.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(name: str) -> Any:
    """The parsed `calibrate/catalog/<name>.yaml`. Callers treat it as read-only: it is parsed once."""
    import yaml  # here, so that importing the catalogue costs nothing at command line start

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is 10x faster where it was compiled
    return yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text("utf-8"), Loader=loader)
