"""Where measured data lie: `SERVECAST_REFERENCE`, by default a folder `shared` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("SERVECAST_REFERENCE", Path(__file__).parents[2] / "shared"))


def reference(*parts: str) -> Path:
    """A file or folder of the reference data; skips the test, visibly, where it is absent."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {'/'.join(parts)} not found (set SERVECAST_REFERENCE)")
    return path
