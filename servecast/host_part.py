"""`host:` of a scenario: the times of the user's own host and front end, and of what is not modelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, model_validator

from calibrate.engine import EngineSpec
from servecast.mistakes import MistakeError
from servecast.parts import Part, Time
from servecast.units import duration_text


class ExtraPart(Part):
    """What something that is not modelled takes: of every `step`, whatever the step waits for, and of every `request`,
    before it reaches the engine."""

    step: Time = 0.0
    request: Time = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> ExtraPart:
        if not self.step and not self.request:
            raise MistakeError([": takes no time; give step or request, as {step: 0.3ms} or {request: 40ms}"])
        return self


class HostPart(Part):
    """The times of your host and front end in place of the preset's, and a factor on all kernels: what a measurement of
    your own deployment says (`servecast calibrate anchor` writes them). `extras`, by names of your own: the times of
    what is not modelled (LoRA adapters, structured output, a vision encoder), which come on top."""

    step: Time | None = None
    per_sequence: Time | None = None
    bubble: Time | None = None
    layer: Time | None = None
    request: Time | None = None
    prompt_token: Time | None = None
    kernels: Annotated[float, Field(gt=0.1, lt=10)] | None = None
    extras: dict[Annotated[str, Field(min_length=1)], ExtraPart] = Field({})

    def notes(self) -> Iterator[str]:
        """What of a result is the user's word."""
        given = self.model_dump(exclude_none=True, exclude={"extras"})
        if given:
            times = ", ".join(f"{name} {value}" for name, value in given.items())
            yield f"host times of your own, in place of the preset's: {times}"
        for name, extra in self.extras.items():
            times = " and ".join(f"{duration_text(seconds)} a {what}" for what, seconds in extra if seconds)
            yield f"{name}: {times}, a time of yours for what is not modelled"


def with_host(engine: EngineSpec, host: HostPart) -> EngineSpec:
    """The engine with the times of the host and the front end that the scenario gives.

    What an extra takes of a step is waited for after it: a bubble where the engine schedules ahead, else host time.
    """
    times = {
        "sync_base_s": host.step, "async_base_s": host.step, "bubble_s": host.bubble,
        "sync_per_sequence_s": host.per_sequence, "async_per_sequence_s": host.per_sequence,
        "layer_s": host.layer,
    }  # fmt: skip
    front_end = {"request_s": host.request, "prompt_token_s": host.prompt_token}
    own = replace(engine.host, **{name: s for name, s in times.items() if s is not None})
    front = replace(engine.front_end, **{name: s for name, s in front_end.items() if s is not None})
    step_s = sum(extra.step for extra in host.extras.values())
    request_s = sum(extra.request for extra in host.extras.values())
    return replace(
        engine,
        host=replace(own, sync_base_s=own.sync_base_s + step_s, bubble_s=own.bubble_s + step_s),
        front_end=replace(front, request_s=front.request_s + request_s),
    )
