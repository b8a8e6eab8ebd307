"""Runs the scheduler and block manager of vLLM 0.6.6 from its sources, on a stage set for them.

Real: all of `vllm/core` and `vllm/sequence.py`. Ours: every other module (a mock), and the engine's loop, one step at a
time.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock


class _Struct:
    """msgspec.Struct, as far as vllm/sequence.py needs it."""

    def __init_subclass__(cls, **options):
        dataclasses.dataclass(cls)


class _Device(enum.Enum):
    GPU = enum.auto()
    CPU = enum.auto()


class _Fresh:
    """vLLM's PyObjectCache, which caches nothing here."""

    def __init__(self, build):
        self.get_object = build

    def reset(self):
        pass


class _Inputs:
    """A prompt."""

    prompt, multi_modal_data, multi_modal_placeholders, mm_processor_kwargs, token_type_ids = "", {}, {}, {}, []

    def __init__(self, prompt_token_ids):
        self.prompt_token_ids = prompt_token_ids


OURS = {
    "msgspec": {"Struct": _Struct, "field": dataclasses.field},
    "vllm.inputs": {"SingletonInputsAdapter": _Inputs},
    "vllm.utils": {
        "Device": _Device, "PyObjectCache": _Fresh, "cdiv": lambda a, b: -(-a // b),
        "chunk_list": lambda items, n: (items[i : i + n] for i in range(0, len(items), n)),
    },
    "vllm.sampling_params": {"RequestOutputKind": enum.Enum("RequestOutputKind", "CUMULATIVE DELTA FINAL_ONLY")},
}  # fmt: skip


class _Stage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Leaves the real modules to the path and mocks everything else."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        real = name == "vllm.sequence" or name.startswith("vllm.core")
        if name.split(".")[0] not in ("vllm", "torch", "msgspec") or real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__name__, module.__spec__ = spec.name, spec
        module.__path__ = [str(self.root / spec.name.replace(".", "/"))]
        return module

    def exec_module(self, module):
        for name, ours in OURS.get(module.__name__, {}).items():
            setattr(module, name, ours)


class VllmV0Engine:
    """The sources under `root`; one a process, since modules are global."""

    def __init__(self, root: Path):
        sys.meta_path.insert(0, _Stage(root))
        importlib.import_module("vllm.platforms").current_platform.is_hpu.return_value = False
        self.scheduler = importlib.import_module("vllm.core.scheduler").Scheduler
        self.sequence = importlib.import_module("vllm.sequence")

    def build(self, policy, num_blocks, block_size):
        """A scheduler with `policy`'s options and everything else off."""
        config = SimpleNamespace(
            max_num_batched_tokens=policy.max_num_batched_tokens, max_num_seqs=policy.max_num_seqs, policy="fcfs",
            chunked_prefill_enabled=policy.enable_chunked_prefill, preemption_mode=policy.preemption_mode,
            runner_type="generate", is_multi_step=False, delay_factor=0, num_lookahead_slots=0, num_scheduler_steps=1,
            max_model_len=10**6, send_delta_data=False,
        )  # fmt: skip
        cache = SimpleNamespace(
            num_gpu_blocks=num_blocks, num_cpu_blocks=policy.swap_blocks, block_size=block_size, sliding_window=None,
            is_attention_free=False, enable_prefix_caching=False,
        )  # fmt: skip
        return self.scheduler(config, cache, None)

    def run(self, policy, cost, num_blocks, block_size, rows):
        """Of (arrival, prompt, output, cap) rows: when each request's tokens came, and (decodes, KV tokens, prompt
        tokens) of each step. RuntimeError where vLLM stops."""
        sequence, scheduler = self.sequence, self.build(policy, num_blocks, block_size)
        token_s, steps = [[] for _ in rows], []
        now, sent, copied = 0.0, 0, 0
        while sent < len(rows) or scheduler.has_unfinished_seqs():
            if not scheduler.has_unfinished_seqs():
                now = max(now, rows[sent][0])
            while sent < len(rows) and rows[sent][0] <= now:
                one = sequence.Sequence(sent, list(range(rows[sent][1])), block_size)
                params = SimpleNamespace(n=1, output_kind=None)
                scheduler.add_seq_group(sequence.SequenceGroup(str(sent), [one], now, sampling_params=params))
                sent += 1
            _, out, _ = scheduler.schedule()
            assert not out.ignored_seq_groups
            copied += len(out.blocks_to_swap_in) + len(out.blocks_to_swap_out)
            if not out.scheduled_seq_groups:
                assert out.preempted
                continue
            groups = [(each.seq_group, each.token_chunk_size) for each in out.scheduled_seq_groups]
            before = [group.seqs[0].data.get_num_computed_tokens() for group, _ in groups]
            prompts = out.num_prefill_groups
            chunks = [(n, done) for (_, n), done in zip(groups[:prompts], before[:prompts], strict=True)]
            step = (len(groups) - prompts, sum(before[prompts:]), sum(n for n, _ in chunks))
            now += cost.step_s(chunks, *step[:2]) + cost.swap_block_s * copied
            steps.append(step)
            copied = 0
            for group, n in groups:
                one, number = group.seqs[0], int(group.request_id)
                group.update_num_computed_tokens(n)
                if one.data.get_num_uncomputed_tokens() == 0:
                    token_s[number].append(now)
                    one.append_token_id(7, {7: SimpleNamespace(logprob=0.0)})
                    if len(token_s[number]) == rows[number][2]:
                        one.status = sequence.SequenceStatus.FINISHED_STOPPED
            scheduler.free_finished_seq_groups()
        return token_s, steps
