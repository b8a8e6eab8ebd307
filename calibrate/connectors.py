"""What can move a KV cache between two instances: connectors of engines and the links that they use, as data.

Figures and their sources are in `catalog/connectors.yaml`. Knows no models or layouts: what one pair of instances makes
of it is `transfer.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from calibrate.catalog import read
from calibrate.hardware import Gpu
from servecast.errors import ServecastError, nearest, one_of

NODE_KINDS = {"NVLink": "nvlink", "PCIe": "pcie", "Infinity": "xgmi"}  # first word of a GPU's link -> kind


@dataclass(frozen=True, slots=True)
class TransferLink:
    """The way in and out of GPUs: one network adapter that `gpus` neighbours share, or the GPU's own link in its node.

    `bandwidth_bytes_per_s` is that of the adapter, per direction; `kind` says what goes with what (nvlink, pcie, xgmi,
    rdma, efa, ethernet).
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Transport:
    """What a connector's transfers cost over one kind of link.

    `fixed_s`: seconds of a request in which no link is busy; `share` (0..1] of the link's bandwidth that the wire
    reaches; `descriptor_s`: host seconds to post one descriptor; `posts_first`: nothing moves before all are posted,
    otherwise both go on at the same time. `measured`: somebody published these; otherwise they are assumed.
    """

    fixed_s: float
    share: float
    descriptor_s: float
    posts_first: bool
    measured: bool
    source: str


@dataclass(frozen=True, slots=True)
class Connector:
    """How an engine moves KV blocks; the words are explained at the top of `catalog/connectors.yaml`."""

    name: str
    engine: str
    moves: Literal["pull", "push"]
    pieces: Literal["whole", "chunks", "layers"]
    descriptor: Literal["block", "run", "layer"] | int
    unequal_tp: Literal["never", "always", "unreplicated", "not_shrinking"]
    slice: Literal["block", "token"]
    pp: Literal["none", "prefill", "equal", "equal_or_one", "any"]
    block_sizes: Literal["equal", "whole"]
    keeps: tuple[str, ...]
    equal_tp_for: tuple[str, ...]
    no_pp_for: tuple[str, ...]
    transports: Mapping[str, Transport]
    source: str
    until: str | None = None


def connector_names() -> list[str]:
    """The catalogue's connectors, in its order."""
    return list(read("connectors")["connectors"])


def transfer_link_names() -> list[str]:
    """The catalogue's network adapters, in its order."""
    return list(read("connectors")["links"])


def load_connector(name: str) -> Connector:
    """The connector with this name; `ServecastError` for any other word."""
    found: dict[str, Any] | None = read("connectors")["connectors"].get(name)
    if found is None:
        known = connector_names()
        raise ServecastError(f"connector: {name!r} is not known{nearest(str(name), known)}; known: {one_of(known)}")
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    transports = {kind: _transport(costs) for kind, costs in fields.pop("transports").items()}
    return Connector(name=name, transports=transports, **fields)


def load_transfer_link(name: str) -> TransferLink:
    """The network adapter with this name; `ServecastError` for any other word."""
    found: dict[str, Any] | None = read("connectors")["links"].get(name)
    if found is None:
        known = transfer_link_names()
        raise ServecastError(f"link: {name!r} is not known{nearest(str(name), known)}; known: {one_of(known)}")
    return TransferLink(found["name"], found["kind"], found["bandwidth"], found["gpus"])


def node_link(gpu: Gpu) -> TransferLink:
    """The link between the GPUs of one node, for two instances that share it."""
    return TransferLink(gpu.link.name, NODE_KINDS[gpu.link.name.split()[0]], gpu.link.bandwidth_bytes_per_s)


def _transport(costs: Mapping[str, Any]) -> Transport:
    return Transport(
        fixed_s=costs["fixed"],
        share=costs["share"],
        descriptor_s=costs["descriptor"],
        posts_first=costs["posts_first"],
        measured=costs["measured"],
        source=costs["source"],
    )
