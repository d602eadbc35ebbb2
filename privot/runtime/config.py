"""Where a run computes, and how many records it processes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from privot.errors import SettingError
from privot.runtime.process_group import read_torchrun_rank

MAX_CHUNK_SIZE = 2**20  # records at a time whose float64 sum is exact by a wide margin
CPU_CHUNK_SIZE = 1000  # records at a time on a CPU, unless `Runtime.microbatch_size` says otherwise
GPU_CHUNK_SIZE = 4000


@dataclass(frozen=True)
class Runtime:
    """The device and the chunk size of a run.

    No field changes a plan, an event or the distribution of a query result.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda`` or one GPU such as ``cuda:0``.
        microbatch_size: Records that are processed at a time; None: 1000, or 4000 on a GPU.
        cuda_graphs: Whether training steps of shards run as CUDA graphs
            (`privot.runtime.cuda_graphs.GraphCache`); None: on a GPU.

    Raises:
        SettingError: If the device does not exist or the microbatch size is out of range.
    """

    device: str = "auto"
    microbatch_size: int | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        if self.microbatch_size is not None and not 1 <= self.microbatch_size <= MAX_CHUNK_SIZE:
            raise SettingError(
                f"microbatch={self.microbatch_size}: give a number from 1 to {MAX_CHUNK_SIZE}."
            )
        if ":" in self.device and read_torchrun_rank()[1] > 1:
            raise SettingError(
                f"device={self.device!r}: torchrun assigns a GPU to each process. "
                "Use auto, cuda or cpu."
            )
        if self.device != "auto":
            self._check_device()
        if self.torch_device.index is not None and self.torch_device.type == "cuda":
            if self.torch_device.index >= torch.cuda.device_count():
                raise SettingError(
                    f"{self.torch_device} does not exist. Start at most as many processes on a "
                    "machine as it has GPUs, or use --device cpu."
                )
            # CUDA graphs and fused optimiser steps run on the current device.
            torch.cuda.set_device(self.torch_device)

    def _check_device(self) -> None:
        try:
            if torch.empty(1, device=self.device).device.type not in ("cpu", "cuda"):
                raise RuntimeError
        except (RuntimeError, AssertionError):
            raise SettingError(
                f"device={self.device!r} does not exist. "
                "Use auto or cpu, or a GPU that this machine has."
            ) from None

    @property
    def torch_device(self) -> torch.device:
        """The device; under torchrun each process has the GPU of its local rank."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        _, world_size, local_rank = read_torchrun_rank()
        return torch.device(f"cuda:{local_rank}" if name == "cuda" and world_size > 1 else name)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether training steps of shards are captured as CUDA graphs."""
        return self.torch_device.type == "cuda" if self.cuda_graphs is None else self.cuda_graphs

    @property
    def chunk_size(self) -> int:
        """Records that are processed at a time."""
        default = GPU_CHUNK_SIZE if self.torch_device.type == "cuda" else CPU_CHUNK_SIZE
        return self.microbatch_size or default
