"""CUDA graphs: a step that runs many times is captured once and replayed without Python.

The kernels of a replay are those of the eager step, in the same order and on the same shapes, so
results do not change. What is captured depends on shapes alone, never on values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Eager calls before a capture. They fill caches and optimiser state, and count as steps of the run.
WARMUP_CALLS = 3
MAX_GRAPHS = 8  # graphs of one `GraphCache`; each holds memory on the GPU


@contextmanager
def disable_gc() -> Iterator[None]:
    """Run the garbage collector, then disable it inside the block.

    A graph or kernel that is freed during a capture ends that capture.

    >>> with disable_gc(): gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def capture_graph(graph: Any, **options: Any) -> Iterator[None]:
    """Capture what is launched inside the block into a graph, without executing it.

    Args:
        graph: A ``torch.cuda.CUDAGraph``.
        **options: Keyword arguments of ``torch.cuda.graph``.
    """
    with disable_gc(), torch.cuda.graph(graph, **options):
        yield


def enable_cudnn_benchmark(device: torch.device) -> AbstractContextManager[Any]:
    """Let cuDNN time its convolution algorithms on first use and take the fastest.

    Shapes should repeat. Never use this inside the gate: the time of an algorithm may depend on the
    records, and then the rounding of every later result depends on them too.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True)


class GraphedStep:
    """Calls a step; on a GPU it is captured after some eager calls and replayed from then on.

    The step must read and write the same tensors on every call and must not wait for the GPU.

    Args:
        step: The function to call.
        device: Where its tensors are. On a CPU every call is eager.
        generator: The random generator on the device that the step draws from, if any. Its state
            advances from replay to replay.

    >>> total = torch.zeros(())
    >>> add_one = GraphedStep(lambda: total.add_(1), total.device)
    >>> for _ in range(5): add_one()
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
        self.num_runs = 0
        self.graph: Any = None

    def __call__(self) -> None:
        with enable_cudnn_benchmark(self.device):
            self._run()

    def _run(self) -> None:
        self.num_runs += 1
        if self.device.type != "cuda" or self.num_runs <= WARMUP_CALLS:
            self.step()
            return
        if self.graph is None:
            graph: Any = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with capture_graph(graph):
                self.step()
            self.graph = graph
        self.graph.replay()


class GraphCache:
    """Calls a step with arguments; keeps one graph for each kind of step and shape of arguments.

    A step returns whether it succeeded and nothing else. It writes into tensors that stay in
    place, and it must not wait for the GPU. Only the values of tensor arguments may change from
    call to call.

    Args:
        device: Where the tensors are. On a CPU every call is eager.

    >>> total, cache = torch.zeros(2), GraphCache(torch.device("cpu"))
    >>> for _ in range(5): _ = cache(lambda step: total.add_(step), "add", torch.ones(2))
    >>> total
    tensor([5., 5.])
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: dict[Any, _CachedGraph] = {}
        self._pool: Any = None

    def __call__(self, step: Callable[..., Any], step_id: Any, *args: Any) -> Any:
        """Run the step.

        Args:
            step: The function to call.
            step_id: What else the step depends on. Calls with an equal ``step_id`` and arguments of
                equal shapes share one graph.
            *args: Arguments of the step.

        Returns:
            What the step returned; True where a graph was replayed.
        """
        signature = (
            (arg.shape, arg.dtype, arg.device) if isinstance(arg, Tensor) else arg for arg in args
        )
        key = (step_id, *signature)
        try:
            cached = self._graphs.get(key)
        except TypeError:  # an unhashable argument cannot be compared with that of another call
            return step(*args)
        if cached is None:
            if len(self._graphs) == MAX_GRAPHS:
                return step(*args)
            if self._device.type == "cuda" and self._pool is None:
                # One memory pool for all graphs: they never run at the same time.
                self._pool = torch.cuda.graph_pool_handle()
            cached = self._graphs[key] = _CachedGraph(step, args, self._device, self._pool)
        return cached(args)


class _CachedGraph:
    """One step on argument buffers that stay in place."""

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], device: torch.device, pool: Any
    ):
        self._step = step
        self._device = device
        self._pool = pool
        self._num_calls = 0
        self._buffers = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
        self._graph: Any = None

    def __call__(self, args: tuple[Any, ...]) -> Any:
        for buffer, value in zip(self._buffers, args, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value)
        self._num_calls += 1
        if self._device.type == "cuda" and self._num_calls == WARMUP_CALLS + 1:
            self._graph = self._capture()
        if self._graph is None:
            return self._step(*self._buffers)
        self._graph.replay()
        return True  # the eager calls succeeded, or there would be no graph

    def _capture(self) -> Any:
        """Capture the step; None if that is impossible, and then every call is eager."""
        graph: Any = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those of torch.distributed, may use the GPU meanwhile.
            with capture_graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(*self._buffers)
        except Exception:  # a capture executes nothing, so nothing has to be undone
            return None
        return graph
