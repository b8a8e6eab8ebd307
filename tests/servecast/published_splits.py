"""Deployments with prefill and decode apart that others measured, beside ours.
`python -m tests.servecast.published_splits` prints the table of docs/transfer.md.

What a source leaves open is assumed, as each case says, so sizes are compared where it states enough, else directions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.yamlfile import dump_yaml

Summary = dict[str, Any]


def run(scenario: Mapping[str, Any], *overrides: str) -> Summary:
    """The summary of a scenario."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.yaml"
        file.write_text(dump_yaml(scenario))
        if "config" in scenario.get("model", ""):
            (Path(folder) / "config.json").write_text(json.dumps(GPTQ))
        return simulate(load_scenario(file, overrides)).summary()


def fixed(prompt: int, output: int) -> dict[str, Any]:
    """Lengths."""
    return {"prompt": {"kind": "fixed", "tokens": prompt}, "output": {"kind": "fixed", "tokens": output}}


# D-03: kvcache-ai/Mooncake (Apache-2.0), vLLM's page: Qwen2.5-7B-Instruct-GPTQ-Int4 on A10, 4 prompts/s of 2,048
# tokens, 512 out, 200 of them; one prefill and one decode instance of tp 2, and two instances that do both: tokens/s,
# ms of E2E, TTFT (mean, p99), ITL (mean, p99). Assumed: vLLM 0.19, the link. The page's is an older vLLM.
GPTQ = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "float16",
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}  # fmt: skip
D03 = {"split": (1215, 11519, 1112, 2726, 17.06, 19.72), "two": (1223, 11683, 310, 721, 25.74, 294.89)}
KEYS = ("output_throughput", "mean_e2el_ms", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms")


def d03() -> dict[str, tuple[float, ...]]:
    """Ours, under `KEYS`."""
    scenario = {
        "model": "./config.json", "engine": {"preset": "vllm-0.19", "max_model_len": 16384},
        "cluster": {"split": {"connector": "mooncake", "link": "ethernet-100"},
                    "pools": [{"role": role, "gpu": "a10", "tp": 2} for role in ("prefill", "decode")]},
        "workload": {"num_requests": 200, "arrivals": {"kind": "poisson", "rate": 4}, "lengths": fixed(2048, 512)},
    }  # fmt: skip
    two = ['cluster.pools=[{"gpu":"a10","tp":2,"replicas":2}]', "cluster.split=null"]
    runs = {"split": run(scenario), "two": run(scenario, *two)}
    return {name: tuple(summary[key] for key in KEYS) for name, summary in runs.items()}


# D-06: vllm-project/vllm#51919, #50913: three prefill and one decode instance in a node, NIXL, prompts of about 5,000
# tokens: ms from the end of prefill to the client's first token, by block size. Assumed: Llama-3.1-8B, tp 2, H100.
D06 = {16: 263.0, 64: 197.0}


def d06(rate: float = 4) -> dict[int, float]:
    """Ours."""
    scenario = {
        "model": "llama-3.1-8b", "engine": {"preset": "vllm-0.24"},
        "cluster": {"router": "least-outstanding",
                    "pools": [{"role": "prefill", "gpu": "h100-sxm", "tp": 2, "replicas": 3},
                              {"role": "decode", "gpu": "h100-sxm", "tp": 2}]},
        "workload": {"num_requests": 300, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": fixed(5000, 200)},
    }  # fmt: skip
    found = {}
    for size in D06:
        handed = run(scenario, f"engine.block_size={size}")["handed_over"]
        stages = ("decode_queue", "link_queue", "transfer", "first_decode")
        found[size] = sum(handed[f"mean_{stage}_ms"] for stage in stages)
    return found


# D-12: haydeniw/dynamo#107: DeepSeek-V3, one prefill and one decode server of 8 H200 each, SGLang, tp 8, pages of 16,
# NIXL, 1,000 tokens in, 200 out: s of TTFT by concurrency. Assumed: the network adapter; each client goes on four
# times. SGLang puts 8,192 tokens into a step by itself; `one` is with one prompt a step.
D12 = {1: 0.1, 2: 0.2, 5: 1.0, 10: 2.0, 50: 6.5, 100: 10.0, 250: 25.0}


def d12(one: bool = False, concurrency: tuple[int, ...] = tuple(D12)) -> dict[int, Summary]:
    """Ours, by concurrency."""
    scenario = {
        "model": "deepseek-v3", "engine": {"preset": "sglang-0.5", "page_size": 16},
        "cluster": {"split": {"link": "rdma-400", "connector": "sglang-nixl"},
                    "pools": [{"role": role, "gpu": "h200-sxm", "tp": 8} for role in ("prefill", "decode")]},
        "workload": {"num_requests": 1, "closed_loop": {"concurrency": 1}, "lengths": fixed(1000, 200)},
    }  # fmt: skip
    if one:
        scenario["engine"]["chunked_prefill_size"] = 1008  # type: ignore[index]
    return {
        n: run(scenario, f"workload.closed_loop.concurrency={n}", f"workload.num_requests={max(30, 4 * n)}")
        for n in concurrency
    }


# D-17: SemiAnalysisAI/InferenceX#2249: Kimi-K2.5 FP4 on B200, 8,192 in, 1,024 out, prefill instances of dp 4 and decode
# instances of dp 8 with experts dealt out: which of them at which concurrency. Kimi-K2.5 is not modelled: here it is
# DeepSeek-V3.1 NVFP4, of the same family, with vLLM.
D17 = {16: "1P4D", 308: "1P1D", 615: "2P1D", 1127: "3P1D", 2151: "4P1D"}
LADDER = ("1P4D", "1P1D", "2P1D", "3P1D", "4P1D")


def d17(concurrency: int, layouts: tuple[str, ...] = LADDER) -> dict[str, Summary]:
    """Ours, by layout."""
    scenario = {
        "model": "deepseek-v3.1-nvfp4", "engine": {"preset": "vllm-0.24", "max_num_seqs": 512},
        "cluster": {"router": "least-outstanding", "split": {"link": "rdma-400", "router": "least-outstanding"},
                    "pools": [{"role": "prefill", "gpu": "b200-sxm", "dp": 4, "ep": True},
                              {"role": "decode", "gpu": "b200-sxm", "dp": 8, "ep": True}]},
        "workload": {"num_requests": max(60, 2 * concurrency), "closed_loop": {"concurrency": concurrency},
                     "lengths": fixed(8192, 1024)},
    }  # fmt: skip
    return {
        name: run(scenario, f"cluster.pools.0.replicas={name[0]}", f"cluster.pools.1.replicas={name[2]}")
        for name in layouts
    }


def most(found: Mapping[str, Summary]) -> str:
    """The layout with the most tokens a second and GPU."""
    return max(found, key=lambda name: float(found[name]["output_throughput"]) / found[name]["gpus"])


# D-19: vllm-project/vllm#46498: Qwen2.5-32B, a connector of its own, 512 in, 128 out, 200 requests at 10/s: requests/s,
# ms of TTFT (mean, median, p99) and TPOT. Neither the GPUs nor the connector are stated; here: two A100, NIXL.
D19 = (3.34, 7968, 10459, 22666, 147.48)


def d19() -> Summary:
    """Ours."""
    pools = [{"role": role, "gpu": "a100-sxm"} for role in ("prefill", "decode")]
    return run({
        "model": "qwen2.5-32b", "engine": {"preset": "vllm-0.19"},
        "cluster": {"split": {"link": "rdma-200"}, "pools": pools},
        "workload": {"num_requests": 200, "arrivals": {"kind": "poisson", "rate": 10}, "lengths": fixed(512, 128)},
    })  # fmt: skip


def rows() -> Iterator[str]:
    """The table, as the lines of its Markdown."""
    yield "| case | published | ours |"
    yield "|---|---|---|"
    ours = d03()
    for name, title in (("split", "1P1D"), ("two", "two instances")):
        both = [("{:,.0f} tok/s, E2E {:,.0f} ms, TTFT {:,.0f} ({:,.0f}), ITL {:.1f} ({:.1f})").format(*figures)
                for figures in (D03[name], ours[name])]  # fmt: skip
        yield f"| D-03, {title}, mean (p99) | {both[0]} | {both[1]} |"
    handed = d06()
    both = [f"{found[16]:.0f}, {found[64]:.0f} ms" for found in (D06, handed)]
    yield f"| D-06, hand-over with blocks of 16, 64 | {both[0]} | {both[1]} |"
    batched, one = d12(), d12(one=True)
    for n, seconds in D12.items():
        means = [f"{found[n]['mean_ttft_ms'] / 1e3:.2f}" for found in (batched, one)]
        yield f"| D-12, TTFT at concurrency {n} | {seconds} s | {means[0]} s; {means[1]} s with one prompt a step |"
    for n, layout in D17.items():
        found = d17(n)
        quick = min(found, key=lambda name: float(found[name]["mean_tpot_ms"]))
        best = f"most tokens a GPU: {most(found)}; lowest TPOT: {quick}"
        yield f"| D-17, the layout at concurrency {n:,} | {layout} | {best} |"
    s = d19()
    found = (s["request_throughput"], *(s[f"{stat}_ttft_ms"] for stat in ("mean", "median", "p99")), s["mean_tpot_ms"])
    both = ["{:.1f} requests/s, TTFT {:,.0f} / {:,.0f} / {:,.0f} ms, TPOT {:.0f}".format(*f) for f in (D19, found)]
    yield f"| D-19, mean / median / p99 | {both[0]} | {both[1]} |"


if __name__ == "__main__":
    print(*rows(), sep="\n")
