"""Public snapshots of a few particles during their flow, which a release stores for its report."""

from __future__ import annotations

import torch
from torch import Tensor

from privot.components.latent_space import LatentSpace
from privot.components.transforms import ImageTransform

NUM_SNAPSHOTS = 8  # times at which particles are stored
NUM_PARTICLES = 10  # particles stored at each time
SNAPSHOTS_KEY = "snapshots"  # name of the tensor in a release


class FlowSnapshots:
    """Stores particles at the first, the last and some steps between, more often early in the flow.

    Args:
        steps: Number of steps of the flow.

    Attributes:
        snapshot_steps: Steps after which particles are stored.
        snapshots: Stored points, each [NUM_PARTICLES, dim].

    >>> flow = FlowSnapshots(200)
    >>> flow.snapshot_steps
    [0, 4, 16, 37, 65, 102, 147, 200]
    >>> for step in (0, 1, 4): flow.record(step, torch.zeros(3, 2))
    >>> len(flow.snapshots)
    2
    """

    def __init__(self, steps: int):
        self.snapshot_steps = sorted(
            {round(steps * (index / (NUM_SNAPSHOTS - 1)) ** 2) for index in range(NUM_SNAPSHOTS)}
        )
        self.snapshots: list[Tensor] = []

    def record(self, step: int, points: Tensor) -> None:
        """Store points [count, dim] if a snapshot is due after this number of steps."""
        if step in self.snapshot_steps:
            self.snapshots.append(points[:NUM_PARTICLES].clone())

    def export_images(
        self, space: ImageTransform | LatentSpace, channels: int
    ) -> dict[str, Tensor]:
        """Decode the snapshots for a release.

        Args:
            space: The space of the points.
            channels: Channels of an image.

        Returns:
            Images in half precision [times, particles, channels, height, width], by their name in
            a release; nothing if no snapshot was stored.
        """
        if not self.snapshots:
            return {}
        images = space.decode_point(torch.stack(self.snapshots), channels)
        return {SNAPSHOTS_KEY: images.clamp(0, 1).half()}
