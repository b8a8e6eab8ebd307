"""How many examples property tests draw: others at every run, or with `CI` set fewer, which are always the same."""

from __future__ import annotations

import os

from hypothesis import settings


def examples(many: int) -> settings:
    """`many`, or a third of them where they are the same ones at every run."""
    return settings(max_examples=many // 3 if "CI" in os.environ else many, deadline=None)
