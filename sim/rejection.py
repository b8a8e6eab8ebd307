"""Which requests an engine turns away when they arrive, because it could never serve them."""

from __future__ import annotations

from sim.drafts import Drafting
from sim.kvcache import KVCache
from sim.request import Request
from sim.schedulers.policy import Scheduler
from sim.steplog import OVER_KV_CACHE, OVER_MAX_MODEL_LEN, OVER_STEP, PROMPT_TOO_LONG


def rejection_of(
    request: Request, kv: KVCache, scheduler: Scheduler, max_model_len: int, drafting: Drafting | None = None
) -> int:
    """The outcome of a request that can never be served, or 0.

    Unless its policy reserves, that it will never fit the KV cache follows from its true length, which the engine does
    not know: vLLM would let it run and preempt it for ever.
    """
    prompt = request.prompt_tokens
    if prompt >= max_model_len:
        return PROMPT_TOO_LONG
    if prompt > scheduler.longest_prompt:
        return OVER_STEP
    if prompt + request.max_tokens > max_model_len:
        return OVER_MAX_MODEL_LEN
    tokens = prompt + (request.max_tokens if scheduler.reserves else request.output_tokens - 1)
    if drafting is not None and request.output_tokens > 1:
        tokens = min(tokens + drafting.slack, drafting.max_model_len)
    return 0 if kv.fits(prompt, tokens, scheduler.room(kv)) else OVER_KV_CACHE
