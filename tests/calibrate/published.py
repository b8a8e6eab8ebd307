"""Small folders in the formats of published kernel tables, with invented times that an H100 could take."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

PEAK, BANDWIDTH = 989e12, 3.35e12
Row = dict[str, object]


def gemm_ms(m: int, n: int, k: int) -> float:
    """4 us and the larger of FLOPs and weights at 60 % of an H100."""
    return 1e3 * (4e-6 + max(2 * m * n * k / PEAK, 2 * n * k / BANDWIDTH) / 0.6)


def attention_ms(sequences: int, q: int, context: int, heads: int, kv_heads: int, head_dim: int) -> float:
    pairs = sequences * q * (context + (q + 1) / 2)
    moved = 4 * sequences * (context + q) * kv_heads * head_dim
    return 1e3 * (6e-6 + max(4 * pairs * heads * head_dim / PEAK, moved / BANDWIDTH) / 0.5)


def aiconfigurator_rows() -> dict[str, list[Row]]:
    """Table -> rows, with the columns of vLLM 0.24's; step is 0 in context, the cached tokens in generation."""
    gemm = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": gemm_ms(m, n, k), "kernel_source": f"lib_{dtype}"}
        for dtype in ("bfloat16", "fp8_block")
        for m in (1, 64, 8192)
        for n, k in ((256, 512), (6144, 4096))
    ]
    shape = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "beam_width": 1, "attn_dtype": "bfloat16"}
    context = [
        {**shape, "batch_size": b, "isl": q, "step": 0, "kv_cache_dtype": "bfloat16", "window_size": window}
        | {"latency": attention_ms(b, min(q, window or q), 0, 32, 8, 128), "kernel_source": "flash"}
        for b, q, window in ((1, 128, 0), (2, 4096, 0), (2, 4096, 1024))
    ]
    generation = [
        {**shape, "batch_size": b, "isl": 1, "step": step, "kv_cache_dtype": "fp8", "window_size": 0}
        | {"latency": attention_ms(b, 1, step, 32, 8, 128), "kernel_source": "flash"}
        for b, step in ((1, 1023), (64, 8191))
    ]
    moe_size = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128, "moe_tp_size": 1}
    moe = [
        {**moe_size, "num_tokens": tokens, "moe_ep_size": 2, "moe_dtype": dtype, "distribution": "balanced"}
        | {"latency": 0.3 + tokens * 1e-4, "kernel_source": "experts"}
        for tokens in (1, 4096)
        for dtype in ("bfloat16", "int4_wo", "w4a8_mxfp4_mxfp8")
    ]
    mla_shape = {"model": "deepseek-ai/DeepSeek-V3", "tp_size": 1, "gemm_type": "fp8_block", "kernel_source": "mla"}
    mla = {**mla_shape, "mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_heads": 16, "batch_size": 4}
    latents = {"mla_dtype": "bfloat16", "num_heads": 16, "batch_size": 4}
    context_mla = [
        {**latents, "tp_size": tp, "kv_cache_dtype": "bfloat16", "isl": 2048, "step": 0, "latency": tp * 0.4}
        | {"kernel_source": "default"}
        for tp in (4, 8)
    ]
    generation_mla = [
        {**latents, "tp_size": 4, "kv_cache_dtype": dtype, "isl": 1, "step": 2047, "latency": 0.02}
        | {"kernel_source": "flash_attention"}
        for dtype in ("bfloat16", "fp8")
    ]
    return {
        "gemm": gemm,
        "context_mla": context_mla,
        "generation_mla": generation_mla,
        "context_attention": context,
        "generation_attention": generation,
        "moe": moe,
        "mla_context_module": [{**mla, "isl": 2048, "step": 0, "latency": 2.5}],
        "mla_generation_module": [{**mla, "isl": 1, "step": 2048, "latency": 0.11}],
        "computescale": [
            {"m": 1, "k": 4096, "quant_dtype": "fp8", "latency": 0.0005, "kernel_source": "dyn_minus_static"},
            {"m": 64, "k": 4096, "quant_dtype": "fp8", "latency": 0.0, "kernel_source": "dyn_minus_static"},
        ],
        "scale_matrix": [
            {"m": m, "k": 4096, "quant_dtype": "fp8", "latency": 0.002, "kernel_source": "static"} for m in (1, 64)
        ],
        "custom_allreduce": [
            {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": size, "latency": 0.01, "backend": backend}
            | {"kernel_source": "custom"}
            for size in (1024, 65536)
            for backend in ("vllm_graph", "vllm_eager")
        ],
        "nccl": [
            {"op_name": op, "nccl_dtype": dtype, "num_gpus": 8, "message_size": 1048576, "latency": 0.05}
            | {"kernel_source": "NCCL"}
            for op in ("all_gather", "alltoall")
            for dtype in ("half", "int8")
        ],
    }


def deepep_rows(nodes: Sequence[int], factor: float = 1.0) -> dict[str, list[Row]]:
    """DeepEP's two tables for so many nodes: microseconds, 64 tokens of 2048 elements; `factor` times the time."""
    sizes = {"kernel_source": "deepep", "hidden_size": 2048, "num_token": 64, "num_experts": 128}
    low = {"dispatch_avg_t_us": 14.0 * factor, "combine_avg_t_us": 18.0 * factor}
    high = {"dispatch_transmit_us": 30.0 * factor, "combine_transmit_us": 37.0 * factor}
    high |= {"dispatch_notify_us": 2.0, "combine_notify_us": 3.0}
    return {
        "wideep_deepep_ll": [
            {**sizes, **low, "node_num": n, "num_topk": topk} for n in nodes for topk in ((8,) if n > 1 else (8, 2))
        ],
        "wideep_deepep_normal": [
            {**sizes, **high, "node_num": n, "num_topk": 8, "dispatch_sms": sms, "combine_sms": sms}
            for n in nodes
            for sms in (20, 24)
        ],
    }


AREAS = {"gemm": "gemm", "moe": "moe", "computescale": "quantize", "scale_matrix": "quantize"} | {
    **dict.fromkeys(("context_attention", "generation_attention"), "attention"),
    **dict.fromkeys(("mla_context_module", "mla_generation_module", "context_mla", "generation_mla"), "mla"),
    **dict.fromkeys(("custom_allreduce", "nccl", "wideep_deepep_ll", "wideep_deepep_normal"), "comm"),
}


def write_aiconfigurator(
    folder: Path, tables: Mapping[str, Sequence[Row]], csv: bool = False, version: str = "0.24.0", engine: str = "vllm"
) -> Path:
    """A system's folder in either form; returns it."""
    for name, rows in tables.items():
        library = {"nccl": "nccl", "context_mla": "trtllm", "generation_mla": "sglang"}.get(name, engine)
        frame = pl.DataFrame([{"version": version, "device": "NVIDIA H100 80GB HBM3", **row} for row in rows])
        if csv:
            folder.mkdir(parents=True, exist_ok=True)
            quantize = "quantize_" if AREAS[name] == "quantize" else ""
            path = folder / f"{quantize}{name}__{library}{version}.csv.gz"
            path.write_bytes(gzip.compress(frame.write_csv().encode()))
        else:
            path = folder / AREAS[name] / library / version / f"{name}_perf.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            frame.write_parquet(path)
    return folder


CONFIG = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000}
CONFIG |= {"intermediate_size": 2816, "num_experts": 32, "num_experts_per_tok": 4}


