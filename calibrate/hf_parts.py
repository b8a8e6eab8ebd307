"""The parts of a Hugging Face config that some model types have: experts, latent attention, windows, recurrent layers.

One reader for each way of writing them; which model type writes how is `hf_config.FAMILIES`' business. Readers of
experts and recurrent layers also give the layers that have them.
"""

from __future__ import annotations

from calibrate.hf_fields import Fields
from calibrate.parts import Experts, Latent, Recurrent, Window


def mixtral_experts(fields: Fields, layers: int) -> tuple[Experts, list[int]]:
    """Every layer has experts, of the width `intermediate_size`: Mixtral, gpt-oss, MiniMax-M2."""
    kind = fields.get("model_type")
    experts = Experts(
        count=fields.size("num_local_experts"),
        topk=fields.size("num_experts_per_tok"),
        inter=fields.size("intermediate_size"),
        layers=layers,
        bias=kind == "gpt_oss",
        score_bias=kind == "minimax_m2" and fields.flag("use_routing_bias"),
        router_bytes=4 if kind == "minimax_m2" else 0,
    )
    return experts, list(range(layers))


def qwen_experts(fields: Fields, layers: int) -> tuple[Experts, list[int]]:
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name; Qwen2 adds a gated shared expert."""
    step = fields.size("decoder_sparse_step", default=1)
    only = fields.get("mlp_only_layers") or []
    if not isinstance(only, list):
        fields.wrong("mlp_only_layers", "a list of layers")
        only = []
    shared = fields.size("shared_expert_intermediate_size", default=0, least=0)
    routed = [i for i in range(layers) if i not in only and (i + 1) % step == 0]
    experts = Experts(
        count=fields.size("num_experts"),
        topk=fields.size("num_experts_per_tok"),
        inter=fields.size("moe_intermediate_size"),
        layers=len(routed),
        shared_inter=shared,
        shared_gate=shared > 0,
    )
    return experts, routed


def deepseek_experts(fields: Fields, layers: int) -> tuple[Experts, list[int]] | None:
    """All but the first `first_k_dense_replace` layers (every `moe_layer_freq`-th), with shared experts that are as
    wide as `n_shared_experts` routed ones: DeepSeek, Kimi-K2, GLM-4.5."""
    if fields.get("n_routed_experts") is None:
        return None
    first, every = fields.size("first_k_dense_replace", default=0, least=0), fields.size("moe_layer_freq", default=1)
    inter, glm = fields.size("moe_intermediate_size"), fields.get("model_type") == "glm4_moe"
    routed = [i for i in range(first, layers) if i % every == 0]
    experts = Experts(
        count=fields.size("n_routed_experts"),
        topk=fields.size("num_experts_per_tok"),
        inter=inter,
        layers=len(routed),
        shared_inter=inter * fields.size("n_shared_experts", default=0, least=0),
        score_bias=glm or fields.get("topk_method") == "noaux_tc",
        router_bytes=4 if glm else 0,
    )
    return experts, routed


def llama4_experts(fields: Fields, layers: int) -> tuple[Experts, list[int]]:
    """Every `interleave_moe_layer_step`-th layer, with one shared expert as wide as the routed ones."""
    step, inter = fields.size("interleave_moe_layer_step", default=1), fields.size("intermediate_size")
    routed = list(range(step - 1, layers, step))
    experts = Experts(
        count=fields.size("num_local_experts"),
        topk=fields.size("num_experts_per_tok"),
        inter=inter,
        layers=len(routed),
        shared_inter=inter,
    )
    return experts, routed


def latent(fields: Fields, layers: int) -> Latent:
    """The sizes of multi-head latent attention."""
    return Latent(
        q_rank=fields.size("q_lora_rank", default=0, least=0),
        kv_rank=fields.size("kv_lora_rank"),
        nope=fields.size("qk_nope_head_dim"),
        rope=fields.size("qk_rope_head_dim"),
        value=fields.size("v_head_dim"),
    )


def delta_nets(fields: Fields, layers: int) -> tuple[Recurrent, list[int]]:
    """Gated delta nets in the layers that `layer_types` calls linear, or in all but every `full_attention_interval`-th:
    Qwen3-Next, Qwen3.5. They project to queries and keys, values and their gates, and two numbers a value head."""
    every = fields.size("full_attention_interval", default=4)
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    heads, width = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    types = fields.get("layer_types")
    if types and (not isinstance(types, list) or len(types) < layers):
        fields.wrong("layer_types", f"a list of {layers} entries, one a layer")
        types = None
    linear = [i for i in range(layers) if (types[i] == "linear_attention" if types else (i + 1) % every)]
    found = Recurrent(
        layers=len(linear),
        inputs=2 * keys + 2 * heads * width + 2 * heads,
        inner=heads * width,
        channels=2 * keys + heads * width,
        kernel=fields.size("linear_conv_kernel_dim", default=4),
        state=heads * width * fields.size("linear_key_head_dim"),
        state_bytes=4 if fields.get("mamba_ssm_dtype") == "float32" else 2,
    )
    return found, linear


def sliding(fields: Fields, layers: int) -> tuple[Window, ...]:
    """`sliding_window` in the layers that `layer_types` names; without it in those that the model type's own rule
    names: all of Mistral's, every second of Gemma 2's and gpt-oss's, all but every sixth of Gemma 3's, and of Qwen's
    those from `max_window_layers` on, where `use_sliding_window` turns it on."""
    kind, types = fields.get("model_type"), fields.get("layer_types")
    if fields.get("sliding_window") is None or not fields.flag("use_sliding_window", kind not in QWENS):
        return ()
    size, period = fields.size("sliding_window"), 1
    if kind in ("gemma2", "gpt_oss", "gemma3_text"):
        period = fields.size("sliding_window_pattern", default=6 if kind == "gemma3_text" else 2)
    start = fields.size("max_window_layers", default=0, least=0) if kind in QWENS and not types else 0

    def by_rule(i: int) -> bool:
        return i >= start and (period == 1 or (i + 1) % period != 0)

    count = fields.layers("layer_types", lambda entry: entry == "sliding_attention", by_rule, layers)
    return (Window(count, size),) if count else ()


def llama4_chunks(fields: Fields, layers: int) -> tuple[Window, ...]:
    """Chunked attention in the layers with rotary positions: all but every fourth, or as `no_rope_layers` says (there
    1 means that the layer has them)."""
    if fields.get("attention_chunk_size") is None:
        return ()
    count = fields.layers("no_rope_layers", lambda entry: entry == 1, lambda i: (i + 1) % 4 != 0, layers)
    return (Window(count, fields.size("attention_chunk_size"), chunked=True),) if count else ()


QWENS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mimo")
