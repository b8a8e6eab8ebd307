"""A validation as JSON: every number that the page shows, and what it rests on. Nothing in it is null or NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reports.validation.causes import CAUTION

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from reports.validation.causes import Causes
    from reports.validation.compared import Validation


def validation_json(validation: Validation) -> str:
    """The text of `validation.json`: figures in milliseconds where the key says so, errors as fractions."""
    v, manifest = validation, validation.result.manifest
    tree: dict[str, Any] = {
        **{key: manifest[key] for key in ("name", "servecast") if key in manifest},
        **{key: pool[key] for pool in manifest.get("pools", ()) for key in ("model", "gpu", "engine")},
        "measured": _run(v.run),
        "replayed": v.replayed,
        "doubts": list(v.run.doubts),
        "warnings": list(v.warnings),
        **_known({"requests_compared": None if v.matched is None else len(v.matched), "mean_error": v.mean_error}),
        "figures": _figures(v),
        "per_request": {
            metric: {key: int(value) if key == "count" else value for key, value in found.items()}
            for metric, found in v.per_request.items()
        },
        "causes": _causes(v.causes),
        "notes": [*v.run.notes, *manifest.get("notes", ())],
        "not_modelled": list(manifest.get("not_modelled", ())),
        **{key: manifest[key] for key in ("scenario",) if key in manifest},
        **{key: pool[key] for pool in manifest.get("pools", ()) for key in ("cost",)},
    }
    return json.dumps(tree, indent=2, allow_nan=False, default=str) + "\n"


def _run(run: MeasuredRun) -> dict[str, Any]:
    names = ("tool", "version", "source", "model", "completed", "failed", "rate", "concurrency", "duration_s")
    return _known({name: getattr(run, name) or None if name == "version" else getattr(run, name) for name in names})


def _figures(v: Validation) -> dict[str, dict[str, float]]:
    sides = {"predicted": v.predicted, "measured": v.measured, "error": v.errors}
    keys = list(v.predicted) + [key for key in v.measured if key not in v.predicted]
    return {key: {name: side[key] for name, side in sides.items() if key in side} for key in keys}


def _causes(causes: Causes) -> dict[str, Any]:
    said = _known({"mean_error": causes.mean_error, "over": causes.over or None, "why_none": causes.why_none or None})
    tried = [
        {
            "change": cause.words, "set": list(cause.sets), "mean_error": cause.mean_error,
            "noticeable": i < len(causes.likely), "errors": dict(cause.errors),
        }
        for i, cause in enumerate(causes.tried)
    ]  # fmt: skip
    return {**said, "tried": tried, "refused": list(causes.refused), "caution": CAUTION}


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}
