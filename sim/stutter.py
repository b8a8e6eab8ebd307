"""The longest gap between two tokens of each request: how badly its stream stuttered, whatever its mean.

From the log of steps: a request has a token in every step of its replica that decodes, from its first to its last.
Where all that decode wait for prompts, the gap is that between two steps that decode; gaps in which a request alone
was preempted or left out are logged by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.metrics import Floats

SAME_S = 1e-7
"""Times of one step from two logs: within a run of steps they are rounded."""
STRIDE = 2.0**40
"""More than the steps of any replica: what keys of the next one are further on."""


def longest_gaps(requests: Mapping[str, Floats], steps: Mapping[str, Floats], gaps: Mapping[str, Floats]) -> Floats:
    """Seconds, per finished request; NaN for one token, for several samples of a prompt, and where the log of its
    replica does not hold all its tokens (pipelines; a first token that came from another replica)."""
    found = np.full(len(requests["id"]), np.nan)
    columns = ("replica", "step", "steps", "start_s", "end_s", "first_step_s")
    decoding = steps["decodes"] > 0
    rows = {name: steps[name][decoding] for name in columns}
    order = np.lexsort((rows["step"], rows["replica"]))
    rows = {name: column[order] for name, column in rows.items()}
    if not len(order) or not len(found):
        return found
    key = rows["replica"] * STRIDE + rows["step"]
    count, length = rows["steps"], rows["end_s"] - rows["start_s"]
    first_end = rows["start_s"] + rows["first_step_s"]
    lead = np.diff(first_end, prepend=first_end[0])
    lead[1:] = first_end[1:] - rows["end_s"][:-1]  # of another replica's last row it is never asked for
    later = np.where(count > 1, 2 * length / count - rows["first_step_s"], -np.inf)
    longest = np.append(np.maximum(lead, later), -np.inf)
    mine = requests["replica"] * STRIDE
    begin = np.searchsorted(key + count - 1, mine + requests["first_step"], side="right")
    last = np.searchsorted(key, mine + requests["last_step"], side="right") - 1
    known = (requests["samples"] == 1) & (requests["output_tokens"] > 1) & (begin <= last)
    begin, last = np.where(known, begin, 0), np.where(known, last, 0)
    known &= (np.abs(rows["end_s"][last] - requests["finish_s"]) < SAME_S) & (
        rows["replica"][begin] == requests["replica"]
    )
    first = first_end[begin] - requests["first_token_s"]
    known &= first > -SAME_S
    spans = np.stack([begin + 1, last + 1], axis=1).ravel()
    inside = np.where(begin < last, np.maximum.reduceat(longest, spans)[::2], -np.inf)
    result = np.maximum(np.maximum(first, later[begin]), inside)
    found[known] = result[known]
    own = gaps["id"] >= 0
    at = np.searchsorted(requests["id"], gaps["id"][own])
    at = np.minimum(at, len(found) - 1)
    there = (requests["id"][at] == gaps["id"][own]) & known[at]
    np.maximum.at(found, at[there], (gaps["end_s"] - gaps["since_s"])[own][there])
    return found
