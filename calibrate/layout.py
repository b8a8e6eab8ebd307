"""How one model instance is spread over GPUs, with vLLM's rules for what divides what.

GPUs are numbered as vLLM's ranks are (`initialize_model_parallel` of vllm/distributed/parallel_state.py): those of a
tensor parallel group are neighbours, then come the prefill context parallel ranks, the pipeline's stages, and the data
parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from calibrate.connectors import TransferLink
from calibrate.hardware import Gpu
from calibrate.model import ModelSpec
from servecast.errors import one_of

Group = Literal["tp", "dcp", "pcp", "dp", "experts", "stage"]
"""GPUs that talk to each other: of one tensor parallel group; those of it that share the tokens of a KV cache; one of
each prefill context parallel rank; one of each data parallel rank; all that share experts; two in neighbouring pipeline
stages."""
All2All = Literal["allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput", "deepep_auto"]
"""vLLM's words; "deepep_auto" is SGLang's `deepep_mode: auto`, low latency in steps of decodes alone."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The layout of one replica.

    `tp` GPUs each hold a slice of every layer of a stage, of which there are `pp`. `dp` such groups serve requests of
    their own, with their own KV cache, and share the experts, which are cut over all `tp` x `dp` GPUs: each expert, or
    with `ep` whole experts are dealt out, with them copies of `redundant_experts` that the engine balances loads by
    (EPLB). `expert_load` says how tokens spread over experts, as a skew of `calibrate.kernels.routing`; left out, the
    prices' own word holds, or "balanced" where experts have copies. `all2all_backend` is how data parallel ranks
    bring tokens to experts. `dcp` of the `tp` GPUs share the tokens of a sequence's KV cache. `pcp` such groups share
    the tokens of a step, each with all weights but the experts', which are cut over them too, and with all of the KV
    cache. `network` is the adapter between nodes, where there are several.
    """

    tp: int
    pp: int = 1
    dp: int = 1
    ep: bool = False
    dcp: int = 1
    pcp: int = 1
    network: TransferLink | None = None
    redundant_experts: int = 0
    expert_load: str | tuple[float, ...] = ""
    all2all_backend: All2All = "allgather_reducescatter"

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.sharing_experts * self.pp

    @property
    def sharing_experts(self) -> int:
        """GPUs of one pipeline stage, which share its experts."""
        return self.tp * self.pcp * self.dp

    @property
    def expert_tp(self) -> int:
        """Over how many GPUs each expert is cut."""
        return 1 if self.ep else self.sharing_experts

    @property
    def expert_ep(self) -> int:
        """To how many GPUs experts are dealt out."""
        return self.sharing_experts if self.ep else 1

    @property
    def skew(self) -> str | tuple[float, ...]:
        """How tokens spread over experts, empty where the prices say."""
        return self.expert_load or ("balanced" if self.redundant_experts else "")

    def all2all(self, decoding: bool) -> Parallelism:
        """This layout with the backend of steps of decodes alone, or of others."""
        if self.all2all_backend != "deepep_auto":
            return self
        return replace(self, all2all_backend="deepep_low_latency" if decoding else "deepep_high_throughput")

    def experts_here(self, count: int) -> int:
        """Of a layer's `count` experts and the copies, how many a GPU holds: the first ones hold one more where they do
        not divide (`determine_expert_map` of vllm/model_executor/layers/fused_moe/layer.py)."""
        return -(-(count + self.redundant_experts) // self.expert_ep)

    def stages(self, layers: int) -> list[int]:
        """Layers of each pipeline stage: what is left over goes to the middle ones first (`get_pp_indices` of vLLM)."""
        each, left = divmod(layers, self.pp)
        return [each + (1 <= self.pp - 1 - stage <= left) for stage in range(self.pp)]

    def ranks(self, group: Group, stage: int = 0) -> list[int]:
        """The GPUs of the first group of a kind in a stage; of "stage", a GPU and its like in the next stage."""
        wide = self.tp * self.pcp  # GPUs of a stage of one data parallel rank
        first = stage * wide
        if group == "stage":
            return [first, first + wide]
        inner = range({"tp": self.tp, "experts": self.tp, "dcp": self.dcp}.get(group, 1))
        middle = range(self.pcp if group in ("pcp", "experts") else 1)
        outer = range(self.dp if group in ("dp", "experts") else 1)
        return [first + d * self.pp * wide + p * self.tp + t for d in outer for p in middle for t in inner]

    def nodes(self, group: Group, gpu: Gpu, stage: int = 0) -> int:
        """How many nodes these GPUs are on, or racks where a rack's nodes share the GPUs' link. A replica that needs
        several begins with one of its own."""
        return len({rank // gpu.link_gpus for rank in self.ranks(group, stage)})


def check_nodes(layout: Parallelism, gpu: Gpu) -> list[str]:
    """Why the GPUs of a replica cannot reach each other; empty when they can."""
    if layout.gpus <= gpu.link_gpus or layout.network:
        return []
    sizes = " x ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "dp"))
    sizes += f" x pcp {layout.pcp}" if layout.pcp > 1 else ""
    return [
        f"{layout.gpus} GPUs ({sizes}) are more than the {gpu.link_gpus} {gpu.id} that {gpu.link.name} joins, and no "
        f"network between nodes is given: name an adapter, or use at most {gpu.link_gpus} GPUs"
    ]


def check_layout(model: ModelSpec, layout: Parallelism, gpu: Gpu) -> list[str]:
    """Every reason why `model` cannot run under `layout` on nodes of `gpu`; empty when it can."""
    problems = [
        f"{name} is {size!r}; expected a whole number of at least 1"
        for name in ("tp", "pp", "dp", "dcp", "pcp")
        if isinstance(size := getattr(layout, name), bool) or not isinstance(size, int) or size < 1
    ]
    copies = layout.redundant_experts
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 0:
        problems.append(f"redundant_experts is {copies!r}; expected a whole number of at least 0")
    if problems:
        return problems
    tp = layout.tp
    allowed = [n for n in range(1, gpu.gpus_per_node + 1) if not _clashes(model, n, layout.ep)]
    fix = f"; {model.name} on {gpu.id} allows tp {one_of(map(str, allowed))}"
    problems = [f"tp {tp} {clash}{fix}" for clash in _clashes(model, tp, layout.ep)]
    if tp > gpu.gpus_per_node:
        problems.append(f"tp {tp} exceeds the {gpu.gpus_per_node} GPUs of a {gpu.id} node{fix}")
    return problems or _more_clashes(model, layout)


def _more_clashes(model: ModelSpec, layout: Parallelism) -> list[str]:
    """What is wrong with the other ways to spread a model."""
    problems = []
    if layout.pp > model.layers:
        problems.append(f"pp {layout.pp} exceeds the {model.layers} layers of {model.name}")
    experts, over = model.experts, layout.sharing_experts
    ways = "tp x dp" if layout.pcp == 1 else "tp x pcp x dp"
    if layout.all2all_backend not in (words := get_args(All2All)):
        problems.append(f"all2all_backend is {layout.all2all_backend!r}; expected {one_of(words)}")
    elif layout.all2all_backend != "allgather_reducescatter" and not layout.ep:
        problems.append(
            f"all2all_backend {layout.all2all_backend}: it brings tokens to experts dealt out whole; set ep"
        )
    if layout.ep and not experts:
        problems.append(f"ep: {model.name} has no experts to deal out; leave it out")
    elif experts and layout.ep and over > experts.count:
        problems.append(f"ep: {over} GPUs ({ways}) are more than the {experts.count} experts of {model.name}")
    elif layout.redundant_experts and not (layout.ep and experts):
        problems.append(f"redundant_experts {layout.redundant_experts}: only dealt out experts have copies; set ep")
    elif experts and layout.redundant_experts and (experts.count + layout.redundant_experts) % over:
        problems.append(
            f"redundant_experts {layout.redundant_experts}: {over} GPUs ({ways}) do not divide the "
            f"{experts.count + layout.redundant_experts} experts that these make of {model.name}'s {experts.count}"
        )
    elif experts and not layout.ep and experts.inter % over:
        key = "dp" if layout.pcp == 1 else "pcp"
        problems.append(
            f"{key} {getattr(layout, key)}: {over} GPUs ({ways}) do not divide the experts' intermediate size "
            f"{experts.inter}; lower it, or deal whole experts out with ep"
        )
    return problems + _shared_tokens(model, layout)


def _shared_tokens(model: ModelSpec, layout: Parallelism) -> list[str]:
    """What is wrong with sharing the tokens of sequences (dcp) or of steps (pcp) between GPUs: vLLM's checks
    (`verify_with_parallel_config` of vllm/config/model.py, `validate_config` of vllm/v1/worker/gpu/pcp_manager.py).
    Which versions have it at all is `calibrate.context`'s."""
    problems = []
    dcp, pcp = layout.dcp, layout.pcp
    shared = layout.tp if model.latent else max(1, layout.tp // model.kv_heads)  # GPUs that hold the same KV cache
    if layout.tp % dcp:
        problems.append(f"dcp {dcp} does not divide tp {layout.tp}")
    elif dcp > shared:
        problems.append(f"dcp {dcp}: only {shared} of {layout.tp} GPUs hold the same KV heads; at most {shared}")
    elif not model.latent and model.heads // model.kv_heads % dcp:
        problems.append(
            f"dcp {dcp} does not divide the {model.heads // model.kv_heads} query heads per KV head of {model.name}"
        )
    if pcp > 1 and dcp > 1:
        problems.append(f"pcp {pcp}: with dcp vLLM runs models with sparse latent attention only; set dcp or pcp to 1")
    if pcp > 1 and layout.dp > 1:
        problems.append(f"pcp {pcp}: prompts shared between GPUs of data parallel ranks are not modelled; use dp 1")
    if pcp > 1 and layout.all2all_backend != "allgather_reducescatter":
        problems.append(
            f"all2all_backend {layout.all2all_backend}: with pcp only allgather_reducescatter is modelled; leave it out"
        )
    return problems


def _clashes(model: ModelSpec, tp: int, ep: bool = False) -> list[str]:
    sizes = [("attention heads", model.heads), ("padded vocabulary", model.padded_vocab)]
    if model.dense_layers:
        sizes.insert(1, ("MLP's intermediate size", model.intermediate))
    if experts := model.experts:
        sizes += [
            ("experts' intermediate size", 0 if ep else experts.inter),
            ("shared experts' size", experts.shared_inter),
        ]
    if recurrent := model.recurrent:
        sizes += [("recurrent layers' width", recurrent.inner), ("recurrent layers' state", recurrent.state)]
    clashes = [f"does not divide the {what} {size}" for what, size in sizes if size % tp]
    if model.latent is None and model.kv_heads % tp and tp % model.kv_heads:
        clashes.append(f"neither divides the {model.kv_heads} KV heads nor is a multiple of them")
    return clashes or _cut_blocks(model, tp, ep)


def _cut_blocks(model: ModelSpec, tp: int, ep: bool) -> list[str]:
    """The first projection of which the split would cut a block of weights that share a scale, which vLLM refuses."""
    for projection in model.projections(tp) if tp > 1 else ():
        rows, columns = projection.storage.rows, projection.storage.columns
        if ep and projection.name.startswith("experts"):
            continue  # whole ones are dealt out
        outputs, inputs = projection.split == "outputs", projection.split == "inputs"
        cuts = [(n, rows) for n in projection.parts if outputs and rows and n % rows]
        cuts += [(projection.k, columns)] if inputs and columns and projection.k % columns else []
        if cuts and projection.storage.weights != "mxfp4":  # which is padded instead
            size, block = cuts[0]
            return [f"cuts {projection.name} to {size} a GPU, no multiple of the {block} weights that share a scale"]
    return []
