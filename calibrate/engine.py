"""The serving engine that is imitated: a preset's defaults (version and GPU class) plus what the user wrote.

Knows what all engines have in common, in one vocabulary (vLLM's words where it has one); what an engine calls it and
which values it allows is in `catalog/engine-*.yaml`, what its options mean in `calibrate/families/`. It does not know
how a scheduler uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from calibrate.families import RESOLVE
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.options import Chosen, family, family_of, find_preset, flat, preset_names, refusals
from servecast.errors import ServecastError

__all__ = ["EngineSpec", "FrontEndTime", "Graphs", "HostTime", "Overlap", "Speculation", "check_options",
           "preset_names", "resolve_engine"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostTime:
    """CPU seconds of one step: a synchronous engine adds `sync_*` to the GPU time, an asynchronous one overlaps
    `async_*` with it and adds `bubble_s`. Where no captured graph runs, launching a kernel takes `compiled_launch_s`,
    `uncaptured_launch_s` in a `cudagraph_mode` that captures none of such steps, or `eager_launch_s` with
    `enforce_eager`; or those of a layer together `layer_s`, if that is known. Drafts take `draft_step_s` of a step, and
    `draft_pass_s` of each pass of the draft model, besides. Evidence and assumptions: `catalog/engine-*.yaml`."""

    sync_base_s: float
    sync_per_sequence_s: float
    async_base_s: float
    async_per_sequence_s: float
    bubble_s: float
    compiled_launch_s: float
    uncaptured_launch_s: float
    eager_launch_s: float
    layer_s: float | None = None
    draft_step_s: float = 0.0
    draft_pass_s: float = 0.0

    def launching_s(self, eager: bool, compiled: bool, kernels: float) -> float:
        """Seconds in which a layer of so many `kernels` is launched, all eagerly or else `compiled` or not."""
        if self.layer_s is not None:
            return self.layer_s
        return kernels * (
            self.eager_launch_s if eager else self.compiled_launch_s if compiled else self.uncaptured_launch_s
        )


@dataclass(frozen=True, slots=True)
class FrontEndTime:
    """Seconds that the API server takes: for every request, and for every token of its prompt, for which the requests
    after it wait. Evidence: `catalog/engine-*.yaml`."""

    request_s: float
    prompt_token_s: float


@dataclass(frozen=True, slots=True)
class Graphs:
    """The batches for which the engine captures CUDA graphs, ascending: `decode` for steps of decodes alone, `mixed`
    by tokens for steps with prompts (none where these run without). `padded`: smaller batches are padded to the next
    larger one; else only these very sizes run as graphs. `compiled`: what no graph covers was compiled, layer by layer.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    padded: bool = True
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """Steps of `decode_tokens` tokens and more, where all ranks only decode, or of `prefill_tokens` are computed as two
    halves, of which one computes while the other's tokens are on their way to experts or back. `waits_for_all` and
    `by_least`: `dbo` in `catalog/engine-vllm.yaml`."""

    decode_tokens: int
    prefill_tokens: int
    waits_for_all: bool
    by_least: bool


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine speculates: `tokens` are drafted for a sequence in each step. `model` is what the user calls the
    draft model, if there is one to name. `at_admission`: a request that is admitted has KV blocks for drafts at once.
    Without drafts the engine would be asynchronous or not as `undrafted_async` says, and capture `undrafted_graphs`.
    """

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
    tokens: int
    model: str | None
    at_admission: bool
    undrafted_async: bool
    undrafted_graphs: Graphs

    @property
    def lookahead(self) -> int:
        """Tokens beyond those of a step for which a sequence has KV blocks: a draft model writes there."""
        return 0 if self.method == "ngram" else self.tokens

    @property
    def drops_last(self) -> bool:
        """The last block that a prefix cache finds is computed again: what drafts needs its hidden states."""
        return self.method in ("eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything about the engine that matters here, resolved.

    `options` are those of the engine by its own names, with their values; `sources` says where each came from ("user",
    or the preset's source), `notes` what was resolved. `scheduler` is the policy and `policy` what it is made with.

    What all engines have: at most `max_num_seqs` running requests, `max_num_batched_tokens` tokens in a step and
    `max_model_len` tokens of one sequence; KV blocks of `block_size` tokens, one of which may be a `null_block` that
    holds nothing. Their pool is `num_gpu_blocks_override`, or follows from the share `gpu_memory_utilization`, by
    `memory_rule` of the `total` memory of the GPU for everything, of the total for weights and pool (`static`), or of
    what is `free` once all else is there. `async_scheduling`: the host plans the next step while one runs. `names`:
    what the engine calls fields that it calls something else.

    Rules of a version: `blank_blocks_first` (`catalog/engine-vllm.yaml`), `follows_checkpoint_kv` (KV cache dtype
    "auto" is the one that a quantised checkpoint has scales for) and `strict_pool_check` (at start-up one sequence of
    `max_model_len` tokens must fit the KV pool less its null block, and an overridden pool is checked too).
    `fused_mib`: GPUs in a group -> the buffers up to which an all-reduce is fused with its norm.
    `fuses_quantisation`: of a whole tensor or to fp4, with the kernel before it.
    `fp32_router_from`: the tokens from which a 32-bit router runs on the CUDA cores (None: never).
    `long_step_factor`: how many times as long kernels take in steps of many tokens as where they were timed.
    `pipeline`: how batches follow each other through pipeline stages, as `sim.pipeline` says: "in_turn", "staggered",
    or "serial", one batch at a time; empty where that is not modelled. `fills_queue`: of that.
    `ubatch_tokens`: a step of more tokens is computed in pieces of so many, one after the other (llama.cpp).
    `overlap`: long steps of data parallel ranks are computed as two halves that overlap. `speculation`: it drafts.
    """

    preset: str
    engine: str
    version: str
    scheduler: str
    policy: Mapping[str, Any]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    gpu_memory_utilization: float
    memory_rule: Literal["total", "free", "static"]
    null_block: bool
    enable_prefix_caching: bool
    blank_blocks_first: bool
    async_scheduling: bool
    enforce_eager: bool
    graphs: Graphs
    fuse_allreduce_rms: bool
    fi_allreduce_fusion_max_size_mb: float | None
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    follows_checkpoint_kv: bool
    num_gpu_blocks_override: int | None
    strict_pool_check: bool
    host: HostTime
    front_end: FrontEndTime
    fused_mib: Mapping[int, float]
    fp32_router_from: int | None
    fuses_quantisation: bool
    long_step_factor: float
    cuda_graph_bytes: int
    names: Mapping[str, str]
    options: Mapping[str, Any]
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    pipeline: Literal["", "in_turn", "staggered", "serial"] = ""
    fills_queue: bool = False
    ubatch_tokens: int | None = None
    overlap: Overlap | None = None
    speculation: Speculation | None = None

    @property
    def undrafted(self) -> EngineSpec:
        """What its steps without drafts would be those of, if it did not speculate."""
        if (drafts := self.speculation) is None:
            return self
        return replace(self, speculation=None, async_scheduling=drafts.undrafted_async, graphs=drafts.undrafted_graphs)

    def name_of(self, field: str) -> str:
        """What this engine calls one of the fields here."""
        return self.names.get(field, field)


