"""What steps cost behind windows: as much as without them until they bind, and no more from then on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibrate.cost import compile_cost
from calibrate.datasheet import Datasheet
from calibrate.kernel_times import kernels_s
from calibrate.kernels.chunks import LocalChunks
from tests.calibrate.helpers import cost, parts

GEMMA = {"model": "gemma-2-9b", "gpu": "h100-sxm", "max_model_len": 8000}  # every second layer sees 4,096 tokens
SCOUT = {"model": "llama-4-scout", "gpu": "h100-sxm", "tp": 8, "max_model_len": 65536, "max_num_batched_tokens": 65536}


@pytest.mark.parametrize("gpu", ["h100-sxm", "rtx-4090"])
def test_nothing_changes_before_a_window_binds(gpu: str) -> None:
    """Also where one kernel takes the chunks and the decodes."""
    model, layout, card, engine = parts(**GEMMA | {"gpu": gpu})  # type: ignore[arg-type]
    with_, without = (compile_cost(m, layout, engine, Datasheet(card)) for m in (model, replace(model, windows=())))
    for chunks, decodes, kv in (((), 1, 100), ((), 9, 30_000), (((1000, 0),), 4, 9000), (((512, 3000), (7, 0)), 0, 0)):
        seen = (kv,) if decodes else ()
        assert with_.step_s(chunks, decodes, kv, seen) == pytest.approx(without.step_s(chunks, decodes, kv), rel=1e-9)


def test_a_full_window_costs_no_more() -> None:
    priced = cost(**GEMMA)
    rise = [priced.step_s((), 2, 2 * kv, (2 * min(kv, 4096),)) for kv in (3000, 4000, 5000, 6000)]
    assert rise[2] - rise[1] < 0.6 * (rise[1] - rise[0]), "half the layers stand still from 4,096 on"
    assert rise[3] - rise[2] == pytest.approx((rise[1] - rise[0]) / 2)
    far, near = priced.step_s(((100, 7000),), 0, 0), priced.step_s(((100, 4000),), 0, 0)
    farther = priced.step_s(((100, 7900),), 0, 0)
    assert near < far < farther
    assert farther - far < (far - near) / 3


def test_lines_are_the_step() -> None:
    """Bit for bit, as the simulation adds them up."""
    priced = cost(**GEMMA)
    for decodes, kv, seen in ((1, 77, 77), (5, 40_000, 20_000), (256, 1_000_000, 900_000)):
        a, b, floor, upto = priced.decode_line(decodes, kv)
        ((c, d, none, until),) = priced.window_lines(decodes, (seen,))
        assert priced.step_s((), decodes, kv, (seen,)) == max(floor, a + b * kv + (c + d * seen))
        assert kv <= upto
        assert seen <= until
        assert none == 0.0


def test_chunked_attention_sees_its_own_chunk() -> None:
    """A prompt of three chunks is three sequences to the kernel."""
    priced = cost(**SCOUT)
    (_, whole), (_, local) = priced.prefill
    assert isinstance(local, LocalChunks)
    assert local.together([(4000, 2000)]) == whole.together([(4000, 2000)])
    assert local.together([(4000, 8192 + 2000)]) == whole.together([(4000, 2000)])
    assert local.together([(3 * 8192, 0)]) == whole.together([(8192, 0)] * 3)
    assert local.together([(1000, 8000)]) == whole.together([(192, 8000), (808, 0)])
    model, layout, card, engine = parts(**SCOUT)  # type: ignore[arg-type]
    everything = compile_cost(replace(model, windows=()), layout, engine, Datasheet(card))
    assert priced.step_s(((50_000, 0),), 0, 0) < 0.8 * everything.step_s(((50_000, 0),), 0, 0)


def test_kernels_of_a_step_behind_windows() -> None:
    """What `kernels_s` says of equally long sequences is what the compiled step says, less host and padding."""
    model, layout, card, engine = parts(**GEMMA)  # type: ignore[arg-type]
    prices = Datasheet(card)
    for kv in (1000, 4000, 6000):
        more = [kernels_s(model, layout, prices, (), 8, 8 * n) for n in (0, kv)]
        compiled = compile_cost(model, layout, engine, prices)
        steps = [compiled.step_s((), 8, 8 * n, (8 * min(n, 4096),)) for n in (0, kv)]
        assert more[1] - more[0] == pytest.approx(steps[1] - steps[0], rel=1e-9)
