"""Hugging Face configs for tests: public ones where the reference data are, and small ones of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {**GOOD, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE: dict[str, Any] = {
    **GOOD, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **GOOD, "model_type": "deepseek_v3", "num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "n_shared_experts": 2, "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
}  # fmt: skip


def config(tmp_path: Path, base: dict[str, Any] = GOOD, **changes: object) -> str:
    """A config.json of `base` with `changes` (None removes a field)."""
    fields = {k: v for k, v in {**base, **changes}.items() if v is not None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    return str(file)
