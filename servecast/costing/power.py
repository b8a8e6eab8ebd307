"""What GPUs draw, estimated from what they did: idle, steps of decodes alone, steps with prompts.

The model is an estimate, good to about a third (`calibrate/catalog/gpus.yaml` has the evidence): what a step draws
depends on its batch, clocks and kernels, which it does not know. Nothing else here knows watts.
"""

from __future__ import annotations

from dataclasses import dataclass

from calibrate.hardware import Gpu
from servecast.costing.part import PowerPart
from servecast.costing.usage import Usage
from servecast.errors import ServecastError


@dataclass(frozen=True, slots=True)
class Draw:
    """Watts at the meter for one GPU with its share of the server: idle, in steps of decodes, in steps with prompts."""

    idle_w: float
    decode_w: float
    prompt_w: float

    def energy_j(self, usage: Usage) -> float:
        """Joules of the GPU-seconds of a pool: `idle_w (gpu_s - busy_s) + decode_w decode_s + prompt_w prompt_s`."""
        return self.idle_w * usage.idle_s + self.decode_w * usage.decode_s + self.prompt_w * usage.prompt_s


def draw_of(gpu: Gpu, part: PowerPart) -> Draw:
    """`(tdp x share + rest) x pue` of each state. Raises ServecastError where the GPU's TDP is not known."""
    tdp = part.tdp.get(gpu.id, gpu.power.tdp_w)
    if tdp is None:
        raise ServecastError(
            f"cost.power.tdp: no datasheet says what {gpu.id} draws; give it: tdp: {{{gpu.id}: WATTS}}"
        )
    shares = (
        getattr(gpu.power, state) if (own := getattr(part, state)) is None else own
        for state in ("idle", "decode", "prompt")
    )
    return Draw(*((tdp * share + part.rest) * part.pue for share in shares))
