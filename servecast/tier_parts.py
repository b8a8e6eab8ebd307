"""KV tiers as a scenario writes them: places beyond the GPUs that keep KV."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from calibrate.connectors import load_transfer_link
from servecast.mistakes import MistakeError
from servecast.parts import Count, Part, Time, known
from servecast.units import Rate, Size

WRITE_BACK = (
    "write_back is not modelled: vLLM and LMCache write KV as it is computed (write_through), not when the GPU loses "
    "it, and SGLang's radix cache has no tiers here; take write_through or write_through_selective"
)


class TierPart(Part):
    """One place that keeps KV: the memory of the host, a disk, or a store somewhere else. `capacity` is what it has for
    a replica's KV, or of a `shared` one what all replicas of the pool have together. `read` and `write`: what it gives
    and takes, of a shared one in all; of the host, what each GPU's link does (unset, that of the catalogue). `link`:
    the network adapter of each GPU on the way there. `latency`: until what is moved is there, beside that (unset, 20 us
    of a host, 200 us of a disk, 1 ms of a remote one). `name` is what reports call it."""

    kind: Literal["host", "disk", "remote"]
    name: Annotated[str, Field(min_length=1)] | None = None
    capacity: Size
    read: Rate | None = None
    write: Rate | None = None
    link: Annotated[str, known(load_transfer_link)] | None = None
    latency: Time | None = None
    shared: bool = False


class KvTiersPart(Part):
    """Places beyond the GPUs that keep KV, the nearest first. KV is kept in chunks of `chunk` tokens (unset, a KV
    block). `load`: requests wait for what they load while others go on (async), or the step that begins with them does
    (sync). With `write_through` all that is computed is written to every tier, with `write_through_selective` the
    prompts' beginnings that `hits` requests have asked for. `prefetch`: while a request waits for its turn, farther
    tiers give what they have of its prompt to the host's memory. A list is short for its `tiers`."""

    tiers: list[TierPart] = Field(min_length=1)
    chunk: Count | None = None
    load: Literal["async", "sync"] = "async"
    write_policy: Literal["write_through", "write_through_selective"] = "write_through"
    hits: Annotated[int, Field(ge=2, le=1000)] = 2
    prefetch: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and "tiers" not in value and value.keys() & TierPart.model_fields:
            raise MistakeError([": this is one tier; write it as a list, for example [{kind: host, capacity: 64GiB}]"])
        return {"tiers": value} if isinstance(value, list) else value

    @field_validator("write_policy", mode="before")
    @classmethod
    def _no_write_back(cls, value: Any) -> Any:
        if value == "write_back":
            raise ValueError(WRITE_BACK)
        return value