def write_llmservingsim(root: Path, tp: int = 2) -> Path:
    """`profiles/rtx4090/toy/tp<N>` and `model_configs/`; returns `profiles`. Times in microseconds."""
    tables = root / "profiles" / "rtx4090" / "toy" / f"tp{tp}"
    tables.mkdir(parents=True)
    (root / "model_configs").mkdir(exist_ok=True)
    (root / "model_configs" / "Toy-1B.json").write_text(json.dumps(CONFIG))
    meta = {"model": "maker/Toy-1B", "gpu": "GeForce toy", "vllm_version": "0.19.0", "profiled_at": "2026-08-17T10:00"}
    (tables.parent / "meta.json").write_text(json.dumps(meta))
    layers = "embedding layernorm qkv_proj qk_norm rotary_emb o_proj gate_up_proj act_fn down_proj final_layernorm wat"
    dense = [f"{layer},{tokens},{5 + tokens / 10}" for layer in layers.split() for tokens in (1, 256)]
    (tables / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]) + "\n")
    (tables / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,8,60.5\nsampler,8,12\n")
    attention = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    attention += ["512,0,0,0,40", "512,1024,0,0,90", "0,0,16,2048,70", "512,1024,16,2048,130"]
    (tables / "attention.csv.gz").write_bytes(gzip.compress("\n".join(attention).encode() + b"\n"))
    (tables / "moe.csv").write_text("tokens,activated_experts,time_us\n64,8,120\n64,32,400\n")
    (tables / "skew.csv").write_text("n\n")
    return root / "profiles"


def write_vidur(root: Path) -> Path:
    """`compute/a100`, `network/a100_dgx` and `history/`; returns the root. Times in milliseconds, sizes in bytes."""
    model = root / "compute" / "a100" / "maker" / "toy"
    network = root / "network" / "a100_dgx"
    for folder in (model, network, root / "history", root / "network" / "h100_dgx"):
        folder.mkdir(parents=True)
    ops = "emb input_layernorm post_attention_layernorm attn_pre_proj attn_rope attn_post_proj mlp_up_proj mlp_act "
    ops += "mlp_down_proj add"
    head = [f"time_stats.{op}.median" for op in ops.split()]
    sizes = "n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    rows = [[*(0.02 + 0.001 * i for i in range(10)), 16, 4, 2048, 5632, 32000, True, 256, tp] for tp in (1, 2)]
    rows.append([*[0.0] * 2, "", *[0.03] * 7, 16, 4, 2048, 5632, 32000, True, 1, 1])
    lines = [",".join(map(str, row)) for row in rows]
    (model / "mlp.csv").write_text("\n".join([",".join(head) + "," + sizes, *lines]) + "\n")
    head_ = "time_stats.attn_prefill.median,time_stats.attn_decode.median,n_embd,n_q_head,n_kv_head,"
    head_ += "num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill,attention_backend"
    chunks = ["0.2,,2048,16,4,2,1,512,1024,True,AttentionBackend.FLASH", ",0.1,2048,16,4,2,32,0,2048,False,x.FLASH"]
    (root / "history" / "a100_attention_16q.csv").write_text("\n".join([head_, *chunks]) + "\n")
    (root / "history" / "a100_cpu_overheads.csv").write_text("x\n")
    head_ = "time_stats.all_reduce.median,rank,num_workers,size,collective,devices_per_node"
    calls = ["0.05,0,8,1048576,all_reduce,8", "0.07,0,8,1048576,all_reduce,8", "3.0,0,16,1048576,all_reduce,8"]
    (network / "all_reduce.csv").write_text("\n".join([head_, *calls]) + "\n")
    return root


def write_splitwise(root: Path) -> Path:
    """`perf_model.csv`, which is returned: five repeats of one point, one of another GPU. Milliseconds."""
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    rows = [f"toy-7b,h100-80gb,512,4,128,{60 + i},{12 + i},1" for i in range(5)]
    path = root / "perf_model.csv"
    path.write_text("\n".join([head, *rows, "toy-7b,a100-80gb,512,4,128,90,20,1"]) + "\n")
    return path