def resolve_engine(
    options: Mapping[str, object], gpu: Gpu, model: ModelSpec, layout: Parallelism | None = None
) -> EngineSpec:
    """The engine that `options` (only what the user wrote, 'preset' included) describe on this GPU and model.

    Raises `ServecastError` with every problem: unknown preset or option, an option that is not modelled or that the
    version does not have, a value of the wrong kind, and the engine's own start-up checks.
    """
    check_options(options)
    name, notes = find_preset(options["preset"])
    kind = family_of(name)
    preset, known = family(kind)["presets"][name], family(kind)["options"]
    user = flat({key: value for key, value in options.items() if key != "preset"}, known)
    chosen = Chosen({k: v for k, v in user.items() if k in known and v is not None}, preset["source"])
    for key, value in preset["defaults"].items():
        chosen.default(key, value)
    fields = RESOLVE[kind](chosen, layout or Parallelism(1), gpu, model, preset)
    fields["graphs"] = Graphs(**fields["graphs"])
    fields["overlap"] = Overlap(**halves) if (halves := fields.get("overlap")) else None
    if drafts := fields.get("speculation"):
        fields["speculation"] = Speculation(**drafts | {"undrafted_graphs": Graphs(**drafts["undrafted_graphs"])})
    return EngineSpec(
        preset=name,
        engine=kind,
        version=preset["source"].partition(" v")[2],
        scheduler=preset["scheduler"],
        host=HostTime(**{f"{key}_s": value for key, value in preset["host"].items()}),
        front_end=FrontEndTime(**{f"{key}_s": value for key, value in preset["front_end"].items()}),
        fp32_router_from=preset.get("fp32_router", {}).get(gpu.architecture, 1),
        fuses_quantisation=family(kind).get("fuses_quantisation", False),
        long_step_factor=family(kind).get("long_steps", {}).get(gpu.architecture, 1.0),
        options={key: chosen.values[key] for key in known},
        sources=chosen.sources,
        notes=(*notes, *preset.get("notes", ())),
        **fields,
    )


def check_options(options: Mapping[str, object]) -> None:
    """Raises `ServecastError` with every problem of the options that shows without a model and a GPU. An option set to
    None is not given: the preset's default holds."""
    if problems := refusals(options):
        raise ServecastError(*problems)
