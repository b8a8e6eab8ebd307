"""Seconds of a matrix multiplication in 32-bit floats on a GPU's CUDA cores: routers that keep 32-bit weights, such as
MiniMax-M2's, on engines that have no kernel of their own for them. Knows no models or engines.

A tile's way along k takes its time however few rows there are, and the multiplications come on top:
`k x STEP_S + FLOPs / (SHARE x peak)`. From cuBLAS's times on GB200 for n = 256, k = 6144 and 1 to 1,024 rows (table
of vllm-project/vllm#47973, Apache-2.0): off by 8 % at most from 32 rows on. On GB300, n = 128, k = 6144 (table of
#55899) it is -0.5 % off at 4,096 rows and 14 % at 16,384; 1,024 rows and fewer are up to 4 times faster there, for so
few columns are split along k. Between 2 and 16 rows cuBLAS picks kernels that differ by a factor of 4; the typical
one is used.
STEP_S is taken to be alike on all GPUs: nobody published it for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEWEST_ROWS = np.array([1.0, 2.0, 32.0])
STEP_S = np.array([1.2e-9, 3.2e-9, 10.3e-9])
"""Seconds a step of k, from so many rows on."""
SHARE = 0.73


def seconds(peak_flops: float, rows: Floats, n: int, k: int) -> Floats:
    """Seconds of y[rows, n] = x[rows, k] W for every one of `rows` (at least 1); `peak_flops` is the cores' rate."""
    step: Floats = STEP_S[np.searchsorted(FEWEST_ROWS, rows, side="right") - 1]
    return k * step + 2.0 * n * k * rows / (SHARE * peak_flops)
