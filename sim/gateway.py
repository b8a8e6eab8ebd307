"""What a gateway turns away before any replica sees it: too many requests that are not over yet, or too long a prompt.

It counts what it has let in, wherever that waits or runs. Requests that begin anew after a failure have been let in.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.changes import Limits
from sim.clock import Clock
from sim.request import Request
from sim.steplog import OVER_OUTSTANDING, OVER_PROMPT_TOKENS, Log


class Gateway:
    """Lets requests in (`submit`), as far as `limits` go; `replicas()`: how many take requests now. `on_finish(request,
    now)` hears of those that are turned away."""

    def __init__(
        self,
        limits: Limits,
        clock: Clock,
        log: Log,
        submit: Callable[[Request], None],
        on_finish: Callable[[Request, float], None],
        replicas: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._log = log
        self._submit = submit
        self._on_finish = on_finish
        self._replicas = replicas
        self._outstanding = 0

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        limits, now = self._limits, self._clock.now
        if request.prompt_tokens > limits.prompt_tokens:
            request.outcome = OVER_PROMPT_TOKENS
        elif self._outstanding >= min(limits.outstanding, limits.per_replica * self._replicas()):
            request.outcome = OVER_OUTSTANDING
        else:
            self._outstanding += 1
            self._submit(request)
            return
        self._log.record(-1, request, request.output_tokens)
        # By an event of its own: a client whose requests are all turned away would otherwise recurse.
        self._clock.call_at(now, lambda _: self._on_finish(request, now))

    def over(self) -> None:
        """One that was let in is over."""
        self._outstanding -= 1
