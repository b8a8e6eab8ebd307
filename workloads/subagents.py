"""Agents that hand work out: a step's answer spawns sub-agents, and the next step waits for all of them.

As in agents that fork themselves: a sub-agent's prompt is all that its parent has said and read so far, the answer that
spawned it, and a brief of its own. The parent's next prompt has the answers of all its sub-agents behind its own. A
sub-agent is one request. It knows nothing of caches.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.generate import stream
from workloads.kinds import KindOf, Spec, call_kind
from workloads.lengths import LENGTHS
from workloads.parameters import BlockTokens, Tokens, TokensOrNone
from workloads.people import THINK, TURNS
from workloads.rag import ArrivalsOf, LengthsOf
from workloads.said import said_blocks
from workloads.trace import Trace, Turns

TimeOf = Annotated[Spec, KindOf(THINK)]
CountOf = Annotated[Spec, KindOf(TURNS)]


def sub_agents(
    n: int,
    seed: int,
    *,
    arrivals: ArrivalsOf,
    steps: CountOf,
    children: CountOf,
    tool_time: TimeOf,
    task: LengthsOf,
    output: LengthsOf,
    brief: LengthsOf,
    child_output: LengthsOf,
    system_tokens: TokensOrNone = 0,
    context: Tokens | None = None,
    block_tokens: BlockTokens = 16,
) -> Trace:
    """n agents, which begin as `arrivals` says and take `steps` steps; after each but the last one come `children`
    sub-agents, whose prompts end with a `brief` and who answer with `child_output` tokens. Every request comes
    tool_time after the last answer that it waits for. context: an agent ends before the step that would need more
    tokens than this for its prompt and answer, or whose sub-agents before it would.
    """
    count = call_kind(TURNS, steps, n, stream(seed, "turns"))
    first = np.cumsum(count) - count
    total, agent = int(count.sum()), np.repeat(np.arange(n), count)
    born = call_kind(TURNS, children, total, stream(seed, "children"))
    born[np.cumsum(count) - 1] = 0
    parent = np.repeat(np.arange(total), born)
    brief_tokens = call_kind(LENGTHS, brief, parent.size, stream(seed, "brief"))
    child_tokens = call_kind(LENGTHS, child_output, parent.size, stream(seed, "child answer"))
    task_tokens = call_kind(LENGTHS, task, n, stream(seed, "task"))
    answer = call_kind(LENGTHS, output, total, stream(seed, "answer"))
    added = answer + np.bincount(parent, child_tokens, total).astype(np.int64)
    said = np.cumsum(added) - added
    prompt = system_tokens + task_tokens[agent] + said - said[first][agent]
    child_prompt = (prompt + answer)[parent] + brief_tokens

    if context is not None:
        childs = np.zeros(total, dtype=np.int64)
        np.maximum.at(childs, parent, child_prompt + child_tokens)
        too_long = (prompt + answer > context) | np.append(False, childs[:-1] > context)
        over = np.cumsum(too_long)
        fits = over - (over - too_long)[first][agent] == 0
        if not fits.any():
            raise ServecastError(f"context: no first step fits {context} tokens; raise it, or shorten the prompts")
    else:
        fits = np.ones(total, dtype=bool)
    ends = fits & ~np.append(fits[1:] & (agent[1:] == agent[:-1]), False)  # the last step of an agent spawns nobody
    alive = (fits & ~ends)[parent]

    # A row a step, then its children; sorted by the times at which they come if answers take no time.
    own_s = call_kind(THINK, tool_time, total, stream(seed, "think"))
    child_s = call_kind(THINK, tool_time, parent.size, stream(seed, "child think"))
    own_s[first] = 0.0
    think_s = np.concatenate([own_s, child_s])
    begins = call_kind(ARRIVALS, arrivals, n, stream(seed, "arrivals"))
    longest = np.zeros(total)
    np.maximum.at(longest, parent, child_s)
    waited = np.cumsum(own_s + np.append(0.0, longest[:-1]))
    step_s = begins[agent] + waited - waited[first][agent]
    arrival_s = np.concatenate([step_s, step_s[parent] + child_s])
    kept = np.flatnonzero(np.concatenate([fits, alive]))
    dropped = total + parent.size - kept.size
    level = np.concatenate([np.zeros(total), np.ones(parent.size)])
    step = np.concatenate([np.arange(total), parent])
    order = kept[np.lexsort((level[kept], step[kept], arrival_s[kept]))]
    position = np.full(total + parent.size + 1, -1, dtype=np.int64)
    position[order] = np.arange(order.size)
    previous = np.concatenate([np.where(np.arange(total) == first[agent], -1, np.arange(total) - 1), parent])
    session = np.concatenate([agent, n + np.arange(parent.size)])
    prompts = np.concatenate([prompt, child_prompt])[order]
    outputs = np.concatenate([answer, child_tokens])[order]
    known = np.concatenate([prompt, (prompt + answer)[parent]])[order]  # what the agent has of it, too
    return Trace(
        arrival_s[order],
        prompts,
        outputs,
        outputs,
        source=f"generated: {n:,} agents with sub-agents, {arrivals['kind']} arrivals, seed {seed}",
        prefix=said_blocks(known, np.concatenate([agent, agent[parent]])[order], system_tokens, block_tokens),
        turns=Turns(position[previous[order]], think_s[order], session[order]),
        dropped={"steps beyond the context": dropped} if dropped else {},
        notes=(
            f"{int((order < total).sum()):,} steps of agents, {int((order >= total).sum()):,} of sub-agents; "
            f"{known.sum() / prompts.sum():.1%} of the prompt tokens are what an agent has said and read",
            "arrival times of later steps leave out how long answers take; a replay as sessions does not use them",
        ),
    )
