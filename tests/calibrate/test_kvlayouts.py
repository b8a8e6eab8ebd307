"""Layouts of the KV cache against a loop over every step of every request."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.kvlayouts import LayoutUse, compare_layouts
from calibrate.models import load_model
from tests.calibrate.helpers import plan

PLAN = plan(max_model_len=8192)
MODEL = load_model("llama-3.1-8b")
lengths = st.lists(st.tuples(*[st.integers(1, 700)] * 3), min_size=1, max_size=5)


def compared(shapes: list[tuple[int, int, int]], budget: int | None = None) -> dict[str, LayoutUse]:
    prompt, output, more = (np.array(column, np.int64) for column in zip(*shapes, strict=True))
    found = compare_layouts(PLAN, MODEL, prompt, output, output + more, budget)
    return {row.name: row for row in found}


@given(lengths, st.integers(1, 900))
def test_every_step_counts(shapes: list[tuple[int, int, int]], budget: int) -> None:
    rows = compared(shapes, budget)
    steps = [(p + i, p, o, m) for p, o, m in shapes for i in range(1, o + 1)]

    def mean(of: list[float]) -> float:
        return sum(of) / len(steps)

    used = mean([t for t, *_ in steps])
    expected = {
        "concatenated": used * (1 + 1 / 64),
        "reserved for max_model_len": 8192,
        "reserved for prompt + max_tokens": mean([p + o + m for _, p, o, m in steps]),
        "reserved for the true length": mean([p + o for _, p, o, _ in steps]),
        "paged, 16 tokens a block": mean([16 * math.ceil(t / 16) for t, *_ in steps]),
        "paged, 512 tokens a block": mean([512 * math.ceil(t / 512) for t, *_ in steps]),
        f"paged, at most {budget:,} tokens kept": mean([16 * math.ceil(min(t, budget) / 16) for t, *_ in steps]),
    }
    for name, held in expected.items():
        assert rows[name].held_tokens == pytest.approx(held, rel=1e-12), name
        if "kept" not in name:
            assert rows[name].used_tokens == pytest.approx(used)
    assert rows[f"paged, at most {budget:,} tokens kept"].used_tokens == pytest.approx(
        mean([min(t, budget) for t, *_ in steps])
    )


def test_pages_waste_little_and_reservations_most() -> None:
    """vLLM's paper (arXiv:2309.06180, figure 2): 20 to 38 % of reserved memory holds tokens, 96 % of pages."""
    rows = compared([(200, 300, 1500), (50, 400, 1650)])
    assert rows["paged, 16 tokens a block"].waste < 0.04
    assert rows["reserved for max_model_len"].waste > 0.9
    assert 0.6 < rows["reserved for prompt + max_tokens"].waste < 0.9
    assert rows["paged, 16 tokens a block"].at_once > 20 * rows["reserved for max_model_len"].at_once


def test_without_caps_there_is_nothing_to_reserve_for() -> None:
    assert "reserved for prompt + max_tokens" not in compared([(10, 10, 0)])
