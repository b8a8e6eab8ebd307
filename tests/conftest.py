"""Property tests draw new examples at every run, except in CI, where a run must depend on the change alone."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
