"""For how long GPUs were there, and what they did: read from a result's steps and from its replicas' lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.result import Result


@dataclass(frozen=True, slots=True)
class Usage:
    """A pool's GPU-seconds: all of them (`gpu_s`: idle, starting and draining GPUs too), those in steps of decodes
    alone and those in steps with prompts. `gpus`: the most at one time."""

    gpu: str
    role: str
    gpus: int
    gpu_s: float
    decode_s: float
    prompt_s: float

    @property
    def idle_s(self) -> float:
        """GPU-seconds outside steps."""
        return self.gpu_s - self.decode_s - self.prompt_s


def usage_of(result: Result, gpus: Sequence[str]) -> list[Usage]:
    """A pool each; `gpus` are the pools' GPU ids. From time 0 to the last token, as `gpu_seconds` of the summary is.

    Steps of pipeline stages overlap: a replica is busy at most all of the time.
    """
    deployment, presence, duration = result.deployment, result.presence, result.duration_s
    busy = np.zeros((2, deployment.replicas))  # steps of decodes alone, steps with prompts
    for block in result.step_blocks():
        seconds, replica = block["end_s"] - block["start_s"], block["replica"].astype(np.int64)
        for kind in (0, 1):
            mine = (block["prefill_tokens"] > 0) == bool(kind)
            busy[kind] += np.bincount(replica[mine], seconds[mine], minlength=deployment.replicas)
    found = []
    for pool, gpu, first in zip(deployment.pools, gpus, deployment.first, strict=False):
        numbers = range(first, first + pool.replicas)
        existed, most = pool.replicas * duration, pool.replicas
        if presence is not None:
            existed, most = presence.seconds(numbers, duration), presence.most(numbers)
        decode_s, prompt_s = (float(busy[kind, first : first + pool.replicas].sum()) for kind in (0, 1))
        fits = min(1.0, existed / (decode_s + prompt_s)) if decode_s + prompt_s else 1.0
        scale = pool.gpus * fits
        found.append(Usage(gpu, pool.role, most * pool.gpus, pool.gpus * existed, scale * decode_s, scale * prompt_s))
    return found
