"""Records written by hand."""

from __future__ import annotations

import json

HEAD = {"servecast_steps": 1, "vllm": "0.19.1", "max_num_seqs": 8, "block_size": 16, "num_gpu_blocks": 101}


def q(request, plan=0, prompt=20, cap=3, **changes):
    """A request that arrives."""
    line = {"reached_s": 0.001 * plan, "noted_s": 100.0 + request, "priority": 0, "kinds": ""} | changes
    return ["q", request, plan, line["reached_s"], prompt, cap, line["noted_s"], line["priority"], line["kinds"]]


def s(step, chunks=(), decodes=0, kv=0, running=1, waiting=0, free=98, lost=(), hits=0, drafts=0, updates=None):
    """A step of a millisecond."""
    at, updates = step / 1000, step if updates is None else updates
    times = [at, at + 0.0001, at + 0.0008, at + 0.0009]
    return ["s", step, updates, *times, list(chunks), decodes, kv, running, waiting, free, list(lost), hits, drafts]


def f(request, plan, output=3, status="length_capped"):
    """A request that is over."""
    return ["f", request, plan, plan - 1, plan / 1000 - 0.0002, output, status]


END = ["e", 1.0, "shutdown"]
LINES = [
    q(0),
    s(0, [[0, 20, 0]]),
    s(1, decodes=1, kv=20),
    s(2, decodes=1, kv=21),
    f(0, 3),
    s(3, running=0, free=100),
    END,
]
"""One request, alone: a record without a fault."""


def text(*lines, head=HEAD):
    """The record of these lines."""
    return "".join(json.dumps(line) + "\n" for line in (head, *lines))
