"""A step that is done many times on fixed buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from privot.runtime.cuda_graphs import capture

WARM = 3  # eager steps before a capture: they fill caches and optimiser state, and are steps of the run like any other


def tuned(device: torch.device) -> AbstractContextManager[Any]:
    """Here convolutions are timed on first use and the quickest way is taken; shapes should repeat.

    Never inside the gate: how long one takes may depend on what is in it, and then so does the rounding of all that follow.
    """
    return (
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True)
        if device.type == "cuda"
        else nullcontext()
    )


class Repeated:
    """Calls ``step``; on a GPU it is captured as one CUDA graph after a few eager runs, and replayed from then on.

    A step reads and writes the same tensors every time and never asks the host. ``generator``, if it draws from one on the device, goes
    on from draw to draw.

    >>> total = torch.zeros(())
    >>> again = Repeated(lambda: total.add_(1), total.device)
    >>> for _ in range(5): again()
    >>> total
    tensor(5.)
    """

    def __init__(
        self,
        step: Callable[[], Any],
        device: torch.device,
        generator: torch.Generator | None = None,
    ):
        self.step = step
        self.device = device
        self.generator = generator
        self.runs = 0
        self.graph: Any = None

    def __call__(self) -> None:
        with tuned(self.device):
            self._run()

    def _run(self) -> None:
        self.runs += 1
        if self.device.type != "cuda" or self.runs <= WARM:
            self.step()
            return
        if self.graph is None:
            graph: Any = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with capture(graph):
                self.step()
            self.graph = graph
        self.graph.replay()
