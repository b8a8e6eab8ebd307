"""What steps would take at a GPU's peaks: how much of its compute and bandwidth a run used. Knows steps as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibrate.hardware import Gpu
from calibrate.kernels.gemm import RATES
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.operators import (
    AttentionGroup,
    attention_groups,
    attention_operators,
    step_operators,
    touched_share,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AtPeaks:
    """Steps of one rank of `model` under `layout`; of pipeline stages, their mean."""

    model: ModelSpec
    layout: Parallelism
    gpu: Gpu

    def seconds(self, rows: Mapping[str, Floats]) -> tuple[Floats, Floats]:
        """(their FLOPs at the peaks of their dtypes, their bytes at the peak bandwidth), in seconds, of each row: a run
        of equal steps with columns steps, prefill_requests, prefill_tokens, decodes, kv_tokens and draft_tokens (what
        makes the drafts is left out).

        The chunks of a step are taken as whole prompts of equal length: what they attend to before them, cached or of
        earlier chunks, is left out. Data parallel ranks are taken to have as many tokens each.
        """
        repeats, new = rows["steps"], rows["prefill_tokens"]
        decodes = rows["decodes"] + rows["draft_tokens"]  # what is computed, also where it is in vain
        ranks = self.layout.pcp  # which share the tokens of a step
        counts = {"tokens": (decodes + new) / ranks, "samples": decodes + rows["prefill_requests"]}
        counts |= {"group": self.layout.dp * (decodes + new), "decodes": decodes / ranks, "chunk_keys": new / ranks}
        compute, moved = np.zeros(len(repeats)), np.zeros(len(repeats))
        for stage in range(self.layout.pp):
            self._add(compute, moved, rows, counts, stage)
        each = repeats / self.layout.pp
        return compute * each, moved * each / self.gpu.bandwidth_bytes_per_s

    def _add(
        self, compute: Floats, moved: Floats, rows: Mapping[str, Floats], counts: Mapping[str, Floats], stage: int
    ) -> None:
        model, layout, gpu = self.model, self.layout, self.gpu
        for op in (*step_operators(model, layout, stage), *attention_operators(model, layout, stage)):
            if op.family not in ("gemm", "moe", "elementwise") or op.rows not in counts:
                continue
            n = counts[op.rows]
            read = touched_share(op.shape[2], op.shape[3], n) if op.family == "moe" else 1.0
            moved += np.where(n > 0, op.fixed_bytes * read + op.bytes_per_row * n, 0.0)
            if op.flops_per_row:
                fp32 = op.weights == "fp32"
                peak = gpu.fp32_flops if fp32 else gpu.flops.get(RATES[op.weights], gpu.flops["bf16"])
                compute += op.flops_per_row * n / peak
        chunks, new, decodes = rows["prefill_requests"], rows["prefill_tokens"], rows["decodes"]
        seen = rows["kv_tokens"] + decodes * (rows["steps"] - 1) / 2 + decodes
        computed = decodes + rows["draft_tokens"]
        q = new / np.maximum(chunks, 1)
        peak, size = gpu.flops["bf16"], model.dtype_bytes
        for g in attention_groups(model, layout, stage):
            read = np.minimum(seen, decodes * (g.window / 2 if g.chunked else g.window)) if g.window else seen
            met = read * computed / np.maximum(decodes, 1)
            ranks = layout.pcp
            flops = g.pair_flops(decode=False) * chunks * _pairs(g, q) / ranks + g.pair_flops(decode=True) * met / ranks
            queries = (g.query_elements(decode=False) * new + g.query_elements(decode=True) * g.dcp * computed) / ranks
            compute += g.layers * flops / peak
            moved += g.layers * (g.kv_token_bytes * (new + read / g.dcp / ranks) + size * queries)


def _pairs(group: AttentionGroup, q: Floats) -> Floats:
    """Query-key pairs of prompts of `q` tokens."""
    if not group.window:
        return q * (q + 1) / 2
    inside = np.minimum(q, group.window)
    pairs: Floats = inside * (inside + 1) / 2 + (q - inside) * (group.window / (2 if group.chunked else 1))
    return pairs
