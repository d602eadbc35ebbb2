"""Lessons of shards as CUDA graphs: what a lesson launches is written down once and launched again, without Python in between.

On a GPU, unless ``Runtime(compile=False)``. The kernels are those of the plain way, in the same order and on the same shapes, so
states do not change, and what is written down depends on shapes alone, never on what records show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from privot.runtime.cuda_graphs import capture

WARM = 3  # lessons before one is written down: they fill caches, and are lessons like any other
MOST = 8  # kinds of lessons that are written down; each holds its memory


class Replayed:
    """Calls ``lesson(*given)``, of which only tensors may change from call to call; ``kind`` says what else it depends on.

    A lesson says whether it went well and gives nothing back: it writes into tensors of its own, which stay where they are, and never
    asks the host.

    >>> total, replayed = torch.zeros(2), Replayed(torch.device("cpu"))
    >>> for _ in range(5): _ = replayed(lambda step: total.add_(step), "add", torch.ones(2))
    >>> total
    tensor([5., 5.])
    """

    def __init__(self, device: torch.device):
        self._device, self._kinds, self._pool = device, {}, None  # type: tuple[torch.device, dict[Any, _Lesson], Any]

    def __call__(self, lesson: Callable[..., Any], kind: Any, *given: Any) -> Any:
        key = (
            kind,
            *(
                (each.shape, each.dtype, each.device) if isinstance(each, Tensor) else each
                for each in given
            ),
        )
        try:
            known = self._kinds.get(key)
        except (
            TypeError
        ):  # something that cannot be compared: then nobody knows whether it is the same
            return lesson(*given)
        if known is None:
            if len(self._kinds) == MOST:
                return lesson(*given)
            if self._device.type == "cuda" and self._pool is None:
                self._pool = (
                    torch.cuda.graph_pool_handle()
                )  # one for all: they never run at the same time
            known = self._kinds[key] = _Lesson(lesson, given, self._device, self._pool)
        return known(given)


class _Lesson:
    """One kind, on buffers that stay."""

    def __init__(
        self, lesson: Callable[..., Any], given: tuple[Any, ...], device: torch.device, pool: Any
    ):
        self._lesson = lesson
        self._device = device
        self._pool = pool
        self._runs = 0
        self._buffers = [
            each.detach().clone() if isinstance(each, Tensor) else each for each in given
        ]
        self._graph: Any = None

    def __call__(self, given: tuple[Any, ...]) -> Any:
        for buffer, value in zip(self._buffers, given, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value)
        self._runs += 1
        if self._device.type == "cuda" and self._runs == WARM + 1:
            self._graph = self._written()
        if self._graph is None:
            return self._lesson(*self._buffers)
        self._graph.replay()
        return True  # as it was the first times

    def _written(self) -> Any:
        """None where it cannot be written down: then it is done the plain way, now and later."""
        graph: Any = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those that watch the wires between processes, may go on meanwhile.
            with capture(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._lesson(*self._buffers)
        except Exception:  # nothing has run yet
            return None
        return graph
