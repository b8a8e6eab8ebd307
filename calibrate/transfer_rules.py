"""Which pairs of instances a connector does not serve, and why: a message for each thing that is wrong.

The engines refuse the same when the two sides meet, or crash: nixl/base_worker.py (`_validate_remote_parallel_config`,
`add_remote_agent`), mooncake/mooncake_connector.py and p2p/p2p_nccl_connector.py of vLLM 0.19 and 0.32;
disaggregation/common/conn.py, mooncake/conn.py and nixl/conn.py of SGLang 0.5.9. Knows no bytes or seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from calibrate.connectors import Connector
from calibrate.model import ModelSpec
from calibrate.routes import Side
from calibrate.serving import served
from servecast.errors import one_of

STAGES = {
    "none": "none on either side",
    "prefill": "stages on the prefill side only",
    "equal": "the same on both sides",
    "equal_or_one": "the same on both sides, or 1 on the decode side",
}
"""What a connector's `pp` allows."""


def refusals(model: ModelSpec, source: Side, destination: Side, connector: Connector) -> list[str]:
    """Every reason why `connector` does not move this model's KV cache from `source` to `destination`; empty when it
    does. That each side can run the model at all is `check_layout`'s business."""
    ours, theirs = served(model, source.engine), served(model, destination.engine)
    kinds = {"chunk" if window.chunked else "window" for window in ours.windows}
    if ours.recurrent:
        kinds.add("state")
    return [
        *_meeting(source, destination, connector),
        *_tensor_parallel(ours, kinds, source.layout.tp, destination.layout.tp, connector),
        *_pipeline(kinds, source.layout.pp, destination.layout.pp, connector),
        *_caches(ours, theirs, source, destination, connector),
    ]


def _meeting(source: Side, destination: Side, connector: Connector) -> Iterator[str]:
    for name, side in (("prefill", source), ("decode", destination)):
        if side.engine.engine != connector.engine:
            yield f"connector: {connector.name} is {connector.engine}'s, the {name} side's engine {side.engine.preset}"
    here, there = source.link, destination.link
    if here.kind != there.kind:
        yield f"link: {here.name} on the prefill side is {here.kind}, {there.name} on the decode side {there.kind}"
    elif here.kind not in connector.transports:
        yield (
            f"connector: no figures are known for {connector.name} over {here.kind} ({here.name}); there are some for "
            f"{one_of(connector.transports)}: use one of these, or add measured ones to its transports"
        )


def _tensor_parallel(model: ModelSpec, kinds: set[str], p: int, d: int, connector: Connector) -> Iterator[str]:
    if p == d:
        return
    pair, name, heads = f"tp: {p} on the prefill side, {d} on the decode side", connector.name, model.kv_heads
    copied = not model.latent and max(p, d) > heads
    most = f"may not exceed the {heads} KV heads of {model.name}"
    if p % d and d % p:
        yield f"{pair}: one must divide the other"
    elif connector.unequal_tp == "never":
        yield f"{pair}: {name} needs the same on both"
    elif connector.unequal_tp == "unreplicated" and copied:
        yield f"{pair}: with {name}, different ones {most}"
    elif connector.unequal_tp == "not_shrinking" and copied and p > d and not model.recurrent:
        yield f"{pair}: with {name}, a larger one on the prefill side {most}"
    elif found := kinds & set(connector.equal_tp_for):
        yield f"{pair}: {name} needs the same on both for layers that keep a {one_of(sorted(found))}"


def _pipeline(kinds: set[str], p: int, d: int, connector: Connector) -> Iterator[str]:
    pair, name = f"pp: {p} on the prefill side, {d} on the decode side", connector.name
    allowed = {"none": p == d == 1, "prefill": d == 1, "equal": p == d, "equal_or_one": d in (1, p)}
    if not allowed.get(connector.pp, True):
        yield f"{pair}: {name} allows {STAGES[connector.pp]}"
    elif max(p, d) > 1 and (found := kinds & set(connector.no_pp_for)):
        yield f"{pair}: {name} allows no stages for layers that keep a {one_of(sorted(found))}"


def _caches(ours: ModelSpec, theirs: ModelSpec, source: Side, destination: Side, connector: Connector) -> Iterator[str]:
    if ours.recurrent and "state" not in connector.keeps:
        yield f"connector: {connector.name} does not move the states of recurrent layers, which {ours.name} has"
    for key in ("dcp", "pcp"):
        if max(getattr(source.layout, key), getattr(destination.layout, key)) > 1:
            yield f"{key}: transfers between instances whose ranks share tokens are not modelled; use 1"
    here, there = ours.kv_dtype or ours.dtype, theirs.kv_dtype or theirs.dtype
    if here != there:
        yield f"kv_cache_dtype: {here} on the prefill side, {there} on the decode side: blocks move unchanged, set one"
    size, other = source.engine.block_size, destination.engine.block_size
    pair = f"{source.engine.name_of('block_size')}: {size} on the prefill side, {other} on the decode side"
    if connector.block_sizes == "equal" and size != other:
        yield f"{pair}: {connector.name} needs the same on both"
    elif other % size:
        yield f"{pair}: the decode side's must be a multiple of the prefill side's"
