"""A sweep for scripts: counts, fronts, points and errors."""

from __future__ import annotations

import json
from typing import Any

from reports.sweeping.points import FRONTS, Swept


def sweep_json(swept: Swept) -> str:
    """The summary as JSON text."""
    fronts = {against: swept.front(against)["point"].to_list() for against in FRONTS}
    apart = {} if swept.under_error is None else {key: swept.next_differs(key, on) for key, on in fronts.items()}
    found: dict[str, Any] = {
        "name": swept.title,
        "servecast": swept.version,
        "complete": swept.complete,
        "axes": dict(swept.texts),
        "seeds": swept.seeds,
        "intervals": swept.draws,
        "runs": {"wanted": swept.total} | {status: swept.count(status) for status in ("done", "invalid", "failed")},
        "drawn_twice": swept.again,
        "fronts": fronts,
        "next_differs": apart,
        "points": swept.points.to_dicts(),
        "errors": [
            {"status": status, "error": error, "runs": count, "points": rows["point"].unique().to_list()}
            for status in ("invalid", "failed")
            for error, count, rows in swept.errors(status)
        ],
    }
    return json.dumps(found, indent=2, allow_nan=False) + "\n"
