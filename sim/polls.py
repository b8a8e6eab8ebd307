"""What an engine learns of transfers of KV, and when: with the output of the first step that begins after their end.

As in vLLM: a worker looks which transfers are over when it has launched a step (`get_finished` in
`v1/worker/kv_connector_model_runner_mixin.py` and `v1/worker/gpu/kv_connector.py`), and the scheduler hears of them
once that step has ended. A step without work is no step: it is over at once. With two batches in flight the step that
looks is launched when the one before it begins. Where the scheduler looks itself before it plans, as SGLang's does, no
step carries what is learned.
"""

from __future__ import annotations

from collections import deque

from sim.request import Request


class Polls:
    """Requests whose transfers are over, on their way to the scheduler of one engine. True while there are some.
    `batches_in_flight` 0: the scheduler looks itself."""

    __slots__ = ("_count", "_ended", "_outputs")

    def __init__(self, batches_in_flight: int) -> None:
        self._outputs: deque[list[Request]] = deque([] for _ in range(batches_in_flight))
        self._ended: list[Request] = []
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def ended(self, request: Request) -> None:
        """The transfer of `request` is over."""
        self._ended.append(request)
        self._count += 1

    def launch(self) -> None:
        """A step is launched, whose worker looks; what has been heard is forgotten."""
        if self._outputs:
            self._outputs.popleft()
            self._outputs.append(self._ended)
            self._ended = []

    def hear(self) -> list[Request]:
        """What the output of the oldest step in flight says."""
        if self._outputs:
            heard, self._outputs[0] = self._outputs[0], []
        else:
            heard, self._ended = self._ended, []
        self._count -= len(heard)
        return heard
