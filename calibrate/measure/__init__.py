"""Kernels run on the device at hand, timed and written down as `Measurements`. The only room of torch.

`session.py` runs a list of points (`points.py`: which, in which order; `grids.py`: the sizes) on a machine
(`machine.py`, `system.py`) with a stopwatch (`timing.py`) into a folder (`record.py`). What a point runs is in
`kernels.py`, `attention.py`, `experts.py`, `stack.py` (whole layers and steps, of `layers.py`'s functions) and
`collectives.py`, made with a `kit.py`; `vllm_cpu.py` has vLLM's kernels of a CPU. torch is imported when `measure` is
called, by `machine.py`.
"""

from __future__ import annotations

from calibrate.measure.session import measure

__all__ = ["measure"]
