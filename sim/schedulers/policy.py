"""What a replica asks of a scheduler policy. A policy inherits `Scheduler` and says what is different about it; `plan`
alone must be said."""

from __future__ import annotations

from sim.batch import Batch
from sim.kvcache import KVCache
from sim.request import NEVER, Request
from sim.state import State


class Scheduler:
    """A policy. Each replica has a copy of its own, which may remember things from plan to plan."""

    __slots__ = ()

    cache: type[KVCache] = KVCache
    """How it takes blocks."""

    prefix_tree = False
    """Whether what it caches of prefixes is a radix tree (`sim.radixcache`), which it tells of what it takes."""

    reserves = False
    """Whether a request is admitted with room for its prompt and its `max_tokens`: without so much it is rejected."""

    overruns = False
    """Whether an asynchronous engine plans a request once more that the step in progress brings to its `max_tokens`."""

    longest_prompt = NEVER
    """Tokens of the longest prompt that is not rejected."""

    scheduler_recv_interval = 1
    """How many decode steps lie between two plans that know of those who have arrived; after any other step, or none,
    the next plan does."""

    remedy = "lower the number of requests that run at once"
    """What to set where its requests wait for blocks for ever."""

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def mixes(self) -> bool:
        """Whether those that decode are in the steps that read prompts, or wait for the next one."""
        return True

    @property
    def swaps(self) -> bool:
        """Whether KV of those that are preempted goes to the memory of the host."""
        return False

    @property
    def by_priority(self) -> bool:
        """Whether requests wait by their priority, not as they came."""
        return False

    @property
    def pulled_first(self) -> bool:
        """Whether a request whose KV has come from elsewhere waits in front of all others."""
        return False

    def plan(self, state: State) -> Batch:
        """The next step's batch, its blocks taken."""
        raise NotImplementedError

    def arrival_matters(self, state: State) -> bool:
        """Whether one more waiting request could change the next plan of a replica that only decodes."""
        return True

    def wants(self, request: Request) -> int:
        """For how many tokens there must be blocks before a waiting request gets any."""
        return request.target

    def room(self, kv: KVCache) -> int:
        """Blocks that one request can have at most: one that needs more is rejected when it arrives."""
        return kv.usable
